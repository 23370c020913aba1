#include "kernel_ops/norm/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernels/norm.h"
#include "quantization/formats/made.h"

namespace tandem::kernel_ops {

namespace {

kernels::cpu::NormOptions norm_options(double eps, bool zero_centered_gamma) {
  return {eps, zero_centered_gamma};
}

/// The type that statistics are kept in, after checking that x and weight have one.
at::ScalarType wider(const Tensor& x, const Tensor& weight) {
  check_floating("norm", x, "x");
  check_floating("norm", weight, "weight");
  return x.scalar_type() == at::kDouble || weight.scalar_type() == at::kDouble ? at::kDouble
                                                                               : at::kFloat;
}
Tensor gamma_of(const Tensor& weight, bool zero_centered_gamma, at::ScalarType dtype) {
  return zero_centered_gamma ? weight.to(dtype) + 1 : weight.to(dtype);
}
/// The last dimensions, as many as weight has: those of a row.
c10::DimVector row_dims(const Tensor& weight) {
  c10::DimVector dims;
  for (int64_t d = weight.dim(); d > 0; --d) dims.push_back(-d);
  return dims;
}
Tensor row_means(const Tensor& x, const Tensor& weight) {
  return x.mean(row_dims(weight), /*keepdim=*/true);
}
/// One value per row, shaped to broadcast over x.
Tensor along_rows(const Tensor& statistic, const Tensor& x, int64_t dims = 1) {
  c10::SymDimVector sizes = sizes_of(x);
  std::fill(sizes.end() - dims, sizes.end(), 1);
  return statistic.reshape_symint(sizes);
}
/// Sums over rows, like weight.
Tensor column_sums(const Tensor& x, const Tensor& weight) {
  const Tensor rows = x.reshape_symint({rows_of(x, weight.dim()), weight.sym_numel()});
  return rows.sum(0).reshape_symint(weight.sym_sizes()).to(weight.scalar_type());
}

/// A gradient and that of the residual stream, as a sum by itself rounds them.
Tensor plus_residual(const Tensor& grad_x, const std::optional<Tensor>& grad_residual,
                     at::ScalarType dtype) {
  if (!grad_residual) return grad_x;
  return (grad_x.to(dtype) + grad_residual->to(dtype)).to(grad_x.scalar_type());
}

/// `parameter` must have the sizes of the last dimensions of x, one or more.
void check_row_shape(std::string_view op, const Tensor& x, const Tensor& parameter,
                     std::string_view name) {
  const int64_t dims = parameter.dim();
  if (dims <= 1) return check_last_dim(op, x, parameter, name);
  const auto sizes = x.sym_sizes();
  TORCH_CHECK_VALUE(
      x.dim() >= dims && sizes.slice(static_cast<size_t>(x.dim() - dims)) == parameter.sym_sizes(),
      op, ": expected ", name, " of the shape of the last ", dims, " dimensions of x ", sizes,
      ", got ", parameter.sym_sizes(), ". Build the op with their sizes or reshape x.");
}

float* statistics_out(const Tensor& tensor) { return tensor.data_ptr<float>(); }

/// A norm whose result is quantized.
struct NormToQuantize {
  kernels::ConstRows x;
  kernels::ConstVector weight, bias;
  kernels::cpu::NormOptions options;
  kernels::Element y_element;
  /// null for RMSNorm.
  float* mean;
  float* inv_norm;
};

/// The norm of some rows, to contiguous memory.
void run_norm_of_rows(const NormToQuantize& norm, size_t first, size_t count, void* to) {
  const kernels::ConstRows x = rows_from(norm.x, first, count);
  const kernels::Rows y{to, norm.y_element, count, x.cols, x.cols};
  if (norm.mean != nullptr) {
    kernels::cpu::layer_norm_forward(x, norm.weight, norm.bias, norm.options, y, norm.mean + first,
                                     norm.inv_norm + first);
  } else {
    kernels::cpu::rms_norm_forward(x, norm.weight, norm.options, y, norm.inv_norm + first);
  }
}

/// Runs a norm and quantizes y, of the sizes of x.
void norm_quantize(const NormToQuantize& norm, const Tensor& x, const std::optional<Tensor>& given,
                   const Quantizer& quantizer, const Tensor& y, Group group) {
  const auto make = [&](size_t first, size_t count, void* to) {
    run_norm_of_rows(norm, first, count, to);
  };
  make_and_quantize({.y = {nullptr, norm.y_element, norm.x.rows, norm.x.cols, norm.x.cols},
                     .make = make,
                     .sources = {norm.x}},
                    y, x.sym_sizes(), given, &quantizer, std::move(group));
}

/// The bias of a norm has the shape of its weight.
void check_bias(std::string_view op, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (weight.dim() == 1) return check_last_dim(op, x, bias, "bias");
  check_same_shape(op, bias, "bias", weight, "weight");
}

}  // namespace

Specs<2> RmsNormForward::shapes(const Tensor& x, const Tensor& weight, double, bool) {
  check_row_shape("rms_norm", x, weight, "weight");
  return {like(x, weight.scalar_type()),
          ResultSpec{{rows_of(x, weight.dim())}, statistics(wider(x, weight))}};
}

void RmsNormForward::cpu(const Tensor& x, const Tensor& weight, double eps,
                         bool zero_centered_gamma, Results<2>& results) {
  kernels::cpu::rms_norm_forward(RowsIn(x, weight.dim()), VectorIn(weight),
                                 norm_options(eps, zero_centered_gamma),
                                 rows_out(results[0], weight.dim()), statistics_out(results[1]));
}

Results<2> RmsNormForward::reference(const Tensor& x, const Tensor& weight, double eps,
                                     bool zero_centered_gamma) {
  const auto dtype = wider(x, weight);
  const Tensor source = x.to(dtype);
  const Tensor inv_rms = at::rsqrt(row_means(source * source, weight) + eps);
  const Tensor y = source * inv_rms * gamma_of(weight, zero_centered_gamma, dtype);
  return {y.to(weight.scalar_type()), inv_rms.flatten()};
}

Specs<3> RmsNormBackward::shapes(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                 const Tensor& inv_rms, const std::optional<Tensor>& grad_residual,
                                 bool, std::array<bool, 3> output_mask) {
  check_same_shape("rms_norm_backward", grad_y, "grad_y", x, "x");
  check_row_shape("rms_norm_backward", x, weight, "weight");
  check_statistic("rms_norm_backward", x, inv_rms, "inv_rms", weight.dim());
  if (grad_residual) check_same_shape("rms_norm_backward", *grad_residual, "grad_residual", x, "x");
  return {like(x, x.scalar_type(), output_mask[0]),
          like(weight, weight.scalar_type(), output_mask[1]),
          like(x, weight.scalar_type(), output_mask[2])};
}

void RmsNormBackward::cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                          const Tensor& inv_rms, const std::optional<Tensor>& grad_residual,
                          bool zero_centered_gamma, std::array<bool, 3>, Results<3>& results) {
  const Tensor statistic = inv_rms.contiguous();
  const int64_t dims = weight.dim();
  kernels::cpu::rms_norm_backward(
      RowsIn(grad_y, dims), RowsIn(x, dims), VectorIn(weight), statistic.const_data_ptr<float>(),
      norm_options(0, zero_centered_gamma), RowsIn(grad_residual, dims), rows_out(results[0], dims),
      vector_out(results[1]), rows_out(results[2], dims));
}

