// What kernel ops without a derivative say to those who ask for one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <string_view>

namespace tandem::kernel_ops {

/// Whether forward-mode differentiation follows x.
inline bool has_tangent(const at::Tensor& x) {
  return x.unsafeGetTensorImpl()->autograd_meta() != nullptr && x._fw_grad(/*level=*/0).defined();
}

/// Whether autograd has been passed: whoever calls has the gradient in hand.
inline bool is_below_autograd() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
}

/// Throws c10::NotImplementedError where a gradient of x is recorded, or forward-mode
/// differentiation follows x: its tangent would be lost in silence, also without gradients.
inline void check_no_gradient(std::string_view op, const at::Tensor& x) {
  if (is_below_autograd()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(!(c10::GradMode::is_enabled() && x.requires_grad()), op,
                              ": expected a tensor that needs no gradient, got one that requires "
                              "it. Rounding has no useful ",
                              "derivative: quantize inside a pipeline, whose backward passes the "
                              "gradient through, or detach x.");
  TORCH_CHECK_NOT_IMPLEMENTED(!kernel_ops::has_tangent(x), op,
                              ": expected a tensor without a tangent, got one under forward-mode "
                              "differentiation. Rounding has no useful ",
                              "derivative: leave the autocast region, or detach x.");
}

}  // namespace tandem::kernel_ops
