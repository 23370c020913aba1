// What kernel ops without a derivative say to those who ask for one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <string_view>

namespace tandem::kernel_ops {

/// Throws c10::NotImplementedError where a gradient of x is recorded.
inline void check_no_gradient(std::string_view op, const at::Tensor& x) {
  // Below autograd whoever calls has the gradient in hand.
  const bool is_recorded =
      c10::GradMode::is_enabled() &&
      !c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
  TORCH_CHECK_NOT_IMPLEMENTED(!(is_recorded && x.requires_grad()), op,
                              ": expected a tensor that needs no gradient, got one that requires "
                              "it. Rounding has no useful ",
                              "derivative: quantize inside a pipeline, whose backward passes the "
                              "gradient through, or detach x.");
}

}  // namespace tandem::kernel_ops