Results<3> RmsNormBackward::reference(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                      const Tensor& inv_rms,
                                      const std::optional<Tensor>& grad_residual,
                                      bool zero_centered_gamma, std::array<bool, 3> output_mask) {
  const auto dtype = wider(x, weight);
  const Tensor inv = along_rows(inv_rms.to(dtype), x, weight.dim()), grad = grad_y.to(dtype),
               gamma = gamma_of(weight, zero_centered_gamma, dtype);
  const Tensor x_hat = x.to(dtype) * inv;
  Results<3> results{masked_out(x), masked_out(weight), masked_out(weight)};
  if (output_mask[0]) {
    const Tensor g = grad * gamma;
    const Tensor grad_x = inv * (g - x_hat * row_means(g * x_hat, weight));
    results[0] = plus_residual(grad_x.to(x.scalar_type()), grad_residual, dtype);
  }
  if (output_mask[1]) results[1] = column_sums(grad * x_hat, weight);
  if (output_mask[2]) results[2] = (x_hat * gamma).to(weight.scalar_type());
  return results;
}

Specs<3> LayerNormForward::shapes(const Tensor& x, const Tensor& weight, const Tensor& bias, double,
                                  bool) {
  check_row_shape("layer_norm", x, weight, "weight");
  check_bias("layer_norm", x, weight, bias);
  const auto dtype = statistics(wider(x, weight));
  const ResultSpec statistic{{rows_of(x, weight.dim())}, dtype};
  return {like(x, weight.scalar_type()), statistic, statistic};
}

