#include "kernel_ops/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/where.h>

#include "kernel_ops/checks.h"
#include "kernel_ops/operands.h"
#include "kernel_ops/quantize.h"
#include "kernel_ops/register.h"
#include "kernel_ops/shapes.h"
#include "kernels/norm.h"

namespace tandem::kernel_ops {

namespace {

kernels::cpu::NormOptions norm_options(double eps, bool zero_centered_gamma) {
  return {eps, zero_centered_gamma};
}

/// The type that statistics are kept in, after checking that x and weight have one.
at::ScalarType wide(const Tensor& x, const Tensor& weight) {
  check_floating("norm", x, "x");
  check_floating("norm", weight, "weight");
  return x.scalar_type() == at::kDouble || weight.scalar_type() == at::kDouble ? at::kDouble
                                                                               : at::kFloat;
}
Tensor gamma_of(const Tensor& weight, bool zero_centered_gamma, at::ScalarType dtype) {
  return zero_centered_gamma ? weight.to(dtype) + 1 : weight.to(dtype);
}
Tensor masked_out(const Tensor& like) { return at::empty({0}, like.options()); }

/// One value per row, shaped to broadcast over x.
Tensor per_row(const Tensor& statistic, const Tensor& x) {
  c10::SymDimVector sizes = sizes_of(x);
  sizes.back() = 1;
  return statistic.reshape_symint(sizes);
}
Tensor over_rows(const Tensor& x) { return x.reshape_symint({rows_of(x), x.sym_size(-1)}); }

float* statistics_out(const Tensor& tensor) { return tensor.data_ptr<float>(); }

kernels::Fp8Output fp8_out(const Tensor& codes, const Tensor& dequant_scale, const Tensor& amax) {
  return {codes.data_ptr<uint8_t>(), dequant_scale.data_ptr<float>(), amax.data_ptr<float>()};
}

}  // namespace

Specs<2> RmsNormForward::shapes(const Tensor& x, const Tensor& weight, double, bool) {
  check_last_dim("rms_norm", x, weight, "weight");
  return {like(x, weight.scalar_type()), ResultSpec{{rows_of(x)}, statistics(wide(x, weight))}};
}

void RmsNormForward::cpu(const Tensor& x, const Tensor& weight, double eps,
                         bool zero_centered_gamma, Results<2>& results) {
  kernels::cpu::rms_norm_forward(RowsIn(x), VectorIn(weight),
                                 norm_options(eps, zero_centered_gamma), rows_out(results[0]),
                                 statistics_out(results[1]));
}

Results<2> RmsNormForward::reference(const Tensor& x, const Tensor& weight, double eps,
                                     bool zero_centered_gamma) {
  const auto dtype = wide(x, weight);
  const Tensor source = x.to(dtype);
  const Tensor inv_rms = at::rsqrt((source * source).mean(-1, /*keepdim=*/true) + eps);
  const Tensor y = source * inv_rms * gamma_of(weight, zero_centered_gamma, dtype);
  return {y.to(weight.scalar_type()), inv_rms.flatten()};
}

Specs<3> RmsNormBackward::shapes(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                 const Tensor& inv_rms, const std::optional<Tensor>& grad_residual,
                                 bool, std::array<bool, 3> output_mask) {
  check_same_shape("rms_norm_backward", grad_y, "grad_y", x, "x");
  check_last_dim("rms_norm_backward", x, weight, "weight");
  check_statistic("rms_norm_backward", x, inv_rms, "inv_rms");
  if (grad_residual) check_same_shape("rms_norm_backward", *grad_residual, "grad_residual", x, "x");
  return {like(x, x.scalar_type(), output_mask[0]),
          like(weight, weight.scalar_type(), output_mask[1]),
          like(x, weight.scalar_type(), output_mask[2])};
}

void RmsNormBackward::cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                          const Tensor& inv_rms, const std::optional<Tensor>& grad_residual,
                          bool zero_centered_gamma, std::array<bool, 3>, Results<3>& results) {
  const Tensor statistic = inv_rms.contiguous();
  kernels::cpu::rms_norm_backward(
      RowsIn(grad_y), RowsIn(x), VectorIn(weight), statistic.const_data_ptr<float>(),
      norm_options(0, zero_centered_gamma), RowsIn(grad_residual), rows_out(results[0]),
      vector_out(results[1]), rows_out(results[2]));
}

