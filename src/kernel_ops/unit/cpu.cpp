// Activations and gated linear units on the CPU.
#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/unit/activation.h"
#include "kernel_ops/unit/activation_function.h"
#include "quantization/formats/made.h"

namespace tandem::kernel_ops {

namespace {

/// The result, or scratch memory if it is not wanted: a kernel always writes it.
Tensor or_scratch(const Tensor& result, const ResultSpec& spec) {
  return result.defined() ? result : empty_cpu(C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype);
}

}  // namespace

void ActivationForward::cpu(const Args& args, std::span<Tensor> results) {
  const ActivationFunction function(args.activation, args.is_gated);
  const ResultSpec of_y = function.y_like(args.x, sum_dtype(args.x, args.bias));
  const RowsIn of_x(args.x);
  const VectorIn bias(args.bias);
  const kernels::ConstRows from = of_x;
  const kernels::Rows sums = rows_out(results[z]);
  const kernels::Element element = element_of(of_y.dtype);
  if (!args.codes)
    return kernels::cpu::activation_forward(function.kernel(), from, bias, element, sums,
                                            rows_out(or_scratch(results[y], of_y)));
  const size_t cols = args.is_gated ? from.cols / 2 : from.cols;
  const kernels::Rows made{nullptr, element, from.rows, cols, cols};
  const auto make = [&](size_t first, size_t count, void* to) {
    kernels::cpu::activation_forward(function.kernel(), rows_from(from, first, count), bias,
                                     element, rows_from(sums, first, count),
                                     rows_at(to, made, count));
  };
  make_and_quantize({.y = made, .make = make, .sources = {from}}, results[y], of_y.sizes,
                    args.codes, group_of<ActivationForward>(results));
}

void ActivationBackward::cpu(const Args& args, std::span<Tensor> results) {
  const kernels::Function function = ActivationFunction(args.activation, args.is_gated).kernel();
  const RowsIn of_grad(args.grad_y), of_z(args.z);
  const kernels::Vector totals = vector_out(results[grad_bias]);
  if (!args.codes && !args.y_codes)  // sums of columns are sums of the rounded grad_z
    return kernels::cpu::activation_backward(function, of_grad, of_z,
                                             rows_out(or_scratch(results[grad_z], like(args.z))),
                                             totals, rows_out(results[y]));
  const kernels::ConstRows grads = of_grad, from = of_z;
  const kernels::Rows made{nullptr, from.element, from.rows, from.cols, from.cols};
  const SumsOfMade sums(from.rows, totals.size);
  const CodesBeside of_y({nullptr, from.element, grads.rows, grads.cols, grads.cols}, results[y],
                         args.grad_y.sym_sizes(), args.y_codes,
                         group_of<ActivationBackward>(results, 1));
  const auto make = [&](size_t first, size_t count, void* to) {
    const kernels::Rows again = of_y.rows(first, count);
    kernels::cpu::some_rows_backward(function, rows_from(grads, first, count),
                                     rows_from(from, first, count), rows_at(to, made, count),
                                     sums.from_row(first), again);
    of_y.take(again, first);
  };
  make_and_quantize({.y = made,
                     .make = make,
                     .sources = {grads, from},
                     .in_order = sums.in_order(),
                     .together = of_y.together()},
                    results[grad_z], args.z.sym_sizes(), args.codes,
                    group_of<ActivationBackward>(results));
  sums.finish(totals);
  of_y.finish();
}

void ScaledActivationForward::cpu(const Args& args, std::span<Tensor> results) {
  kernels::cpu::scaled_forward(ActivationFunction(args.activation, args.is_gated).kernel(),
                               RowsIn(args.x), VectorIn(args.scales), rows_out(results[0]));
}

void ScaledActivationBackward::cpu(const Args& args, std::span<Tensor> results) {
  if (results[grad_scales].defined() && args.x.numel() == 0) results[grad_scales].zero_();
  kernels::cpu::scaled_backward(ActivationFunction(args.activation, args.is_gated).kernel(),
                                RowsIn(args.grad_y), RowsIn(args.x), VectorIn(args.scales),
                                rows_out(or_scratch(results[grad_x], like(args.x))),
                                vector_out(results[grad_scales]), rows_out(results[y]));
}

}  // namespace tandem::kernel_ops
