#include "kernel_ops/unit/scaled_activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/unit/activation_function.h"

namespace tandem::kernel_ops {

namespace {

constexpr const char* kOp = "scaled_activation";

/// One value per row, shaped to broadcast over x.
Tensor per_row(const Tensor& scales, const Tensor& x) {
  c10::SymDimVector sizes = sizes_of(x);
  sizes.back() = 1;
  return scales.reshape_symint(sizes);
}

at::ScalarType wide_dtype(const Tensor& x) { return wide(x.scalar_type()); }
}  // namespace

void check_scales(const Tensor& x, const Tensor& scales) {
  TORCH_CHECK_VALUE(x.dim() >= 1, kOp, ": expected x with at least 1 dimension, got a scalar. ",
                    "Pass x.reshape({1}) if one element is meant.");
  TORCH_CHECK_VALUE(scales.sym_numel() == rows_of(x), kOp, ": expected scales with ", rows_of(x),
                    " elements, one per row of x ", x.sym_sizes(), ", got shape ",
                    scales.sym_sizes(), ". Pass a tensor of the shape of x without its last ",
                    "dimension.");
}

Specs<1> ScaledActivationForward::shapes(const Tensor& x, const Tensor& scales,
                                         std::string_view activation, bool is_gated) {
  const ActivationFunction function(activation, is_gated);
  check_scales(x, scales);
  function.check(kOp, x);
  return {function.y_like(x, x.scalar_type(), true)};
}

void ScaledActivationForward::cpu(const Tensor& x, const Tensor& scales,
                                  std::string_view activation, bool is_gated, Results<1>& results) {
  kernels::cpu::scaled_forward(ActivationFunction(activation, is_gated).kernel(), is_gated,
                               RowsIn(x), VectorIn(scales), rows_out(results[0]));
}

Results<1> ScaledActivationForward::reference(const Tensor& x, const Tensor& scales,
                                              std::string_view activation, bool is_gated) {
  const Tensor value = ActivationFunction(activation, is_gated).value(x.to(wide_dtype(x)));
  return {(value * per_row(scales, x).to(value.scalar_type())).to(x.scalar_type())};
}

Specs<3> ScaledActivationBackward::shapes(const Tensor& grad_y, const Tensor& x,
                                          const Tensor& scales, std::string_view activation,
                                          bool is_gated, std::array<bool, 3> output_mask) {
  const ActivationFunction function(activation, is_gated);
  check_scales(x, scales);
  function.check(kOp, x);
  const c10::SymDimVector sizes = function.y_like(x, x.scalar_type(), true).sizes;
  TORCH_CHECK_VALUE(grad_y.sym_sizes() == c10::SymIntArrayRef(sizes), kOp,
                    ": expected grad_y of the shape of y, ", c10::SymIntArrayRef(sizes), ", got ",
                    grad_y.sym_sizes(), ". Pass the gradient of what the forward op returned.");
  return {like(x, x.scalar_type(), output_mask[0]),
          like(scales, scales.scalar_type(), output_mask[1]),
          function.y_like(x, x.scalar_type(), output_mask[2])};
}

void ScaledActivationBackward::cpu(const Tensor& grad_y, const Tensor& x, const Tensor& scales,
                                   std::string_view activation, bool is_gated, std::array<bool, 3>,
                                   Results<3>& results) {
  // The kernel always writes grad_x.
  const Tensor grad_x = results[0].defined() ? results[0] : at::empty(x.sizes(), x.options());
  if (results[1].defined() && x.numel() == 0) results[1].zero_();
  kernels::cpu::scaled_backward(ActivationFunction(activation, is_gated).kernel(), is_gated,
                                RowsIn(grad_y), RowsIn(x), VectorIn(scales), rows_out(grad_x),
                                vector_out(results[1]), rows_out(results[2]));
}

Results<3> ScaledActivationBackward::reference(const Tensor& grad_y, const Tensor& x,
                                               const Tensor& scales, std::string_view activation,
                                               bool is_gated, std::array<bool, 3> output_mask) {
  const ActivationFunction function(activation, is_gated);
  const Tensor source = x.to(wide_dtype(x)), grad = grad_y.to(source.scalar_type()),
               factor = per_row(scales, x).to(source.scalar_type());
  Results<3> results{masked_out(x), masked_out(scales), masked_out(x)};
  if (output_mask[0]) results[0] = function.grad(grad * factor, source).to(x.scalar_type());
  if (!output_mask[1] && !output_mask[2]) return results;
  const Tensor value = function.value(source);
  if (output_mask[1])
    results[1] = (grad * value).sum(-1).reshape_symint(scales.sym_sizes()).to(scales.scalar_type());
  if (output_mask[2]) results[2] = (value * factor).to(x.scalar_type());
  return results;
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<ScaledActivationForward>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, ScaledActivationForward::cpu}});
  register_kernel_op<ScaledActivationBackward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic>::these,
                 ScaledActivationBackward::cpu}});
}

}  // namespace tandem::kernel_ops
