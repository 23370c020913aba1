// The tensors of a workspace: their allocation, and the checks before they are written.

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "kernel_ops/elementwise/join.h"
#include "kernel_ops/weights/weight_signs.h"

namespace tandem::kernel_ops {

GroupMask mask_of(const Workspace& workspace) {
  return {workspace[row_codes].defined(), workspace[column_codes].defined(),
          workspace[group_amax].defined()};
}

Workspace make_workspace(Pieces weight, const Quantizer& quantizer, GroupMask mask, CodesWere why) {
  const c10::InferenceMode no_inference(false);  // the workspace must serve in every mode
  Workspace workspace;
  const auto specs = group_specs("refresh_weight_", like_joined(weight).sym_sizes(), std::nullopt,
                                 quantizer, mask);
  for (size_t part = 0; part < group_size; ++part)
    if (has_part(quantizer, mask, part))
      workspace[part] = at::empty(C10_AS_INTARRAYREF_SLOW(specs[part].sizes),
                                  weight[0]
                                      .options()
                                      .dtype(specs[part].dtype)
                                      .memory_format(at::MemoryFormat::Contiguous)
                                      .requires_grad(false));
  workspace[stamp_part] = at::zeros({kStampSize}, at::kLong);
  workspace[stamp_part].mutable_data_ptr<int64_t>()[in_forward] = static_cast<int64_t>(why);
  return workspace;
}

Workspace fitting_workspace(Pieces weight, const Quantizer& quantizer, GroupMask mask,
                            const Workspace& workspace) {
  const at::Tensor& stamp = workspace[stamp_part];
  CodesWere why = CodesWere::first_used;
  if (stamp.defined()) {
    const auto specs = group_specs("quantize_weight", like_joined(weight).sym_sizes(), std::nullopt,
                                   quantizer, mask);
    bool has_all = true, fits = true;
    for (size_t part = 0; part < group_size; ++part) {
      if (!has_part(quantizer, mask, part)) continue;
      const at::Tensor& tensor = workspace[part];
      has_all &= tensor.defined();
      fits &= tensor.defined() && tensor.scalar_type() == specs[part].dtype &&
              tensor.sym_sizes() == c10::SymIntArrayRef(specs[part].sizes) &&
              tensor.device() == weight[0].device();
    }
    if (fits) return workspace;
    const int64_t by = stamp.const_data_ptr<int64_t>()[made_by];
    why = by != 0 && by != hash_of(quantizer) ? CodesWere::of_another_recipe
          : has_all                           ? CodesWere::of_another_tensor
                                              : CodesWere::lacking_a_direction;
  }
  return make_workspace(weight, quantizer, mask, why);
}

void check_workspace(Pieces weight, const Workspace& workspace, const Quantizer& quantizer) {
  TORCH_CHECK_VALUE(!weight.empty(),
                    "refresh_weight_: expected the pieces of a weight, got none. "
                    "Pass one at least.");
  const GroupMask mask = mask_of(workspace);
  const auto specs = group_specs("refresh_weight_", like_joined(weight).sym_sizes(), std::nullopt,
                                 quantizer, mask);
  const auto is_there = [&](size_t part) {
    return has_part(quantizer, mask, part) || workspace[part].defined();
  };
  for (size_t part = 0; part < workspace_size; ++part) {
    if (!is_there(part)) continue;
    const at::Tensor& tensor = workspace[part];
    const char* name = kWorkspaceNames[part];
    const bool is_stamp = part == stamp_part;
    const at::ScalarType dtype = is_stamp ? at::kLong : specs[part].dtype;
    const c10::SymInt stamp_size = kStampSize;
    const c10::SymIntArrayRef sizes =
        is_stamp ? c10::SymIntArrayRef(stamp_size) : c10::SymIntArrayRef(specs[part].sizes);
    const bool is_meta = weight[0].is_meta() && tensor.defined() && tensor.is_meta();
    // The host reads the stamp.
    const c10::Device device = is_stamp && !is_meta ? c10::Device(at::kCPU) : weight[0].device();
    TORCH_CHECK_VALUE(tensor.defined() && tensor.scalar_type() == dtype &&
                          tensor.sym_sizes() == sizes && tensor.device() == device,
                      "refresh_weight_: expected ", name, " of shape ", sizes, ", ", dtype, ", on ",
                      device, ", as the weight's workspace, got ",
                      tensor.defined()
                          ? tensor.toString() + " of shape " + c10::str(tensor.sym_sizes())
                          : "an undefined tensor",
                      ". Allocate the workspace again: the weight may have changed.");
    TORCH_CHECK_VALUE(
        tensor.is_contiguous() && !tensor.requires_grad(), "refresh_weight_: expected ", name,
        " contiguous and without a gradient, got strides ", tensor.sym_strides(),
        " and requires_grad=", tensor.requires_grad(), ". Allocate the workspace for this weight.");
    TORCH_CHECK_VALUE(!tensor.is_neg(), "refresh_weight_: expected ", name,
                      " as it lies in memory, got a negated view ",
                      "(is_neg). Allocate the workspace by itself.");
  }
  // Tensors with symbolic sizes have no memory.
  const auto has_memory = [&](size_t part) {
    return is_there(part) && !workspace[part].unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  for (size_t part = 0; part < workspace_size; ++part) {
    if (!has_memory(part)) continue;
    bool is_shared = std::ranges::any_of(
        weight, [&](const at::Tensor& piece) { return workspace[part].is_alias_of(piece); });
    for (size_t other = 0; other < workspace_size; ++other)
      is_shared |=
          other != part && has_memory(other) &&
          at::get_overlap_status(workspace[part], workspace[other]) != at::MemOverlapStatus::No;
    TORCH_CHECK_VALUE(!is_shared || workspace[part].sym_numel() == 0, "refresh_weight_: expected ",
                      kWorkspaceNames[part],
                      " in memory of its own, got some that another part of the ",
                      "workspace or the weight shares. Allocate each part by itself.");
  }
}

bool is_stamp(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong && tensor.dim() == 1 &&
         tensor.sym_size(0) == kStampSize && tensor.is_contiguous();
}

}  // namespace tandem::kernel_ops
