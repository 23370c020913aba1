// The codes of weights, cached in workspaces: which codes serve a weight, and when and why they are
// requantized. weight_workspace.cpp decides which workspace holds the codes of a weight, and
// weight_signs.cpp whether these codes are still those of the weight.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// The size of a stamp: one number per field of Stamp (weight_signs.h).
inline constexpr int64_t kStampSize = 13;

/// The tensors of a workspace in their order: those of the group that its quantizer writes, then
/// the stamp.
enum WorkspacePart : size_t { stamp_part = group_size, workspace_size };
inline constexpr const char* kWorkspaceNames[workspace_size] = {
    "row_codes",    "row_scale",   "row_amax", "column_codes",
    "column_scale", "column_amax", "amax",     "stamp"};

/// A weight in memory: one tensor, or pieces to join along their first dimension
/// (kernel_ops/elementwise/join.h).
using Pieces = at::TensorList;

/// The tensors of a workspace; undefined for a direction in which no reader needs codes.
using Workspace = std::array<at::Tensor, workspace_size>;

/// Whether the workspace of a weight has this part if `mask` says which parts of a group are read.
inline bool has_part(const Quantizer& quantizer, GroupMask mask, size_t part) {
  return part == stamp_part || is_written(quantizer, written_of(quantizer, mask), part);
}

/// What a caller declares about a weight. `nothing`: every write is detected. `first_microbatch`: a
/// step begins, so codes are made. `unchanged`: nobody has written the weight since its codes were
/// made.
enum class Said : int64_t { nothing, first_microbatch, unchanged };
/// What callers in this thread declare.
TANDEM_API Said said_now();
TANDEM_API void say(Said said);
/// Declares something in the stamp of a workspace, for the workspace's next call in forward.
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
/// Must be called for weights that a first micro-batch does not quantize: signs of their cached
/// codes become outdated, so only equal bytes can still confirm these.
TANDEM_API void note_first_microbatch(at::TensorList weights);

/// How a call obtained the codes of a weight: it found them, or why it made them.
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
/// The reason as `explain` prints it: "first use".
TANDEM_API std::string_view text_of(CodesWere codes);

/// A new workspace. Its stamp says that it holds nothing, and why it was created.
Workspace make_workspace(Pieces weight, const Quantizer& quantizer, GroupMask mask,
                         CodesWere why = CodesWere::first_used);

/// `workspace` if it has room for these codes of `weight`, and perhaps for those of further
/// directions; else a new one whose stamp says why. Whose codes it holds is checked when they are
/// used.
Workspace fitting_workspace(Pieces weight, const Quantizer& quantizer, GroupMask mask,
                            const Workspace& workspace);

/// Writes codes, scales and amax of `weight` into the workspace, unless it holds them already.
///
/// On the CPU it holds them if they were made from equal bytes (kernels/digest.h) in equal layout
/// and dtype by an equal quantizer, in whatever region. Versions do not suffice: FSDP, collectives,
/// fused optimizers and `.data` write a weight without changing its version. On an accelerator the
/// host would have to wait for the bytes. There the workspace holds them if storage, address,
/// layout, version counter, version, optimizer epoch and quantizer are unchanged, and in forward
/// also the autocast region; outside of a region forward always writes. `backward` accepts codes of
/// any region, because they belong to the weight that forward used. Storages and version counters
/// are identified by numbers that are never reused, because an address is reused after its object
/// is freed.
///
/// The signs and bytes of all pieces count, and pieces are joined only to make codes. While the
/// device records a graph (CUDA graphs), the op always writes, and so does every replay; the stamp
/// then says that the workspace holds nothing. If the caller declares Said::unchanged, unchanged
/// signs suffice, in any region and without reading bytes. If it declares Said::first_microbatch,
/// forward writes. Backward follows what was declared to its forward.
///
/// Shapes: as Quantize writes them for the weight; stamp [kStampSize] int64 on the CPU, initially
///         zeros.
/// Throws: as check_workspace and check_pieces.
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

/// The codes of a weight.
struct WeightCodes {
  /// Where the codes are, for the next call.
  Workspace workspace;
  /// How the call obtained them, as the stamp says.
  CodesWere were = CodesWere::unused;
};
/// The codes of `weight` in the directions of `mask`, by the rules of RefreshWeight: in
/// `workspace`, requantized if it does not hold them, or in a new one if it does not fit
/// (fitting_workspace). They do not depend on how the weight is stored, or on whether it is frozen,
/// sharded or recomputed.
///
/// Throws: c10::NotImplementedError if a gradient of the weight is recorded, or if its codes depend
///         on more than the weight.
TANDEM_API WeightCodes quantize_weight(const at::Tensor& weight, const Quantizer& quantizer,
                                       GroupMask mask = {true, true, true},
                                       const Workspace& workspace = {}, Said said = Said::nothing);

/// The codes of the directions in `wanted`, as new tensors: copies from the workspace if it holds
/// the codes of `weight`, else made now. Backward of a traced plan reads them: the op mutates
/// nothing, and because it reads a gradient, no compiler moves it into forward.
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

/// A number that identifies the memory of a tensor and is never reused; 0 for a tensor without
/// memory.
TANDEM_API int64_t number_of_memory(const at::Tensor& tensor);

/// Whether a tensor has the dtype and shape of a stamp.
TANDEM_API bool is_stamp(const at::Tensor& tensor);
/// How forward and backward have last obtained the codes in a workspace.
TANDEM_API std::array<CodesWere, 2> last_uses(const at::Tensor& stamp);

/// Checks a workspace before it is written in place: its tensors must have the shapes and dtypes
/// above, lie on the weight's device, be contiguous and no negated views, require no gradient, and
/// share no memory with each other or with the weight. Throws c10::ValueError, and what
/// check_pieces throws.
void check_workspace(Pieces weight, const Workspace& workspace, const Quantizer& quantizer);

/// Must be called after weights on an accelerator were written without a change of their version
/// counters: every cached code is requantized at its next use. A hook calls it for torch.optim
/// optimizers; other code that writes `.data` within one autocast region must call it. On the CPU
/// it ends what was declared unchanged.
TANDEM_API void weights_changed();

/// The number of the outermost autocast region of this thread; 0 outside any.
int64_t current_region();
TANDEM_API void set_region(int64_t number);
/// A number for an outermost region, unique in the process.
TANDEM_API int64_t new_region();
/// The last number that new_region returned.
int64_t last_region();

/// How often codes were made and how often they were found valid, for tests and `explain`.
struct RefreshCounts {
  int64_t made = 0, reused = 0;
};
TANDEM_API RefreshCounts refresh_counts();

}  // namespace tandem::kernel_ops
