#include "kernel_ops/elementwise/elementwise.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/random.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/elementwise.h"
#include "quantization/formats/cpu_scaling.h"
#include "quantization/formats/made.h"

namespace tandem::kernel_ops {

namespace {

uint64_t key_of(const Tensor& seed) {
  return static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
}

/// The spec of x + bias (+ extra).
ResultSpec sum_spec(const Tensor& x, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& extra) {
  if (bias) check_last_dim("bias", x, *bias, "bias");
  if (extra) check_same_shape("add_extra_input", *extra, "the extra input", x, "x");
  const at::ScalarType dtype = sum_dtype(x, bias);
  return like(x, extra ? c10::promoteTypes(dtype, extra->scalar_type()) : dtype);
}

}  // namespace

Specs<1> AddBias::shapes(const Args& args) {
  Specs<1> specs{sum_spec(args.x, args.bias, args.extra)};
  specs[0].dtype = args.dtype.value_or(specs[0].dtype);
  return specs;
}

void AddBias::cpu(const Args& args, std::span<Tensor> results) {
  const auto& [x, bias, factor, extra, dtype] = args;
  const std::optional<Tensor> scaled = bias && factor != 1 ? bias->to(at::kFloat) * factor : bias;
  kernels::cpu::add_bias(RowsIn(x), VectorIn(scaled), RowsIn(extra), rows_out(results[0]));
}

Results<1> AddBias::reference(const Args& args) {
  const auto& [x, bias, factor, extra, dtype] = args;
  const at::ScalarType promoted = sum_spec(x, bias, extra).dtype, computed = wide(promoted);
  Tensor y = x.to(computed);
  if (bias) y = y + (factor == 1 ? bias->to(computed) : bias->to(computed) * factor);
  if (extra) y = y + extra->to(computed);
  y = y.to(dtype.value_or(promoted));
  return {y.is_same(x) ? x.clone() : y};
}

Specs<1> SumRows::shapes(const Args& args) {
  const Tensor& x = args.x;
  TORCH_CHECK_VALUE(x.dim() >= 1, "sum_rows: expected x with at least 1 dimension, got a scalar. ",
                    "Pass x.reshape({1}) if one element is meant.");
  return {ResultSpec{{x.sym_size(-1)}, args.dtype}};
}

void SumRows::cpu(const Args& args, std::span<Tensor> results) {
  const auto& [x, dtype, codes] = args;
  const RowsIn from(x);
  const kernels::ConstRows rows = from;
  const kernels::Vector totals = vector_out(results[0]);
  if (!codes) return kernels::cpu::sum_rows(rows, totals);
  const Group group = group_of<SumRows>(results);
  const ScalingDef& scaling = *codes.quantizer->scaling;
  // If one scale is computed from all of x, x is read a second time for its codes anyway, and
  // separate passes are as fast. Rows with gaps also take separate passes, which read them in
  // place.
  const bool finds_one_scale =
      codes.quantizer->format->layout.applies_at_end && !scaling.takes_scale;
  if (finds_one_scale || !x.is_contiguous()) {
    kernels::cpu::sum_rows(rows, totals);
    return quantize_on_cpu(rows, codes.given, *codes.quantizer, group);
  }
  const SumsOfMade sums(rows.rows, rows.cols);
  const auto add = [&](size_t first, size_t count, void*) {
    kernels::cpu::sum_some_rows(rows_from(rows, first, count), sums.from_row(first));
  };
  make_and_quantize({.y = {nullptr, rows.element, rows.rows, rows.cols, rows.cols},
                     .make = add,
                     .sources = {rows},
                     .in_order = sums.in_order()},
                    x, x.sym_sizes(), codes, group);
  sums.finish(totals);
}

Results<1> SumRows::reference(const Args& args) {
  const Tensor& x = args.x;
  return {x.reshape_symint({rows_of(x), x.sym_size(-1)})
              .sum(0, /*keepdim=*/false, wide(x.scalar_type()))
              .to(args.dtype)};
}

Specs<2> ScaleRows::shapes(const Args& args) {
  Specs<2> specs{like(args.x), SumRows::shapes({.x = args.x, .dtype = args.dtype})[0]};
  for (size_t i = 0; i < specs.size(); ++i) specs[i].wanted = args.output_mask[i];
  return specs;
}

void ScaleRows::cpu(const Args& args, std::span<Tensor> results) {
  const auto factor = static_cast<float>(args.factor);
  const RowsIn of_x(args.x);
  const kernels::ConstRows from = of_x;
  const kernels::Vector totals = vector_out(results[sums]);
  if (!args.codes) {
    const Tensor scaled =
        results[y].defined() ? results[y] : empty_cpu(args.x.sizes(), args.x.scalar_type());
    const kernels::Rows to = rows_out(scaled);
    kernels::cpu::multiply_twice(from, factor, 1, to);
    if (args.output_mask[sums]) kernels::cpu::sum_rows(to, totals);
    return;
  }
  const kernels::Rows made{nullptr, from.element, from.rows, from.cols, from.cols};
  const SumsOfMade sums_of_made(from.rows, totals.size);
  const auto make = [&](size_t first, size_t count, void* memory) {
    const kernels::Rows to = rows_at(memory, made, count);
    kernels::cpu::multiply_twice(rows_from(from, first, count), factor, 1, to);
    if (args.output_mask[sums]) kernels::cpu::sum_some_rows(to, sums_of_made.from_row(first));
  };
  make_and_quantize(
      {.y = made, .make = make, .sources = {from}, .in_order = sums_of_made.in_order()}, results[y],
      args.x.sym_sizes(), args.codes, group_of<ScaleRows>(results));
  sums_of_made.finish(totals);
}

Results<2> ScaleRows::reference(const Args& args) {
  const Tensor made = args.x * args.factor;
  return {args.output_mask[y] ? made : masked_out(args.x),
          args.output_mask[sums] ? SumRows::reference({made, args.dtype})[0]
                                 : masked_out(args.x, args.dtype)};
}

Specs<1> Dropout::shapes(const Args& args) {
  const double p = args.p;
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "dropout: expected a probability p in [0, 1], got ", p,
                    ". p is the share that becomes zero.");
  check_floating("dropout", args.x, "x");
  TORCH_CHECK_TYPE(args.seed.scalar_type() == at::kLong, "dropout: expected an int64 seed, got ",
                   dtype_name(args.seed.scalar_type()), ". Draw it with torch.randint.");
  check_one_element("dropout", args.seed, "a seed");
  return {sum_spec(args.x, args.bias, args.extra)};
}

