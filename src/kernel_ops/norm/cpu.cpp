// Norms on the CPU.
#include <algorithm>

#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/norm/norm.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "quantization/formats/made.h"

namespace tandem::kernel_ops {

namespace {

/// The memory of a statistic that kernels write or read; nullptr if it is absent.
float* statistic_out(const Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<float>() : nullptr;
}
const float* statistic_in(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

}  // namespace

void NormForward::cpu(const Args& args, std::span<Tensor> results) {
  const int64_t dims = args.weight.dim();
  const RowsIn of_x(args.x, dims), of_extra(args.extra, dims);
  const VectorIn gamma(args.weight), beta(args.bias);
  kernels::cpu::NormForward all{
      .x = of_x,
      .extra = of_extra,
      .weight = gamma,
      .bias = beta,
      .options = {args.eps, args.zero_centered_gamma, args.rounds_before_weight},
      .sum_element = element_of(sum_dtype(args.x, args.extra)),
      .sum = rows_out(results[sum], dims),
      .mean = statistic_out(results[mean]),
      .inv_norm = statistic_out(results[inv_norm])};
  if (!args.codes) {  // kernels always write y
    const Tensor of_y =
        results[y].defined() ? results[y] : empty_cpu(args.x.sizes(), args.weight.scalar_type());
    all.y = rows_out(of_y, dims);
    return kernels::cpu::norm_forward(all);
  }
  const kernels::Rows made{nullptr, element_of(args.weight.scalar_type()), all.x.rows, all.x.cols,
                           all.x.cols};
  const auto make = [&](size_t first, size_t count, void* to) {
    kernels::cpu::NormForward some = all;
    some.x = rows_from(all.x, first, count);
    some.extra = rows_from(all.extra, first, count);
    some.sum = rows_from(all.sum, first, count);
    some.y = rows_at(to, made, count);
    if (args.bias) some.mean += first;
    some.inv_norm += first;
    kernels::cpu::norm_forward(some);
  };
  make_and_quantize({.y = made, .make = make, .sources = {all.x, all.extra}}, results[y],
                    args.x.sym_sizes(), args.codes, group_of<NormForward>(results));
}

void NormBackward::cpu(const Args& args, std::span<Tensor> results) {
  const int64_t dims = args.weight.dim();
  const RowsIn of_grad(args.grad_y, dims), of_x(args.x, dims),
      of_residual(args.grad_residual, dims);
  const VectorIn gamma(args.weight), beta(args.bias);
  const Tensor means = args.mean ? args.mean->contiguous() : Tensor(),
               inv_norms = args.inv_norm.contiguous();
  const kernels::Vector of_weight = vector_out(results[grad_weight]),
                        of_columns = vector_out(results[sums]),
                        of_bias = vector_out(results[grad_bias]);
  kernels::cpu::NormBackward all{
      .grad_y = of_grad,
      .x = of_x,
      .weight = gamma,
      .bias = beta,
      .mean = statistic_in(means),
      .inv_norm = statistic_in(inv_norms),
      .options = {0, args.zero_centered_gamma, args.rounds_before_weight},
      .grad_residual = of_residual};
  if (!args.codes && !args.y_codes && !results[sums].defined()) {
    all.grad_x = rows_out(results[grad_x], dims);
    all.y = rows_out(results[y], dims);
    return kernels::cpu::norm_backward(all, of_weight, of_bias);
  }
  const size_t rows = all.x.rows, hidden = all.x.cols;
  const bool sums_norm = of_weight || of_bias;
  const SumsOfMade of_norm(
      rows, sums_norm ? kernels::cpu::norm_sum_cols(hidden, args.mean.has_value()) : 0);
  // A row of a norm over several dimensions covers several rows of x.
  const size_t pieces = of_columns.size == 0 ? 1 : hidden / of_columns.size;
  const SumsOfMade of_made(rows * pieces, of_columns.size);
  const kernels::Rows made{nullptr, all.x.element, rows, hidden, hidden};
  const CodesBeside of_y({nullptr, element_of(args.weight.scalar_type()), rows, hidden, hidden},
                         results[y], args.x.sym_sizes(), args.y_codes,
                         group_of<NormBackward>(results, 1));
  const auto make = [&](size_t first, size_t count, void* to) {
    kernels::cpu::NormBackward some = all;
    some.grad_y = rows_from(all.grad_y, first, count);
    some.x = rows_from(all.x, first, count);
    some.grad_residual = rows_from(all.grad_residual, first, count);
    some.y = of_y.rows(first, count);
    if (args.mean) some.mean += first;
    some.inv_norm += first;
    some.grad_x = rows_at(to, made, count);
    kernels::cpu::some_rows_norm_backward(some, of_norm.from_row(first));
    of_y.take(some.y, first);
    if (of_columns.size == 0) return;
    kernels::cpu::sum_some_rows(
        {to, made.element, count * pieces, of_columns.size, of_columns.size},
        of_made.from_row(first * pieces));
  };
  make_and_quantize({.y = made,
                     .make = make,
                     .sources = {all.grad_y, all.x, all.grad_residual},
                     .in_order = std::max(of_norm.in_order(), of_made.in_order()),
                     .together = of_y.together()},
                    results[grad_x], args.x.sym_sizes(), args.codes,
                    group_of<NormBackward>(results));
  if (sums_norm) kernels::cpu::add_norm_sums(of_norm.from_row(0), rows, of_weight, of_bias);
  of_made.finish(of_columns);
  of_y.finish();
}

void L2NormForward::cpu(const Args& args, std::span<Tensor> results) {
  kernels::cpu::norm_forward({.x = RowsIn(args.x),
                              .options = {.eps = args.eps, .sums = true},
                              .y = rows_out(results[0]),
                              .inv_norm = statistic_out(results[1])});
}

void L2NormBackward::cpu(const Args& args, std::span<Tensor> results) {
  const Tensor inv_norm = args.inv_norm.contiguous();
  kernels::cpu::norm_backward({.grad_y = RowsIn(args.grad_y),
                               .x = RowsIn(args.x),
                               .inv_norm = statistic_in(inv_norm),
                               .options = {.sums = true},
                               .grad_x = rows_out(results[0]),
                               .y = rows_out(results[1])});
}

}  // namespace tandem::kernel_ops
