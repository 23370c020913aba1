#include "autograd/direct.h"

#include <torch/csrc/autograd/variable.h>

#include "kernel_ops/framework/gradient.h"

namespace tandem {

bool has_tangent(const at::Tensor& tensor) {
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(
      tensor.unsafeGetTensorImpl()->autograd_meta());
  if (meta == nullptr) return false;
  // Nearly every tensor is settled by this test: it has no tangent and is no view, which may have
  // the tangent of its base.
  return (meta->fw_grad_ != nullptr || meta->is_view_) && kernel_ops::has_tangent(tensor);
}

}  // namespace tandem
