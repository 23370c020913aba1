// Checks of kernel ops that have no derivative.
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

/// Whether the call comes from below autograd: then the caller provides the gradient itself.
inline bool is_below_autograd() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
}

/// Throws c10::NotImplementedError if a gradient of x is recorded, or if forward-mode
/// differentiation follows x, also without recorded gradients: its tangent would be lost silently.
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