void LayerNormForward::cpu(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                           bool zero_centered_gamma, Results<3>& results) {
  kernels::cpu::layer_norm_forward(RowsIn(x, weight.dim()), VectorIn(weight), VectorIn(bias),
                                   norm_options(eps, zero_centered_gamma),
                                   rows_out(results[0], weight.dim()), statistics_out(results[1]),
                                   statistics_out(results[2]));
}

Results<3> LayerNormForward::reference(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                       double eps, bool zero_centered_gamma) {
  const auto dtype = wider(x, weight);
  const Tensor source = x.to(dtype);
  const Tensor mean = row_means(source, weight), centered = source - mean;
  const Tensor variance = row_means(centered * centered, weight);
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
  check_row_shape("layer_norm_backward", x, weight, "weight");
  if (bias) check_bias("layer_norm_backward", x, weight, *bias);
  check_statistic("layer_norm_backward", x, mean, "mean", weight.dim());
  check_statistic("layer_norm_backward", x, inv_std, "inv_std", weight.dim());
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
  const int64_t dims = weight.dim();
  kernels::cpu::layer_norm_backward(
      RowsIn(grad_y, dims), RowsIn(x, dims), VectorIn(weight), VectorIn(bias),
      means.const_data_ptr<float>(), inv_stds.const_data_ptr<float>(),
      norm_options(0, zero_centered_gamma), RowsIn(grad_residual, dims), rows_out(results[0], dims),
      vector_out(results[1]), vector_out(results[2]), rows_out(results[3], dims));
}

Results<4> LayerNormBackward::reference(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                        const std::optional<Tensor>& bias, const Tensor& mean,
                                        const Tensor& inv_std,
                                        const std::optional<Tensor>& grad_residual,
                                        bool zero_centered_gamma, std::array<bool, 4> output_mask) {
  const auto dtype = wider(x, weight);
  const Tensor inv = along_rows(inv_std.to(dtype), x, weight.dim()), grad = grad_y.to(dtype),
               gamma = gamma_of(weight, zero_centered_gamma, dtype);
  const Tensor x_hat = (x.to(dtype) - along_rows(mean.to(dtype), x, weight.dim())) * inv;
  Results<4> results{masked_out(x), masked_out(weight), masked_out(weight), masked_out(weight)};
  if (output_mask[0]) {
    const Tensor g = grad * gamma;
    const Tensor grad_x = inv * (g - row_means(g, weight) - x_hat * row_means(g * x_hat, weight));
    results[0] = plus_residual(grad_x.to(x.scalar_type()), grad_residual, dtype);
  }
  if (output_mask[1]) results[1] = column_sums(grad * x_hat, weight);
  if (output_mask[2]) results[2] = column_sums(grad, weight);
  if (output_mask[3]) results[3] = (x_hat * gamma + bias->to(dtype)).to(weight.scalar_type());
  return results;
}

Specs<2> L2NormForward::shapes(const Tensor& x, double) {
  const at::ScalarType dtype = wider(x, x);
  TORCH_CHECK_VALUE(x.dim() >= 1,
                    "l2_norm: expected x with at least 1 dimension, got a scalar. Pass ",
                    "x.reshape({1}) if one element is meant.");
  return {like(x, x.scalar_type()), ResultSpec{{rows_of(x)}, statistics(dtype)}};
}

void L2NormForward::cpu(const Tensor& x, double eps, Results<2>& results) {
  kernels::cpu::l2_norm_forward(RowsIn(x), eps, rows_out(results[0]), statistics_out(results[1]));
}

Results<2> L2NormForward::reference(const Tensor& x, double eps) {
  const Tensor source = x.to(wider(x, x));
  const Tensor inv_norm = at::rsqrt((source * source).sum(-1, /*keepdim=*/true) + eps);
  return {(source * inv_norm).to(x.scalar_type()), inv_norm.flatten()};
}

Specs<2> L2NormBackward::shapes(const Tensor& grad_y, const Tensor& x, const Tensor& inv_norm,
                                std::array<bool, 2> output_mask) {
  check_same_shape("l2_norm_backward", grad_y, "grad_y", x, "x");
  check_statistic("l2_norm_backward", x, inv_norm, "inv_norm", /*dims=*/1);
  return {like(x, x.scalar_type(), output_mask[0]), like(x, x.scalar_type(), output_mask[1])};
}