Results<3> RmsNormBackward::reference(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                      const Tensor& inv_rms,
                                      const std::optional<Tensor>& grad_residual,
                                      bool zero_centered_gamma, std::array<bool, 3> output_mask) {
  const auto dtype = wide(x, weight);
  const Tensor inv = per_row(inv_rms.to(dtype), x), grad = grad_y.to(dtype),
               gamma = gamma_of(weight, zero_centered_gamma, dtype);
  const Tensor x_hat = x.to(dtype) * inv;
  Results<3> results{masked_out(x), masked_out(weight), masked_out(weight)};
  if (output_mask[0]) {
    const Tensor g = grad * gamma;
    Tensor grad_x = inv * (g - x_hat * (g * x_hat).mean(-1, /*keepdim=*/true));
    if (grad_residual) grad_x = grad_x + grad_residual->to(dtype);
    results[0] = grad_x.to(x.scalar_type());
  }
  if (output_mask[1]) results[1] = over_rows(grad * x_hat).sum(0).to(weight.scalar_type());
  if (output_mask[2]) results[2] = (x_hat * gamma).to(weight.scalar_type());
  return results;
}

Specs<3> LayerNormForward::shapes(const Tensor& x, const Tensor& weight, const Tensor& bias, double,
                                  bool) {
  check_last_dim("layer_norm", x, weight, "weight");
  check_last_dim("layer_norm", x, bias, "bias");
  const auto dtype = statistics(wide(x, weight));
  return {like(x, weight.scalar_type()), ResultSpec{{rows_of(x)}, dtype},
          ResultSpec{{rows_of(x)}, dtype}};
}

void LayerNormForward::cpu(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                           bool zero_centered_gamma, Results<3>& results) {
  kernels::cpu::layer_norm_forward(RowsIn(x), VectorIn(weight), VectorIn(bias),
                                   norm_options(eps, zero_centered_gamma), rows_out(results[0]),
                                   statistics_out(results[1]), statistics_out(results[2]));
}

Results<3> LayerNormForward::reference(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                       double eps, bool zero_centered_gamma) {
  const auto dtype = wide(x, weight);
  const Tensor source = x.to(dtype);
  const Tensor mean = source.mean(-1, /*keepdim=*/true), centered = source - mean;
  const Tensor variance = (centered * centered).mean(-1, /*keepdim=*/true);
  const Tensor inv_std = at::rsqrt(at::where(at::isinf(variance), NAN, variance) + eps);
  const Tensor y =
      centered * inv_std * gamma_of(weight, zero_centered_gamma, dtype) + bias.to(dtype);
  return {y.to(weight.scalar_type()), mean.flatten(), inv_std.flatten()};
}

Specs<4> LayerNormBackward::shapes(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                   const std::optional<Tensor>& bias, const Tensor& mean,
                                   const Tensor& inv_std,
                                   const std::optional<Tensor>& grad_residual, bool,
                                   std::array<bool, 4> output_mask) {
  check_same_shape("layer_norm_backward", grad_y, "grad_y", x, "x");
  check_last_dim("layer_norm_backward", x, weight, "weight");
  if (bias) check_last_dim("layer_norm_backward", x, *bias, "bias");
  check_statistic("layer_norm_backward", x, mean, "mean");
  check_statistic("layer_norm_backward", x, inv_std, "inv_std");
  if (grad_residual)
    check_same_shape("layer_norm_backward", *grad_residual, "grad_residual", x, "x");
  TORCH_INTERNAL_ASSERT(bias || !output_mask[3],
                        "layer_norm_backward: y needs the bias that forward added");
  return {like(x, x.scalar_type(), output_mask[0]),
          like(weight, weight.scalar_type(), output_mask[1]),
          like(weight, weight.scalar_type(), output_mask[2]),
          like(x, weight.scalar_type(), output_mask[3])};
}

void LayerNormBackward::cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                            const std::optional<Tensor>& bias, const Tensor& mean,
                            const Tensor& inv_std, const std::optional<Tensor>& grad_residual,
                            bool zero_centered_gamma, std::array<bool, 4>, Results<4>& results) {
  const Tensor means = mean.contiguous(), inv_stds = inv_std.contiguous();
  kernels::cpu::layer_norm_backward(
      RowsIn(grad_y), RowsIn(x), VectorIn(weight), VectorIn(bias), means.const_data_ptr<float>(),
      inv_stds.const_data_ptr<float>(), norm_options(0, zero_centered_gamma), RowsIn(grad_residual),
      rows_out(results[0]), vector_out(results[1]), vector_out(results[2]), rows_out(results[3]));
}

