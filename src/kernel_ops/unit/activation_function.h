// Activations and gated units by the text that kernel ops take: the name of a row of
// tandem/activations.h, the numbers of a unit that has any, and the layout of a and b, separated by
// colons.
//
//   silu    silu:interleave=32    clamped_swiglu:limit=7:alpha=1.702:glu_linear_offset=1
#pragma once

#include "kernel_ops/framework/kernel_op.h"
#include "kernels/activation.h"

namespace tandem::kernel_ops {

struct ActivationRow;

class ActivationFunction {
 public:
  /// Throws c10::ValueError for a text that is not valid. If not gated, only a row's name is valid.
  ActivationFunction(std::string_view text, bool is_gated);

  const kernels::Function& kernel() const { return kernel_; }

  /// Throws c10::ValueError unless z can be split into a and b, if the unit is gated.
  void check(std::string_view op, const Tensor& z) const;
  /// The spec of y for this z.
  ResultSpec y_like(const Tensor& z, at::ScalarType dtype, bool wanted = true) const;

  /// y for z in a wide dtype, in differentiable operations. Throws c10::TypeError if z holds
  /// integers and y has fractions.
  Tensor value(const Tensor& z) const;
  /// The gradient of z.
  Tensor grad(const Tensor& grad_y, const Tensor& z) const;

 private:
  std::pair<Tensor, Tensor> parts(const Tensor& z) const;

  const ActivationRow* row_;
  kernels::Function kernel_;
};

}  // namespace tandem::kernel_ops
