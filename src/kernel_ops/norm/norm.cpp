#include "kernel_ops/norm/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/rsqrt.h>

#include <algorithm>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"

namespace tandem::kernel_ops {

namespace {

/// The dtype of statistics. Checks that x and weight have floating dtypes.
at::ScalarType wider(const Tensor& x, const Tensor& weight) {
  check_floating("norm", x, "x");
  check_floating("norm", weight, "weight");
  return x.scalar_type() == at::kDouble || weight.scalar_type() == at::kDouble ? at::kDouble
                                                                               : at::kFloat;
}
Tensor gamma_of(const Tensor& weight, bool zero_centered_gamma, at::ScalarType dtype) {
  return zero_centered_gamma ? weight.to(dtype) + 1 : weight.to(dtype);
}
/// x_hat as it is multiplied by the weight: rounded to `to` if rounds_before_weight.
Tensor rounded(const Tensor& x_hat, bool rounds_before_weight, at::ScalarType to) {
  return rounds_before_weight ? x_hat.to(to).to(x_hat.scalar_type()) : x_hat;
}
/// The dimensions of a row: the last ones, as many as weight has.
c10::DimVector row_dims(const Tensor& weight) {
  c10::DimVector dims;
  for (int64_t d = weight.dim(); d > 0; --d) dims.push_back(-d);
  return dims;
}
Tensor row_means(const Tensor& x, const Tensor& weight) {
  return x.mean(row_dims(weight), /*keepdim=*/true);
}
/// A statistic, one element per row, shaped to broadcast over x.
Tensor along_rows(const Tensor& statistic, const Tensor& x, int64_t dims = 1) {
  c10::SymDimVector sizes = sizes_of(x);
  std::fill(sizes.end() - dims, sizes.end(), 1);
  return statistic.reshape_symint(sizes);
}
/// Sums over rows, with the shape and dtype of weight.
Tensor column_sums(const Tensor& x, const Tensor& weight) {
  const Tensor rows = x.reshape_symint({rows_of(x, weight.dim()), weight.sym_numel()});
  return rows.sum(0).reshape_symint(weight.sym_sizes()).to(weight.scalar_type());
}

/// `parameter` must have the sizes of the last dimensions of x, at least one.
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

/// Only RMSNorm may round before the weight: no known LayerNorm does.
void check_rounding(std::string_view op, bool is_layer_norm, bool rounds_before_weight) {
  TORCH_CHECK_VALUE(!is_layer_norm || !rounds_before_weight, op,
                    ": expected rounds_before_weight to be false, as RMSNorm alone has it, got ",
                    "true. Round behind a LayerNorm without weight, or leave it out.");
}

/// The bias of a norm has the shape of its weight.
void check_bias(std::string_view op, const Tensor& x, const Tensor& weight,
                const std::optional<Tensor>& bias) {
  if (!bias) return;
  if (weight.dim() == 1) return check_last_dim(op, x, *bias, "bias");
  check_same_shape(op, *bias, "bias", weight, "weight");
}

}  // namespace

Specs<4> NormForward::shapes(const Args& args) {
  const auto& [x, extra, weight, bias, eps, zero_centered_gamma, rounds_before_weight, output_mask,
               codes] = args;
  const std::string_view op = extra ? "add_norm" : bias ? "layer_norm" : "rms_norm";
  if (extra) check_same_shape("add_extra_input", *extra, "the extra input", x, "x");
  check_row_shape(op, x, weight, "weight");
  check_bias(op, x, weight, bias);
  check_rounding(op, bias.has_value(), rounds_before_weight);
  const at::ScalarType of_sum = sum_dtype(x, extra),
                       statistic = of_sum == at::kDouble ? at::kDouble : wider(x, weight);
  const c10::SymInt rows = rows_of(x, weight.dim());
  return {like(x, of_sum, extra && output_mask[sum]), like(x, weight.scalar_type(), output_mask[y]),
          ResultSpec{{rows}, statistic, bias.has_value()}, ResultSpec{{rows}, statistic}};
}

Results<4> NormForward::reference(const Args& args) {
  const auto& [x, extra, weight, bias, eps, zero_centered_gamma, rounds_before_weight, output_mask,
               codes] = args;
  const Tensor all = extra ? x + *extra : x;
  const auto dtype = wider(all, weight);
  const Tensor source = all.to(dtype), gamma = gamma_of(weight, zero_centered_gamma, dtype);
  const Tensor kept = extra && output_mask[sum] ? all : masked_out(all);
  if (!bias) {
    const Tensor inv_rms = at::rsqrt(row_means(source * source, weight) + eps);
    const Tensor x_hat = rounded(source * inv_rms, rounds_before_weight, all.scalar_type());
    return {kept, (x_hat * gamma).to(weight.scalar_type()), masked_out(all, statistics(dtype)),
            inv_rms.flatten()};
  }
  const Tensor means = row_means(source, weight), centered = source - means;
  const Tensor variance = row_means(centered * centered, weight);
  const Tensor inv_std = at::rsqrt(variance.masked_fill(at::isinf(variance), NAN) + eps);
  return {kept, (centered * inv_std * gamma + bias->to(dtype)).to(weight.scalar_type()),
          means.flatten(), inv_std.flatten()};
}

Specs<5> NormBackward::shapes(const Args& args) {
  const Tensor &x = args.x, &weight = args.weight;
  const auto& mask = args.output_mask;
  const char* const op = args.mean ? "layer_norm_backward" : "rms_norm_backward";
  check_same_shape(op, args.grad_y, "grad_y", x, "x");
  check_row_shape(op, x, weight, "weight");
  check_bias(op, x, weight, args.bias);
  check_rounding(op, args.mean.has_value(), args.rounds_before_weight);
  if (args.mean) check_statistic(op, x, *args.mean, "mean", weight.dim());
  check_statistic(op, x, args.inv_norm, args.mean ? "inv_std" : "inv_rms", weight.dim());
  if (args.grad_residual) check_same_shape(op, *args.grad_residual, "grad_residual", x, "x");
  TORCH_CHECK_VALUE(!args.mean || args.bias || (!mask[y] && !args.y_codes), op,
                    ": expected the bias that forward added, which y needs, got none. Pass it, or "
                    "ask for no y.");
  TORCH_CHECK_VALUE(args.mean || (!args.bias && !mask[grad_bias]), op,
                    ": expected neither a bias nor its gradient where there is no mean, as RMSNorm "
                    "has no bias, got one. Pass the mean that forward returned.");
  return {like(x, x.scalar_type(), mask[grad_x]),
          like(weight, weight.scalar_type(), mask[grad_weight]),
          like(x, weight.scalar_type(), mask[y]),
          ResultSpec{{x.sym_size(-1)}, args.sums_dtype, mask[sums]},
          like(weight, weight.scalar_type(), mask[grad_bias])};
}

Results<5> NormBackward::reference(const Args& args) {
  const Tensor &x = args.x, &weight = args.weight;
  const auto& mask = args.output_mask;
  const auto dtype = wider(x, weight);
  const Tensor inv = along_rows(args.inv_norm.to(dtype), x, weight.dim()),
               grad = args.grad_y.to(dtype),
               gamma = gamma_of(weight, args.zero_centered_gamma, dtype);
  const Tensor centered =
      args.mean ? x.to(dtype) - along_rows(args.mean->to(dtype), x, weight.dim()) : x.to(dtype);
  const Tensor x_hat = centered * inv,
               factor = rounded(x_hat, args.rounds_before_weight, x.scalar_type());
  Results<5> results{masked_out(x), masked_out(weight), masked_out(weight),
                     masked_out(x, args.sums_dtype), masked_out(weight)};
  if (mask[grad_x] || mask[sums]) {
    const Tensor g = grad * gamma, along = x_hat * row_means(g * x_hat, weight);
    Tensor of_x = inv * (args.mean ? g - row_means(g, weight) - along : g - along);
    if (args.grad_residual) of_x = of_x + args.grad_residual->to(dtype);
    of_x = of_x.to(x.scalar_type());
    if (mask[grad_x]) results[grad_x] = of_x;
    if (mask[sums])
      results[sums] = of_x.reshape_symint({rows_of(x), x.sym_size(-1)})
                          .sum(0, /*keepdim=*/false, wide(x.scalar_type()))
                          .to(args.sums_dtype);
  }
  if (mask[grad_weight]) results[grad_weight] = column_sums(grad * factor, weight);
  if (mask[grad_bias]) results[grad_bias] = column_sums(grad, weight);
  if (mask[y]) {
    const Tensor scaled = factor * gamma;
    results[y] = (args.mean ? scaled + args.bias->to(dtype) : scaled).to(weight.scalar_type());
  }
  return results;
}

Specs<2> L2NormForward::shapes(const Args& args) {
  const Tensor& x = args.x;
  const at::ScalarType dtype = wider(x, x);
  TORCH_CHECK_VALUE(x.dim() >= 1,
                    "l2_norm: expected x with at least 1 dimension, got a scalar. Pass ",
                    "x.reshape({1}) if one element is meant.");
  return {like(x, x.scalar_type()), ResultSpec{{rows_of(x)}, statistics(dtype)}};
}

Results<2> L2NormForward::reference(const Args& args) {
  const Tensor source = args.x.to(wider(args.x, args.x));
  const Tensor inv_norm = at::rsqrt((source * source).sum(-1, /*keepdim=*/true) + args.eps);
  return {(source * inv_norm).to(args.x.scalar_type()), inv_norm.flatten()};
}

Specs<2> L2NormBackward::shapes(const Args& args) {
  const Tensor& x = args.x;
  check_same_shape("l2_norm_backward", args.grad_y, "grad_y", x, "x");
  check_statistic("l2_norm_backward", x, args.inv_norm, "inv_norm", /*dims=*/1);
  return {like(x, x.scalar_type(), args.output_mask[0]),
          like(x, x.scalar_type(), args.output_mask[1])};
}

Results<2> L2NormBackward::reference(const Args& args) {
  const Tensor& x = args.x;
  const at::ScalarType dtype = wider(x, x);
  const Tensor inv = along_rows(args.inv_norm.to(dtype), x), grad = args.grad_y.to(dtype);
  const Tensor x_hat = x.to(dtype) * inv;
  Results<2> results{masked_out(x), masked_out(x)};
  if (args.output_mask[0])
    results[0] =
        (inv * (grad - x_hat * (grad * x_hat).sum(-1, /*keepdim=*/true))).to(x.scalar_type());
  if (args.output_mask[1]) results[1] = x_hat.to(x.scalar_type());
  return results;
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<NormForward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic, kArithmetic>::these,
                 NormForward::cpu, /*makes_codes=*/true}});
  register_kernel_op<NormBackward>(
      library, {{"cpu", at::kCPU,
                 Takes<kArithmetic, kArithmetic, kArithmetic, kArithmetic, kStatistic, kStatistic,
                       kArithmetic, kArithmetic>::these,
                 NormBackward::cpu, /*makes_codes=*/true}});
  register_kernel_op<L2NormForward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic>::these, L2NormForward::cpu}});
  register_kernel_op<L2NormBackward>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kStatistic>::these, L2NormBackward::cpu}});
}

}  // namespace tandem::kernel_ops