void L2NormBackward::cpu(const Tensor& grad_y, const Tensor& x, const Tensor& inv_norm,
                         std::array<bool, 2>, Results<2>& results) {
  const Tensor statistic = inv_norm.contiguous();
  kernels::cpu::l2_norm_backward(RowsIn(grad_y), RowsIn(x), statistic.const_data_ptr<float>(),
                                 rows_out(results[0]), rows_out(results[1]));
}

Results<2> L2NormBackward::reference(const Tensor& grad_y, const Tensor& x, const Tensor& inv_norm,
                                     std::array<bool, 2> output_mask) {
  const at::ScalarType dtype = wider(x, x);
  const Tensor inv = along_rows(inv_norm.to(dtype), x), grad = grad_y.to(dtype);
  const Tensor x_hat = x.to(dtype) * inv;
  Results<2> results{masked_out(x), masked_out(x)};
  if (output_mask[0])
    results[0] =
        (inv * (grad - x_hat * (grad * x_hat).sum(-1, /*keepdim=*/true))).to(x.scalar_type());
  if (output_mask[1]) results[1] = x_hat.to(x.scalar_type());
  return results;
}

Specs<4> AddNormForward::shapes(const Tensor& x, const Tensor& extra, const Tensor& weight,
                                const std::optional<Tensor>& bias, double, bool,
                                std::array<bool, 1> output_mask) {
  check_same_shape("add_extra_input", extra, "the extra input", x, "x");
  check_row_shape("add_norm", x, weight, "weight");
  if (bias) check_bias("add_norm", x, weight, *bias);
  const at::ScalarType sum = at::result_type(x, extra),
                       statistic = sum == at::kDouble ? at::kDouble : wider(x, weight);
  const c10::SymInt rows = rows_of(x, weight.dim());
  return {like(x, sum, output_mask[0]), like(x, weight.scalar_type()),
          ResultSpec{{bias ? rows : c10::SymInt(0)}, statistic, bias.has_value()},
          ResultSpec{{rows}, statistic}};
}

void AddNormForward::cpu(const Tensor& x, const Tensor& extra, const Tensor& weight,
                         const std::optional<Tensor>& bias, double eps, bool zero_centered_gamma,
                         std::array<bool, 1>, Results<4>& results) {
  const int64_t dims = weight.dim();
  kernels::cpu::add_norm_forward(
      RowsIn(x, dims), RowsIn(extra, dims), VectorIn(weight), VectorIn(bias),
      norm_options(eps, zero_centered_gamma), element_of(at::result_type(x, extra)),
      rows_out(results[0], dims), rows_out(results[1], dims),
      bias ? statistics_out(results[2]) : nullptr, statistics_out(results[3]));
}

Results<4> AddNormForward::reference(const Tensor& x, const Tensor& extra, const Tensor& weight,
                                     const std::optional<Tensor>& bias, double eps,
                                     bool zero_centered_gamma, std::array<bool, 1> output_mask) {
  const Tensor sum = x + extra, kept = output_mask[0] ? sum : masked_out(sum);
  if (bias) {
    const auto [y, mean, inv_std] =
        LayerNormForward::reference(sum, weight, *bias, eps, zero_centered_gamma);
    return {kept, y, mean, inv_std};
  }
  const auto [y, inv_rms] = RmsNormForward::reference(sum, weight, eps, zero_centered_gamma);
  return {kept, y, masked_out(inv_rms), inv_rms};
}

Specs<2 + group_size> RmsNormQuantize::shapes(const Tensor& x, const Tensor& weight,
                                              const std::optional<Tensor>& given, double eps,
                                              bool zero_centered_gamma, const Quantizer& quantizer,
                                              std::array<bool, 4> output_mask) {
  const auto [y, inv_rms] = RmsNormForward::shapes(x, weight, eps, zero_centered_gamma);
  return joined(Specs<2>{like(x, y.dtype, output_mask[0]), inv_rms},
                group_specs(kName, x, given, quantizer, group_mask(output_mask)));
}