Results<4> LayerNormBackward::reference(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                        const std::optional<Tensor>& bias, const Tensor& mean,
                                        const Tensor& inv_std,
                                        const std::optional<Tensor>& grad_residual,
                                        bool zero_centered_gamma, std::array<bool, 4> output_mask) {
  const auto dtype = wide(x, weight);
  const Tensor inv = per_row(inv_std.to(dtype), x), grad = grad_y.to(dtype),
               gamma = gamma_of(weight, zero_centered_gamma, dtype);
  const Tensor x_hat = (x.to(dtype) - per_row(mean.to(dtype), x)) * inv;
  Results<4> results{masked_out(x), masked_out(weight), masked_out(weight), masked_out(weight)};
  if (output_mask[0]) {
    const Tensor g = grad * gamma;
    Tensor grad_x =
        inv * (g - g.mean(-1, /*keepdim=*/true) - x_hat * (g * x_hat).mean(-1, /*keepdim=*/true));
    if (grad_residual) grad_x = grad_x + grad_residual->to(dtype);
    results[0] = grad_x.to(x.scalar_type());
  }
  if (output_mask[1]) results[1] = over_rows(grad * x_hat).sum(0).to(weight.scalar_type());
  if (output_mask[2]) results[2] = over_rows(grad).sum(0).to(weight.scalar_type());
  if (output_mask[3]) results[3] = (x_hat * gamma + bias->to(dtype)).to(weight.scalar_type());
  return results;
}

Specs<5> RmsNormQuantize::shapes(const Tensor& x, const Tensor& weight, double eps,
                                 bool zero_centered_gamma, std::string_view, double, bool,
                                 bool want_y) {
  auto [y, inv_rms] = RmsNormForward::shapes(x, weight, eps, zero_centered_gamma);
  return {like(x, weight.scalar_type(), want_y), inv_rms, like(x, at::kByte), scalar(at::kFloat),
          scalar(at::kFloat)};
}

void RmsNormQuantize::cpu(const Tensor& x, const Tensor& weight, double eps,
                          bool zero_centered_gamma, std::string_view format, double amax_epsilon,
                          bool power_of_two, bool, Results<5>& results) {
  kernels::cpu::rms_norm_quantize(
      RowsIn(x), VectorIn(weight), norm_options(eps, zero_centered_gamma),
      element_of(weight.scalar_type()), current_scaling(format, amax_epsilon, power_of_two),
      rows_out(results[0]), statistics_out(results[1]),
      fp8_out(results[2], results[3], results[4]));
}

Results<5> RmsNormQuantize::reference(const Tensor& x, const Tensor& weight, double eps,
                                      bool zero_centered_gamma, std::string_view format,
                                      double amax_epsilon, bool power_of_two, bool want_y) {
  auto [y, inv_rms] = RmsNormForward::reference(x, weight, eps, zero_centered_gamma);
  auto [codes, dequant_scale, amax] =
      QuantizeCurrent::reference(y, format, amax_epsilon, power_of_two);
  return {want_y ? y : masked_out(weight), inv_rms, codes, dequant_scale, amax};
}

Specs<6> LayerNormQuantize::shapes(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                   double eps, bool zero_centered_gamma, std::string_view, double,
                                   bool, bool want_y) {
  auto [y, mean, inv_std] = LayerNormForward::shapes(x, weight, bias, eps, zero_centered_gamma);
  return {like(x, weight.scalar_type(), want_y),
          mean,
          inv_std,
          like(x, at::kByte),
          scalar(at::kFloat),
          scalar(at::kFloat)};
}

void LayerNormQuantize::cpu(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                            bool zero_centered_gamma, std::string_view format, double amax_epsilon,
                            bool power_of_two, bool, Results<6>& results) {
  kernels::cpu::layer_norm_quantize(
      RowsIn(x), VectorIn(weight), VectorIn(bias), norm_options(eps, zero_centered_gamma),
      element_of(weight.scalar_type()), current_scaling(format, amax_epsilon, power_of_two),
      rows_out(results[0]), statistics_out(results[1]), statistics_out(results[2]),
      fp8_out(results[3], results[4], results[5]));
}

Results<6> LayerNormQuantize::reference(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                        double eps, bool zero_centered_gamma,
                                        std::string_view format, double amax_epsilon,
                                        bool power_of_two, bool want_y) {
  auto [y, mean, inv_std] = LayerNormForward::reference(x, weight, bias, eps, zero_centered_gamma);
  auto [codes, dequant_scale, amax] =
      QuantizeCurrent::reference(y, format, amax_epsilon, power_of_two);
  return {want_y ? y : masked_out(weight), mean, inv_std, codes, dequant_scale, amax};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<RmsNormForward>(library);
  register_kernel_op<RmsNormBackward>(library);
  register_kernel_op<LayerNormForward>(library);
  register_kernel_op<LayerNormBackward>(library);
  register_kernel_op<RmsNormQuantize>(library);
  register_kernel_op<LayerNormQuantize>(library);
}

}  // namespace tandem::kernel_ops
