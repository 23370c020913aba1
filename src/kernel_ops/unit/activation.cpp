#include "kernel_ops/unit/activation.h"

#include <ATen/TensorOperators.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/unit/activation_function.h"

namespace tandem::kernel_ops {

namespace {

constexpr const char* kScaled = "scaled_activation";

Tensor widened(const Tensor& z) { return z.to(wide(z.scalar_type())); }

Tensor column_sums(const Tensor& grad_z) {
  return grad_z.reshape_symint({-1, grad_z.sym_size(-1)})
      .sum(0, /*keepdim=*/false, wide(grad_z.scalar_type()))
      .to(grad_z.scalar_type());
}

/// A scale per row, shaped to broadcast over x.
Tensor per_row(const Tensor& scales, const Tensor& x) {
  c10::SymDimVector sizes = sizes_of(x);
  sizes.back() = 1;
  return scales.reshape_symint(sizes);
}

}  // namespace

Tensor activation(std::string_view name, const Tensor& z) {
  return ActivationFunction(name, /*is_gated=*/false).value(z);
}

Specs<2> ActivationForward::shapes(const Args& args) {
  const ActivationFunction function(args.activation, args.is_gated);
  const char* const op = args.is_gated ? "glu" : "activation";
  function.check(op, args.x);
  if (args.bias) check_last_dim(op, args.x, *args.bias, "bias");
  const auto dtype = sum_dtype(args.x, args.bias);
  return {like(args.x, dtype, args.output_mask[z]),
          function.y_like(args.x, dtype, args.output_mask[y])};
}

Results<2> ActivationForward::reference(const Args& args) {
  const ActivationFunction function(args.activation, args.is_gated);
  const Tensor sum = args.bias ? args.x + *args.bias : args.x;
  Results<2> results{masked_out(sum), masked_out(sum)};
  if (args.output_mask[z]) results[z] = args.bias ? sum : sum.clone();  // must not alias an operand
  if (args.output_mask[y]) results[y] = function.value(widened(sum)).to(sum.scalar_type());
  return results;
}

Specs<3> ActivationBackward::shapes(const Args& args) {
  const Tensor &grad = args.grad_y, &source = args.z;
  const ActivationFunction function(args.activation, args.is_gated);
  function.check("glu_backward", source);
  const at::ScalarType dtype = source.scalar_type();
  ResultSpec of_y = function.y_like(source, dtype, args.output_mask[y]);
  if (!args.is_gated) check_same_shape("activation_backward", grad, "grad_y", source, "z");
  TORCH_CHECK_VALUE(grad.sym_sizes() == c10::SymIntArrayRef(of_y.sizes),
                    "glu_backward: expected grad_y with half the last dimension of z, ",
                    source.sym_sizes(), ", got ", grad.sym_sizes(),
                    ". Pass the gradient of what the forward op returned.");
  const bool sums = args.output_mask[grad_bias];
  return {like(source, dtype, args.output_mask[grad_z]), std::move(of_y),
          ResultSpec{{sums ? source.sym_size(-1) : c10::SymInt(0)}, dtype, sums}};
}

Results<3> ActivationBackward::reference(const Args& args) {
  const ActivationFunction function(args.activation, args.is_gated);
  const Tensor source = widened(args.z);
  const at::ScalarType dtype = args.z.scalar_type();
  const Tensor grad = function.grad(args.grad_y.to(source.scalar_type()), source).to(dtype);
  const auto& mask = args.output_mask;
  return {mask[grad_z] ? grad : masked_out(grad),
          mask[y] ? function.value(source).to(dtype) : masked_out(grad),
          mask[grad_bias] ? column_sums(grad) : masked_out(grad)};
}

void check_scales(const Tensor& x, const Tensor& scales) {
  TORCH_CHECK_VALUE(x.dim() >= 1, kScaled, ": expected x with at least 1 dimension, got a scalar. ",
                    "Pass x.reshape({1}) if one element is meant.");
  TORCH_CHECK_VALUE(scales.sym_numel() == rows_of(x), kScaled, ": expected scales with ",
                    rows_of(x), " elements, one per row of x ", x.sym_sizes(), ", got shape ",
                    scales.sym_sizes(), ". Pass a tensor of the shape of x without its last ",
                    "dimension.");
}

Specs<1> ScaledActivationForward::shapes(const Args& args) {
  const ActivationFunction function(args.activation, args.is_gated);
  check_scales(args.x, args.scales);
  function.check(kScaled, args.x);
  return {function.y_like(args.x, args.x.scalar_type())};
}

Results<1> ScaledActivationForward::reference(const Args& args) {
  const Tensor value = ActivationFunction(args.activation, args.is_gated).value(widened(args.x));
  return {(value * per_row(args.scales, args.x).to(value.scalar_type())).to(args.x.scalar_type())};
}

Specs<3> ScaledActivationBackward::shapes(const Args& args) {
  const Tensor &x = args.x, &scales = args.scales;
  const ActivationFunction function(args.activation, args.is_gated);
  check_scales(x, scales);
  function.check(kScaled, x);
  ResultSpec of_y = function.y_like(x, x.scalar_type(), args.output_mask[y]);
  TORCH_CHECK_VALUE(args.grad_y.sym_sizes() == c10::SymIntArrayRef(of_y.sizes), kScaled,
                    ": expected grad_y of the shape of y, ", c10::SymIntArrayRef(of_y.sizes),
                    ", got ", args.grad_y.sym_sizes(),
                    ". Pass the gradient of what the forward op returned.");
  return {like(x, x.scalar_type(), args.output_mask[grad_x]),
          like(scales, scales.scalar_type(), args.output_mask[grad_scales]), std::move(of_y)};
}

Results<3> ScaledActivationBackward::reference(const Args& args) {
  const Tensor &x = args.x, &scales = args.scales;
  const auto& mask = args.output_mask;
  const ActivationFunction function(args.activation, args.is_gated);
  const Tensor source = widened(x), grad = args.grad_y.to(source.scalar_type()),
               factor = per_row(scales, x).to(source.scalar_type());
  Results<3> results{masked_out(x), masked_out(scales), masked_out(x)};
  if (mask[grad_x]) results[grad_x] = function.grad(grad * factor, source).to(x.scalar_type());
  if (!mask[grad_scales] && !mask[y]) return results;
  const Tensor value = function.value(source);
  if (mask[grad_scales])
    results[grad_scales] =
        (grad * value).sum(-1).reshape_symint(scales.sym_sizes()).to(scales.scalar_type());
  if (mask[y]) results[y] = (value * factor).to(x.scalar_type());
  return results;
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<ActivationForward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, ActivationForward::cpu,
                 /*makes_codes=*/true}});
  register_kernel_op<ActivationBackward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, ActivationBackward::cpu,
                 /*makes_codes=*/true}});
  register_kernel_op<ScaledActivationForward>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, ScaledActivationForward::cpu}});
  register_kernel_op<ScaledActivationBackward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic>::these,
                 ScaledActivationBackward::cpu}});
}

}  // namespace tandem::kernel_ops
