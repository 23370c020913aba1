// What activations and gated units apply, by the text that kernel ops take: a row of
// tandem/activations.h, behind colons the numbers of a unit that has any, and how a and b lie.
//
//   silu    silu:interleave=32    clamped_swiglu:limit=7:alpha=1.702:glu_linear_offset=1
#pragma once

#include "kernel_ops/framework/kernel_op.h"
#include "kernels/activation.h"

namespace tandem::kernel_ops {

struct ActivationRow;

class ActivationFunction {
 public:
  /// Throws c10::ValueError for a text that is none: of no gated unit a row's name alone.
  ActivationFunction(std::string_view text, bool is_gated);

  const kernels::Function& kernel() const { return kernel_; }

  /// Throws c10::ValueError unless a gated unit's z has an a and a b.
  void check(std::string_view op, const Tensor& z) const;
  /// y of this z.
  ResultSpec y_like(const Tensor& z, at::ScalarType dtype, bool wanted = true) const;

  /// y of a wide z, in differentiable operations. Throws c10::TypeError where z is whole numbers
  /// and y has fractions.
  Tensor value(const Tensor& z) const;
  /// The gradient of z.
  Tensor grad(const Tensor& grad_y, const Tensor& z) const;

 private:
  std::pair<Tensor, Tensor> parts(const Tensor& z) const;

  const ActivationRow* row_;
  bool is_gated_;
  kernels::Function kernel_;
};

}  // namespace tandem::kernel_ops
