#include "kernel_ops/unit/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/unit/activation_function.h"

namespace tandem::kernel_ops {

namespace {

Tensor widened(const Tensor& z) { return z.to(wide(z.scalar_type())); }

ResultSpec columns_of(const Tensor& z, bool wanted) {
  if (!wanted) return {{0}, z.scalar_type(), false};
  return {{z.sym_size(-1)}, z.scalar_type(), true};
}

Tensor biased(const Tensor& x, const std::optional<Tensor>& bias) { return bias ? x + *bias : x; }
Tensor column_sums(const Tensor& grad_z) {
  return grad_z.reshape_symint({-1, grad_z.sym_size(-1)})
      .sum(0, /*keepdim=*/false, wide(grad_z.scalar_type()))
      .to(grad_z.scalar_type());
}

/// A fresh tensor: a result must not be an alias of an operand.
Tensor fresh(const Tensor& result, const Tensor& operand) {
  return result.is_same(operand) ? result.clone() : result;
}

/// Kernels always write y.
Tensor or_scratch(const Tensor& result, const Tensor& x, const ResultSpec& spec) {
  return result.defined() ? result : at::empty_symint(spec.sizes, x.options().dtype(spec.dtype));
}

/// Kernels always write grad_z: column sums are of grad_z as rounded.
Tensor or_scratch(const Tensor& result, const Tensor& z) {
  return result.defined() ? result : at::empty(z.sizes(), z.options());
}

Results<2> forward_reference(const ActivationFunction& function, const Tensor& x,
                             const std::optional<Tensor>& bias, std::array<bool, 2> output_mask) {
  const Tensor z = biased(x, bias);
  return {output_mask[0] ? fresh(z, x) : masked_out(z),
          output_mask[1] ? function.value(widened(z)).to(z.scalar_type()) : masked_out(z)};
}

Results<3> backward_reference(const ActivationFunction& function, const Tensor& grad_y,
                              const Tensor& z, std::array<bool, 3> output_mask) {
  const Tensor source = widened(z);
  const Tensor grad_z = function.grad(grad_y.to(source.scalar_type()), source).to(z.scalar_type());
  return {output_mask[0] ? grad_z : masked_out(z),
          output_mask[1] ? column_sums(grad_z) : masked_out(z),
          output_mask[2] ? function.value(source).to(z.scalar_type()) : masked_out(z)};
}

void check_operands(std::string_view op, const Tensor& x, const std::optional<Tensor>& bias) {
  if (bias) check_last_dim(op, x, *bias, "bias");
}

}  // namespace

Tensor activation(std::string_view name, const Tensor& z) {
  return ActivationFunction(name, /*is_gated=*/false).value(z);
}

Specs<2> ActivationForward::shapes(const Tensor& x, const std::optional<Tensor>& bias,
                                   std::string_view activation, std::array<bool, 2> output_mask) {
  ActivationFunction(activation, /*is_gated=*/false);  // throws for one that is none
  check_operands("activation", x, bias);
  const auto dtype = sum_dtype(x, bias);
  return {like(x, dtype, output_mask[0]), like(x, dtype, output_mask[1])};
}

void ActivationForward::cpu(const Tensor& x, const std::optional<Tensor>& bias,
                            std::string_view activation, std::array<bool, 2>, Results<2>& results) {
  kernels::cpu::activation_forward(
      ActivationFunction(activation, /*is_gated=*/false).kernel(), RowsIn(x), VectorIn(bias),
      element_of(sum_dtype(x, bias)), rows_out(results[0]),
      rows_out(or_scratch(results[1], x, like(x, sum_dtype(x, bias)))));
}

Results<2> ActivationForward::reference(const Tensor& x, const std::optional<Tensor>& bias,
                                        std::string_view activation,
                                        std::array<bool, 2> output_mask) {
  return forward_reference(ActivationFunction(activation, /*is_gated=*/false), x, bias,
                           output_mask);
}

Specs<3> ActivationBackward::shapes(const Tensor& grad_y, const Tensor& z,
                                    std::string_view activation, std::array<bool, 3> output_mask) {
  ActivationFunction(activation, /*is_gated=*/false);
  check_same_shape("activation_backward", grad_y, "grad_y", z, "z");
  return {like(z, z.scalar_type(), output_mask[0]), columns_of(z, output_mask[1]),
          like(z, z.scalar_type(), output_mask[2])};
}

void ActivationBackward::cpu(const Tensor& grad_y, const Tensor& z, std::string_view activation,
                             std::array<bool, 3>, Results<3>& results) {
  kernels::cpu::activation_backward(ActivationFunction(activation, /*is_gated=*/false).kernel(),
                                    RowsIn(grad_y), RowsIn(z), rows_out(or_scratch(results[0], z)),
                                    vector_out(results[1]), rows_out(results[2]));
}

Results<3> ActivationBackward::reference(const Tensor& grad_y, const Tensor& z,
                                         std::string_view activation,
                                         std::array<bool, 3> output_mask) {
  return backward_reference(ActivationFunction(activation, /*is_gated=*/false), grad_y, z,
                            output_mask);
}

Specs<2> GluForward::shapes(const Tensor& x, const std::optional<Tensor>& bias,
                            std::string_view activation, std::array<bool, 2> output_mask) {
  const ActivationFunction function(activation, /*is_gated=*/true);
  function.check("glu", x);
  check_operands("glu", x, bias);
  const auto dtype = sum_dtype(x, bias);
  return {like(x, dtype, output_mask[0]), function.y_like(x, dtype, output_mask[1])};
}

void GluForward::cpu(const Tensor& x, const std::optional<Tensor>& bias,
                     std::string_view activation, std::array<bool, 2>, Results<2>& results) {
  const ActivationFunction function(activation, /*is_gated=*/true);
  kernels::cpu::glu_forward(
      function.kernel(), RowsIn(x), VectorIn(bias), element_of(sum_dtype(x, bias)),
      rows_out(results[0]),
      rows_out(or_scratch(results[1], x, function.y_like(x, sum_dtype(x, bias), true))));
}

Results<2> GluForward::reference(const Tensor& x, const std::optional<Tensor>& bias,
                                 std::string_view activation, std::array<bool, 2> output_mask) {
  return forward_reference(ActivationFunction(activation, /*is_gated=*/true), x, bias, output_mask);
}

Specs<3> GluBackward::shapes(const Tensor& grad_y, const Tensor& z, std::string_view activation,
                             std::array<bool, 3> output_mask) {
  const ActivationFunction function(activation, /*is_gated=*/true);
  function.check("glu_backward", z);
  const c10::SymDimVector half = function.y_like(z, z.scalar_type(), true).sizes;
  TORCH_CHECK_VALUE(grad_y.sym_sizes() == c10::SymIntArrayRef(half),
                    "glu_backward: expected grad_y with half the last dimension of z, ",
                    z.sym_sizes(), ", got ", grad_y.sym_sizes(),
                    ". Pass the gradient of what the forward op returned.");
  return {like(z, z.scalar_type(), output_mask[0]), columns_of(z, output_mask[1]),
          function.y_like(z, z.scalar_type(), output_mask[2])};
}

void GluBackward::cpu(const Tensor& grad_y, const Tensor& z, std::string_view activation,
                      std::array<bool, 3>, Results<3>& results) {
  kernels::cpu::glu_backward(ActivationFunction(activation, /*is_gated=*/true).kernel(),
                             RowsIn(grad_y), RowsIn(z), rows_out(or_scratch(results[0], z)),
                             vector_out(results[1]), rows_out(results[2]));
}

Results<3> GluBackward::reference(const Tensor& grad_y, const Tensor& z,
                                  std::string_view activation, std::array<bool, 3> output_mask) {
  return backward_reference(ActivationFunction(activation, /*is_gated=*/true), grad_y, z,
                            output_mask);
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<ActivationForward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, ActivationForward::cpu}});
  register_kernel_op<ActivationBackward>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, ActivationBackward::cpu}});
  register_kernel_op<GluForward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, GluForward::cpu}});
  register_kernel_op<GluBackward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, GluBackward::cpu}});
}

}  // namespace tandem::kernel_ops
