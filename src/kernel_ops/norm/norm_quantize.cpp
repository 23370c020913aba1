#include "kernel_ops/norm/norm_quantize.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/result_type.h>

#include <algorithm>

#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/norm/norm.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "quantization/formats/made.h"

namespace tandem::kernel_ops {

namespace {

/// As `tensor`, for kernels; null where it is absent.
const float* statistic_in(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

}  // namespace

Specs<4 + group_size> AddNormQuantize::shapes(const Tensor& x, const Tensor& extra,
                                              const Tensor& weight,
                                              const std::optional<Tensor>& bias,
                                              const std::optional<Tensor>& given, double eps,
                                              bool zero_centered_gamma, const Quantizer& quantizer,
                                              std::array<bool, 5> output_mask) {
  auto made =
      AddNormForward::shapes(x, extra, weight, bias, eps, zero_centered_gamma, {output_mask[0]});
  made[1] = like(x, made[1].dtype, output_mask[1]);
  return joined(std::move(made), group_specs(kName, x, given, quantizer, group_mask(output_mask)));
}

void AddNormQuantize::cpu(const Tensor& x, const Tensor& extra, const Tensor& weight,
                          const std::optional<Tensor>& bias, const std::optional<Tensor>& given,
                          double eps, bool zero_centered_gamma, const Quantizer& quantizer,
                          std::array<bool, 5>, Results<4 + group_size>& results) {
  const int64_t dims = weight.dim();
  const RowsIn of_x(x, dims), of_extra(extra, dims);
  const VectorIn gamma(weight), beta(bias);
  const kernels::ConstRows from = of_x, added = of_extra;
  const kernels::Rows sum = rows_out(results[0], dims),
                      y{nullptr, element_of(weight.scalar_type()), from.rows, from.cols, from.cols};
  const kernels::Element sum_element = element_of(at::result_type(x, extra));
  float* const mean = bias ? results[2].data_ptr<float>() : nullptr;
  float* const inv_norm = results[3].data_ptr<float>();
  const auto make = [&](size_t first, size_t count, void* to) {
    kernels::cpu::add_norm_forward(rows_from(from, first, count), rows_from(added, first, count),
                                   gamma, beta, {eps, zero_centered_gamma}, sum_element,
                                   rows_from(sum, first, count), rows_at(to, y, count),
                                   mean == nullptr ? nullptr : mean + first, inv_norm + first);
  };
  make_and_quantize({.y = y, .make = make, .sources = {from, added}}, results[1], x.sym_sizes(),
                    given, &quantizer, group_of(results));
}

Results<4 + group_size> AddNormQuantize::reference(
    const Tensor& x, const Tensor& extra, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& given, double eps, bool zero_centered_gamma,
    const Quantizer& quantizer, std::array<bool, 5> output_mask) {
  auto made =
      AddNormForward::reference(x, extra, weight, bias, eps, zero_centered_gamma, {output_mask[0]});
  auto codes = Quantize::reference(made[1], given, quantizer, group_mask(output_mask));
  if (!output_mask[1]) made[1] = masked_out(made[1]);
  return joined(std::move(made), std::move(codes));
}

Specs<NormBackwardQuantize::kResults> NormBackwardQuantize::shapes(
    const Tensor& grad_y, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mean, const Tensor& inv_norm,
    const std::optional<Tensor>& grad_residual, const std::optional<Tensor>& given,
    const std::optional<Tensor>& y_given, bool zero_centered_gamma, at::ScalarType sums_dtype,
    const Quantizer* quantizer, const Quantizer* y_quantizer, std::array<bool, 11> output_mask) {
  const bool wants_x = output_mask[0], wants_weight = output_mask[1], wants_y = output_mask[2],
             wants_sums = output_mask[3], wants_bias = output_mask[4];
  Specs<kMade> made;
  if (mean) {
    auto [grad_x, grad_weight, grad_bias, y] = LayerNormBackward::shapes(
        grad_y, x, weight, bias, *mean, inv_norm, grad_residual, zero_centered_gamma,
        {wants_x, wants_weight, wants_bias, wants_y});
    made = {std::move(grad_x), std::move(grad_weight), std::move(y), {}, std::move(grad_bias)};
  } else {
    TORCH_INTERNAL_ASSERT(!wants_bias, "norm_backward_quantize: RMSNorm has no bias");
    auto [grad_x, grad_weight, y] =
        RmsNormBackward::shapes(grad_y, x, weight, inv_norm, grad_residual, zero_centered_gamma,
                                {wants_x, wants_weight, wants_y});
    made = {std::move(grad_x),
            std::move(grad_weight),
            std::move(y),
            {},
            like(weight, weight.scalar_type(), false)};
  }
  made[3] = wants_sums ? SumRows::shapes(x, sums_dtype)[0] : like(x, sums_dtype, false);
  return joined(
      joined(std::move(made), group_specs(kName, x, given, quantizer, group_mask(output_mask, 1))),
      group_specs(kName, x, y_given, y_quantizer, group_mask(output_mask)));
}

void NormBackwardQuantize::cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                               const std::optional<Tensor>& bias, const std::optional<Tensor>& mean,
                               const Tensor& inv_norm, const std::optional<Tensor>& grad_residual,
                               const std::optional<Tensor>& given,
                               const std::optional<Tensor>& y_given, bool zero_centered_gamma,
                               at::ScalarType, const Quantizer* quantizer,
                               const Quantizer* y_quantizer, std::array<bool, 11>,
                               Results<kResults>& results) {
  const int64_t dims = weight.dim();
  const RowsIn of_grad(grad_y, dims), of_x(x, dims), of_residual(grad_residual, dims);
  const VectorIn gamma(weight), beta(bias);
  const Tensor means = mean ? mean->contiguous() : Tensor(), inv_norms = inv_norm.contiguous();
  const kernels::cpu::NormBackward all{.grad_y = of_grad,
                                       .x = of_x,
                                       .weight = gamma,
                                       .bias = beta,
                                       .mean = statistic_in(means),
                                       .inv_norm = statistic_in(inv_norms),
                                       .options = {0, zero_centered_gamma},
                                       .grad_residual = of_residual,
                                       .grad_x = {},
                                       .y = {}};
  const size_t rows = all.x.rows, hidden = all.x.cols;
  const kernels::Vector grad_weight = vector_out(results[1]), sums = vector_out(results[3]),
                        grad_bias = vector_out(results[4]);
  const bool sums_norm = grad_weight || grad_bias;
  const SumsOfMade of_norm(rows,
                           sums_norm ? kernels::cpu::norm_sum_cols(hidden, mean.has_value()) : 0);
  // Rows of a norm over several dimensions are several rows of x.
  const size_t pieces = sums.size == 0 ? 1 : hidden / sums.size;
  const SumsOfMade of_columns(rows * pieces, sums.size);
  const kernels::Rows grad_x{nullptr, all.x.element, rows, hidden, hidden};
  const CodesBeside of_y({nullptr, element_of(weight.scalar_type()), rows, hidden, hidden},
                         results[2], x.sym_sizes(), y_given, y_quantizer, group_of(results));
  const auto make = [&](size_t first, size_t count, void* to) {
    kernels::cpu::NormBackward some = all;
    some.grad_y = rows_from(all.grad_y, first, count);
    some.x = rows_from(all.x, first, count);
    some.grad_residual = rows_from(all.grad_residual, first, count);
    some.y = of_y.rows(first, count);
    if (mean) some.mean += first;
    some.inv_norm += first;
    some.grad_x = rows_at(to, grad_x, count);
    kernels::cpu::some_rows_norm_backward(some, of_norm.from_row(first));
    of_y.take(some.y, first);
    if (sums.size == 0) return;
    kernels::cpu::sum_some_rows({to, grad_x.element, count * pieces, sums.size, sums.size},
                                of_columns.from_row(first * pieces));
  };
  make_and_quantize({.y = grad_x,
                     .make = make,
                     .sources = {all.grad_y, all.x, all.grad_residual},
                     .in_order = std::max(of_norm.in_order(), of_columns.in_order()),
                     .together = of_y.together()},
                    results[0], x.sym_sizes(), given, quantizer, group_of(results, 1));
  if (sums_norm) kernels::cpu::add_norm_sums(of_norm.from_row(0), rows, grad_weight, grad_bias);
  of_columns.finish(sums);
  of_y.finish();
}

Results<NormBackwardQuantize::kResults> NormBackwardQuantize::reference(
    const Tensor& grad_y, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mean, const Tensor& inv_norm,
    const std::optional<Tensor>& grad_residual, const std::optional<Tensor>& given,
    const std::optional<Tensor>& y_given, bool zero_centered_gamma, at::ScalarType sums_dtype,
    const Quantizer* quantizer, const Quantizer* y_quantizer, std::array<bool, 11> output_mask) {
  const bool wants_weight = output_mask[1], wants_bias = output_mask[4],
             makes_y = output_mask[2] || y_quantizer != nullptr;
  Results<kMade> made;
  if (mean) {
    const auto [grad_x, grad_weight, grad_bias, y] = LayerNormBackward::reference(
        grad_y, x, weight, bias, *mean, inv_norm, grad_residual, zero_centered_gamma,
        {true, wants_weight, wants_bias, makes_y});
    made = {grad_x, grad_weight, y, {}, grad_bias};
  } else {
    const auto [grad_x, grad_weight, y] =
        RmsNormBackward::reference(grad_y, x, weight, inv_norm, grad_residual, zero_centered_gamma,
                                   {true, wants_weight, makes_y});
    made = {grad_x, grad_weight, y, {}, masked_out(weight)};
  }
  made[3] = output_mask[3] ? SumRows::reference(made[0], sums_dtype)[0] : masked_out(x, sums_dtype);
  auto codes = joined(quantize_reference(made[0], given, quantizer, group_mask(output_mask, 1)),
                      quantize_reference(made[2], y_given, y_quantizer, group_mask(output_mask)));
  for (const size_t i : {size_t{0}, size_t{2}})
    if (!output_mask[i]) made[i] = masked_out(made[i]);
  return joined(std::move(made), std::move(codes));
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<AddNormQuantize>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic, kArithmetic, kGiven>::these,
        AddNormQuantize::cpu}});
  register_kernel_op<NormBackwardQuantize>(
      library, {{"cpu", at::kCPU,
                 Takes<kArithmetic, kArithmetic, kArithmetic, kArithmetic, kStatistic, kStatistic,
                       kArithmetic, kGiven, kGiven, kArithmetic>::these,
                 NormBackwardQuantize::cpu}});
}

}  // namespace tandem::kernel_ops
