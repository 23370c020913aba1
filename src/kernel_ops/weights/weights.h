// The codes of weights, made where they are not there: which codes serve a weight, when they are
// made again and why, all in one place.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// Numbers in a stamp: those of Stamp (weight_signs.h).
inline constexpr int64_t kStampSize = 13;

/// The tensors of a workspace, in this order: those of the group that its quantizer writes, then
/// the stamp.
enum WorkspacePart : size_t { stamp_part = group_size, workspace_size };
inline constexpr const char* kWorkspaceNames[workspace_size] = {
    "row_codes",    "row_scale",   "row_amax", "column_codes",
    "column_scale", "column_amax", "amax",     "stamp"};

/// A weight as it lies in memory: one tensor, or pieces that are one behind the other along their
/// first dimension (kernel_ops/elementwise/join.h).
using Pieces = at::TensorList;

/// A workspace as it is passed around: undefined where the weight's readers need no codes of that
/// direction.
using Workspace = std::array<at::Tensor, workspace_size>;

/// Which tensors the workspace of a weight has whose codes are read in these directions: `mask` is
/// that of a group.
inline bool has_part(const Quantizer& quantizer, GroupMask mask, size_t part) {
  return part == stamp_part || is_written(quantizer, written_of(quantizer, mask), part);
}

/// What a caller says of a weight: nothing, so that every write is seen; that this is the first
/// micro-batch of a step, so that its codes are made; that nobody has written it since they were.
enum class Said : int64_t { nothing, first_microbatch, unchanged };
/// What callers in this thread say.
TANDEM_API Said said_now();
TANDEM_API void say(Said said);
/// Says it in the stamp of a workspace, of its next call in forward.
struct SayOfWeight {
  static constexpr const char* kName = "say_of_weight_";
  static constexpr std::array<const char*, 0> kResults{};
  static constexpr bool kIsUnseenByAutograd = true;
  struct Args {
    Tensor& stamp;
    int64_t said;
    TANDEM_ARGUMENTS(stamp, said)
  };
  static Specs<0> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<0> reference(const Args& args) { return made_by_cpu<SayOfWeight>(args); }
};
/// To be called where that is the first micro-batch and nothing quantizes these weights: codes of
/// them that are held for other calls are not believed then without a look at the bytes.
TANDEM_API void note_first_microbatch(at::TensorList weights);

/// How a call has come by the codes of a weight: found, or why they were made.
enum class CodesWere : int64_t {
  unused,
  found,
  first_used,
  lacking_a_direction,
  of_another_recipe,
  of_another_tensor,
  of_another_version,
  before_an_optimizer_step,
  of_other_bytes,
  of_another_region,
  outside_any_region,
  not_comparable,
  of_the_last_step,
  recorded,
};
/// "first use".
TANDEM_API std::string_view text_of(CodesWere codes);

/// A fresh one, whose stamp says that it holds nothing, and why there was none.
Workspace make_workspace(Pieces weight, const Quantizer& quantizer, GroupMask mask,
                         CodesWere why = CodesWere::first_used);

/// `workspace` where it can hold these codes of `weight`, those of further directions beside them;
/// else a fresh one, whose stamp says why. Whose codes it holds is asked when they are used.
Workspace fitting_workspace(Pieces weight, const Quantizer& quantizer, GroupMask mask,
                            const Workspace& workspace);

/// Writes codes, scales and amax of `weight` into the workspace unless they are there already.
///
/// They are there, on the CPU, if they were made of the same bytes (kernels/digest.h) in the same
/// layout and dtype by the same quantizer, whoever wrote them, in whatever region: FSDP,
/// collectives, fused optimizers and `.data` write without moving a version. Elsewhere that would
/// wait for the device: there, if storage, address, layout, version and its counter, optimizer
/// epoch and quantizer are the same, and in forward the autocast region, outside of which it always
/// writes. `backward` accepts the codes of any region: they belong to the weight that forward used.
/// Storages and counters have numbers of their own, which no later one gets: an address comes back
/// once its object is freed.
/// Of pieces the signs and the bytes of all count, and they are joined only where codes are made.
/// While the device records a graph (CUDA graphs) it always writes, and what is recorded does so
/// whenever it runs; the stamp then says that it holds nothing.
/// Where the caller says Said::unchanged, those signs are enough, of any region and without a look
/// at the bytes; where it says Said::first_microbatch, forward writes. Backward goes by what its
/// forward was told.
///
/// Shapes: as Quantize of the weight writes them; stamp [kStampSize] int64 on the CPU, zeros at
///         first.
/// Throws: as check_workspace, and as check_pieces.
struct RefreshWeight {
  static constexpr const char* kName = "refresh_weight_";
  static constexpr std::array<const char*, 0> kResults{};
  static constexpr bool kOnManyDevices = true, kIsUnseenByAutograd = true;
  struct Args {
    Pieces weight;
    std::optional<Tensor>&row_codes, &row_scale, &row_amax, &column_codes, &column_scale,
        &column_amax;
    Tensor &amax, &stamp;
    const Quantizer& quantizer;
    bool backward;
    TANDEM_ARGUMENTS(weight, row_codes, row_scale, row_amax, column_codes, column_scale,
                     column_amax, amax, stamp, quantizer, backward)
  };
  static Specs<0> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<0> reference(const Args& args) { return made_by_cpu<RefreshWeight>(args); }
};
void refresh_weight(Pieces weight, const Workspace& workspace, const Quantizer& quantizer,
                    bool backward);