void Dropout::cpu(const Args& args, std::span<Tensor> results) {
  kernels::cpu::dropout_add(RowsIn(args.x), VectorIn(args.bias), key_of(args.seed), args.p,
                            RowsIn(args.extra), rows_out(results[0]));
}

Results<1> Dropout::reference(const Args& args) {
  const auto& [x, bias, seed, p, extra] = args;
  const at::ScalarType dtype = sum_spec(x, bias, extra).dtype, computed = wide(dtype);
  const Tensor sum = bias ? x.to(computed) + bias->to(computed) : x.to(computed);
  Tensor y;
  if (p == 1) {
    y = at::zeros_like(sum);
  } else {
    const Tensor u =
        philox_words(seed, sum.sym_numel()).bitwise_right_shift(8).to(at::kDouble) * 0x1p-24;
    const Tensor keep = (u >= p).reshape_symint(sum.sym_sizes()), scaled = sum * (1 / (1 - p));
    y = at::where(keep, scaled, 0.0);
  }
  return {(extra ? y + extra->to(computed) : y).to(dtype)};
}

Specs<2> DropoutBackward::shapes(const Args& args) {
  const auto& [grad_y, seed, p, dtype, output_mask, codes] = args;
  Specs<2> specs{Dropout::shapes({.x = grad_y, .seed = seed, .p = p})[0],
                 SumRows::shapes({.x = grad_y, .dtype = dtype})[0]};
  for (size_t i = 0; i < specs.size(); ++i) specs[i].wanted = output_mask[i];
  return specs;
}

void DropoutBackward::cpu(const Args& args, std::span<Tensor> results) {
  const uint64_t key = key_of(args.seed);
  const RowsIn of_grad(args.grad_y);
  const kernels::ConstRows from = of_grad;
  const kernels::Rows to = rows_out(results[grad_x]);
  const kernels::Vector totals = vector_out(results[grad_bias]);
  if (!args.codes) {
    if (args.output_mask[grad_bias])
      return kernels::cpu::dropout_backward_bias(from, key, args.p, to, totals);
    if (args.output_mask[grad_x]) kernels::cpu::dropout(from, key, args.p, to);
    return;
  }
  const kernels::Rows made{nullptr, from.element, from.rows, from.cols, from.cols};
  const SumsOfMade sums(from.rows, totals.size);
  const auto make = [&](size_t first, size_t count, void* memory) {
    kernels::cpu::dropout_some_rows_backward(rows_from(from, first, count), key, args.p,
                                             rows_at(memory, made, count), sums.from_row(first));
  };
  make_and_quantize({.y = made, .make = make, .sources = {from}, .in_order = sums.in_order()},
                    results[grad_x], args.grad_y.sym_sizes(), args.codes,
                    group_of<DropoutBackward>(results));
  sums.finish(totals);
}

Results<2> DropoutBackward::reference(const Args& args) {
  const auto& [grad_y, seed, p, dtype, output_mask, codes] = args;
  const Tensor made = Dropout::reference({.x = grad_y, .seed = seed, .p = p})[0];
  return {
      output_mask[grad_x] ? made : masked_out(grad_y),
      output_mask[grad_bias] ? SumRows::reference({made, dtype})[0] : masked_out(grad_y, dtype)};
}

Specs<1> Behind::shapes(const Args& args) { return {like(args.x)}; }

Results<1> Behind::reference(const Args& args) {
  return {args.x.clone(at::MemoryFormat::Contiguous)};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<AddBias>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic>::these, AddBias::cpu}});
  register_kernel_op<SumRows>(library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these,
                                         SumRows::cpu, /*makes_codes=*/true}});
  register_kernel_op<ScaleRows>(library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these,
                                           ScaleRows::cpu, /*makes_codes=*/true}});
  register_kernel_op<Dropout>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kSeed, kArithmetic>::these,
                 Dropout::cpu}});
  register_kernel_op<DropoutBackward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kSeed, kArithmetic>::these,
                 DropoutBackward::cpu, /*makes_codes=*/true}});
  register_kernel_op<Behind>(library, {});
}

}  // namespace tandem::kernel_ops
