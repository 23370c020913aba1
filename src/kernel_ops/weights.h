// The codes of weights, made once per outermost autocast region: a mutating kernel op that decides
// by a stamp whether to make them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "kernel_ops/format.h"
#include "tandem/export.h"

namespace tandem::kernel_ops {

/// Numbers in a stamp: storage, data pointer, version counter, version, optimizer epoch, autocast
/// region, what the codes were made with, what the weight's bytes were.
inline constexpr int64_t kStampSize = 8;

/// The tensors of a workspace, in this order: those of the group that its quantizer writes, then
/// the stamp.
enum WorkspacePart : size_t { stamp_part = group_size, workspace_size };
inline constexpr const char* kWorkspaceNames[workspace_size] = {
    "row_codes",    "row_scale",   "row_amax", "column_codes",
    "column_scale", "column_amax", "amax",     "stamp"};

/// A workspace as it is passed around: undefined where the weight's readers need no codes of that
/// direction.
using Workspace = std::array<at::Tensor, workspace_size>;

/// Which tensors the workspace of a weight has whose codes are read in these directions: `mask` is
/// that of a group.
inline bool has_part(const Quantizer& quantizer, GroupMask mask, size_t part) {
  return part == stamp_part || is_written(quantizer, written_of(quantizer, mask), part);
}
/// A fresh one, whose stamp says that it holds nothing.
Workspace make_workspace(const at::Tensor& weight, const Quantizer& quantizer, GroupMask mask);

/// Writes codes, scales and amax of `weight` into the workspace unless its stamp says that they are
/// there already: the same storage, address, layout and dtype, the same version of the same
/// counter, optimizer epoch and quantizer, and in forward the same autocast region. On the CPU the
/// bytes of the weight must be the same too (kernels/digest.h): FSDP, collectives, fused optimizers
/// and `.data` write without moving a version. Outside any region forward always writes. `backward`
/// accepts the codes of any region: they belong to the weight that forward used. Storages and
/// counters have numbers of their own, which no later one gets: an address comes back once its
/// object is freed.
///
/// Shapes: as Quantize of the weight writes them; stamp [kStampSize] int64 on the CPU, zeros at
///         first.
/// Throws: as check_workspace.
void refresh_weight(const at::Tensor& weight, const Workspace& workspace,
                    const Quantizer& quantizer, bool backward);

/// A workspace is written in place, by whoever passed it: it must have the shapes and dtypes above,
/// lie where the weight lies, be contiguous and no negated view, carry no gradient, and share no
/// memory, neither among its parts nor with the weight. Throws c10::ValueError.
void check_workspace(const at::Tensor& weight, const Workspace& workspace,
                     const Quantizer& quantizer);

/// Weights on an accelerator may have been written in a way that moves no version counter: every
/// cached code is made again at its next use. torch.optim optimizers call this by a hook; others
/// that write `.data` inside one autocast region must.
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