/// The codes of `weight` in the directions of `mask`, by these rules: those in `workspace`, written
/// again where they are not its codes; in a fresh workspace where that does not fit
/// (fitting_workspace), or there is none. What the weight is kept in, and whether it is frozen,
/// sharded or recomputed, does not matter: the caller asks for the directions that are read.
///
/// Returns where they are, for the next call, and how they came there: as it is in the stamp.
/// Throws: c10::NotImplementedError where a gradient of the weight is recorded.
struct WeightCodes {
  Workspace workspace;
  CodesWere were = CodesWere::unused;
};
TANDEM_API WeightCodes quantize_weight(const at::Tensor& weight, const Quantizer& quantizer,
                                       GroupMask mask = {true, true, true},
                                       const Workspace& workspace = {}, Said said = Said::nothing);

/// The codes of the directions in `wanted`, as tensors of their own: copies of those in the
/// workspace where they are the codes of `weight`, else made. What backward of a traced plan reads:
/// it mutates nothing, and a compiler takes what is read beside a gradient for no part of forward.
struct CodesOfWeight {
  static constexpr const char* kName = "weight_codes";
  static constexpr std::array kResults{"row_codes",    "row_scale",    "row_amax",
                                       "column_codes", "column_scale", "column_amax"};
  static constexpr bool kOnManyDevices = true, kIsUnseenByAutograd = true;
  struct Args {
    Pieces weight;
    std::optional<Tensor> row_codes, row_scale, row_amax, column_codes, column_scale, column_amax;
    const Tensor &amax, &stamp, &gradient;
    const Quantizer& quantizer;
    std::array<bool, 2> wanted;
    TANDEM_ARGUMENTS(weight, row_codes, row_scale, row_amax, column_codes, column_scale,
                     column_amax, amax, stamp, gradient, quantizer, wanted)
  };
  static Specs<group_amax> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<group_amax> reference(const Args& args) {
    return made_by_cpu<CodesOfWeight>(args);
  }
};
std::array<at::Tensor, group_amax> weight_codes(Pieces weight, const Workspace& workspace,
                                                const at::Tensor& gradient,
                                                const Quantizer& quantizer,
                                                std::array<bool, 2> wanted);

/// A number of the memory that a tensor views, which no other memory gets, then or later; 0 of a
/// tensor without memory.
TANDEM_API int64_t number_of_memory(const at::Tensor& tensor);

/// Whether a tensor is shaped as the stamp of a workspace is.
TANDEM_API bool is_stamp(const at::Tensor& tensor);
/// How forward and backward have last come by the codes in a workspace.
TANDEM_API std::array<CodesWere, 2> last_uses(const at::Tensor& stamp);

/// A workspace is written in place, by whoever passed it: it must have the shapes and dtypes above,
/// lie where the weight lies, be contiguous and no negated view, carry no gradient, and share no
/// memory, neither among its parts nor with the weight. Throws c10::ValueError, and as
/// check_pieces.
void check_workspace(Pieces weight, const Workspace& workspace, const Quantizer& quantizer);

/// Weights on an accelerator may have been written in a way that moves no version counter: every
/// cached code is made again at its next use. torch.optim optimizers call this by a hook; others
/// that write `.data` inside one autocast region must. On the CPU it ends what was said to be
/// unchanged.
TANDEM_API void weights_changed();

/// The number of the outermost autocast region that is in force in this thread; 0 outside any.
int64_t current_region();
TANDEM_API void set_region(int64_t number);
/// A number that no other outermost region of the process has.
TANDEM_API int64_t new_region();
/// The last of these numbers.
int64_t last_region();

/// How often codes have been made and found valid, for tests and `explain`.
struct RefreshCounts {
  int64_t made = 0, reused = 0;
};
TANDEM_API RefreshCounts refresh_counts();

}  // namespace tandem::kernel_ops