void RmsNormQuantize::cpu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& given,
                          double eps, bool zero_centered_gamma, const Quantizer& quantizer,
                          std::array<bool, 4>, Results<2 + group_size>& results) {
  const RowsIn rows(x, weight.dim());
  const VectorIn gamma(weight);
  const auto options = norm_options(eps, zero_centered_gamma);
  float* inv_rms = statistics_out(results[1]);
  norm_quantize({.x = rows,
                 .weight = gamma,
                 .bias = {},
                 .options = options,
                 .y_element = element_of(weight.scalar_type()),
                 .mean = nullptr,
                 .inv_norm = inv_rms},
                x, given, quantizer, results[0], group_of(results));
}

Results<2 + group_size> RmsNormQuantize::reference(const Tensor& x, const Tensor& weight,
                                                   const std::optional<Tensor>& given, double eps,
                                                   bool zero_centered_gamma,
                                                   const Quantizer& quantizer,
                                                   std::array<bool, 4> output_mask) {
  const auto [y, inv_rms] = RmsNormForward::reference(x, weight, eps, zero_centered_gamma);
  return joined(Results<2>{output_mask[0] ? y : masked_out(weight), inv_rms},
                Quantize::reference(y, given, quantizer, group_mask(output_mask)));
}

Specs<3 + group_size> LayerNormQuantize::shapes(const Tensor& x, const Tensor& weight,
                                                const Tensor& bias,
                                                const std::optional<Tensor>& given, double eps,
                                                bool zero_centered_gamma,
                                                const Quantizer& quantizer,
                                                std::array<bool, 4> output_mask) {
  const auto [y, mean, inv_std] =
      LayerNormForward::shapes(x, weight, bias, eps, zero_centered_gamma);
  return joined(Specs<3>{like(x, y.dtype, output_mask[0]), mean, inv_std},
                group_specs(kName, x, given, quantizer, group_mask(output_mask)));
}

void LayerNormQuantize::cpu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                            const std::optional<Tensor>& given, double eps,
                            bool zero_centered_gamma, const Quantizer& quantizer,
                            std::array<bool, 4>, Results<3 + group_size>& results) {
  const RowsIn rows(x, weight.dim());
  const VectorIn gamma(weight), beta(bias);
  const auto options = norm_options(eps, zero_centered_gamma);
  float *mean = statistics_out(results[1]), *inv_std = statistics_out(results[2]);
  norm_quantize({.x = rows,
                 .weight = gamma,
                 .bias = beta,
                 .options = options,
                 .y_element = element_of(weight.scalar_type()),
                 .mean = mean,
                 .inv_norm = inv_std},
                x, given, quantizer, results[0], group_of(results));
}

Results<3 + group_size> LayerNormQuantize::reference(const Tensor& x, const Tensor& weight,
                                                     const Tensor& bias,
                                                     const std::optional<Tensor>& given, double eps,
                                                     bool zero_centered_gamma,
                                                     const Quantizer& quantizer,
                                                     std::array<bool, 4> output_mask) {
  const auto [y, mean, inv_std] =
      LayerNormForward::reference(x, weight, bias, eps, zero_centered_gamma);
  return joined(Results<3>{output_mask[0] ? y : masked_out(weight), mean, inv_std},
                Quantize::reference(y, given, quantizer, group_mask(output_mask)));
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<RmsNormForward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, RmsNormForward::cpu}});
  register_kernel_op<RmsNormBackward>(
      library, {{"cpu", at::kCPU,
                 Takes<kArithmetic, kArithmetic, kArithmetic, kStatistic, kArithmetic>::these,
                 RmsNormBackward::cpu}});
  register_kernel_op<LayerNormForward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic>::these,
                 LayerNormForward::cpu}});
  register_kernel_op<LayerNormBackward>(
      library, {{"cpu", at::kCPU,
                 Takes<kArithmetic, kArithmetic, kArithmetic, kArithmetic, kStatistic, kStatistic,
                       kArithmetic>::these,
                 LayerNormBackward::cpu}});
  register_kernel_op<L2NormForward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic>::these, L2NormForward::cpu}});
  register_kernel_op<L2NormBackward>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kStatistic>::these, L2NormBackward::cpu}});
  register_kernel_op<AddNormForward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic, kArithmetic>::these,
                 AddNormForward::cpu}});
  register_kernel_op<RmsNormQuantize>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kGiven>::these, RmsNormQuantize::cpu}});
  register_kernel_op<LayerNormQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic, kGiven>::these,
                 LayerNormQuantize::cpu}});
}

}  // namespace tandem::kernel_ops
