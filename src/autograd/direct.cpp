#include "autograd/direct.h"

#include <torch/csrc/autograd/variable.h>

#include "kernel_ops/framework/gradient.h"

namespace tandem {

bool has_tangent(const at::Tensor& tensor) {
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(
      tensor.unsafeGetTensorImpl()->autograd_meta());
  if (meta == nullptr) return false;
  // Nearly always none: then it is seen at once. A view may have that of its base.
  return (meta->fw_grad_ != nullptr || meta->is_view_) && kernel_ops::has_tangent(tensor);
}

}  // namespace tandem
