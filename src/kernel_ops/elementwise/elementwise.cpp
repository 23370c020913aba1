#include "kernel_ops/elementwise/elementwise.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/random.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/elementwise.h"

namespace tandem::kernel_ops {

Specs<1> AddBias::shapes(const Tensor& x, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& extra) {
  if (bias) check_last_dim("bias", x, *bias, "bias");
  if (extra) check_same_shape("add_extra_input", *extra, "the extra input", x, "x");
  const auto dtype = sum_dtype(x, bias);
  return {like(x, extra ? c10::promoteTypes(dtype, extra->scalar_type()) : dtype)};
}

void AddBias::cpu(const Tensor& x, const std::optional<Tensor>& bias,
                  const std::optional<Tensor>& extra, Results<1>& results) {
  kernels::cpu::add_bias(RowsIn(x), VectorIn(bias), element_of(sum_dtype(x, bias)), RowsIn(extra),
                         rows_out(results[0]));
}

Results<1> AddBias::reference(const Tensor& x, const std::optional<Tensor>& bias,
                              const std::optional<Tensor>& extra) {
  Tensor y = bias ? x + *bias : x;
  if (extra) y = y + *extra;
  return {y.is_same(x) ? x.clone() : y};
}

Specs<1> AddScaledBias::shapes(const Tensor& x, const Tensor& bias, double /*factor*/,
                               const std::optional<Tensor>& extra) {
  return AddBias::shapes(x, bias, extra);
}

void AddScaledBias::cpu(const Tensor& x, const Tensor& bias, double factor,
                        const std::optional<Tensor>& extra, Results<1>& results) {
  const std::optional<Tensor> scaled = bias.to(at::kFloat) * factor;
  kernels::cpu::add_bias(RowsIn(x), VectorIn(scaled), element_of(x.scalar_type()), RowsIn(extra),
                         rows_out(results[0]));
}

Results<1> AddScaledBias::reference(const Tensor& x, const Tensor& bias, double factor,
                                    const std::optional<Tensor>& extra) {
  const at::ScalarType own = sum_dtype(x, bias), dtype = wide(own);
  const Tensor y = (x.to(dtype) + bias.to(dtype) * factor).to(own);
  return {extra ? y + *extra : y};
}

Specs<1> SumRows::shapes(const Tensor& x, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.dim() >= 1, "sum_rows: expected x with at least 1 dimension, got a scalar. ",
                    "Pass x.reshape({1}) if one element is meant.");
  return {ResultSpec{{x.sym_size(-1)}, dtype}};
}

void SumRows::cpu(const Tensor& x, at::ScalarType, Results<1>& results) {
  kernels::cpu::sum_rows(RowsIn(x), vector_out(results[0]));
}

Results<1> SumRows::reference(const Tensor& x, at::ScalarType dtype) {
  return {x.reshape_symint({rows_of(x), x.sym_size(-1)})
              .sum(0, /*keepdim=*/false, wide(x.scalar_type()))
              .to(dtype)};
}

Specs<1> Behind::shapes(const Tensor& x, const Tensor& /*gradient*/) { return {like(x)}; }

Results<1> Behind::reference(const Tensor& x, const Tensor& /*gradient*/) {
  return {x.clone(at::MemoryFormat::Contiguous)};
}

Specs<1> Dropout::shapes(const Tensor& x, const Tensor& seed, double p) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "dropout: expected a probability p in [0, 1], got ", p,
                    ". p is the share that becomes zero.");
  check_floating("dropout", x, "x");
  TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, "dropout: expected an int64 seed, got ",
                   dtype_name(seed.scalar_type()), ". Draw it with torch.randint.");
  check_one_element("dropout", seed, "a seed");
  return {like(x)};
}

void Dropout::cpu(const Tensor& x, const Tensor& seed, double p, Results<1>& results) {
  kernels::cpu::dropout(RowsIn(x), static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()), p,
                        rows_out(results[0]));
}

Results<1> Dropout::reference(const Tensor& x, const Tensor& seed, double p) {
  if (p == 1) return {at::zeros_like(x)};
  const Tensor u =
      philox_words(seed, x.sym_numel()).bitwise_right_shift(8).to(at::kDouble) * 0x1p-24;
  const Tensor keep = (u >= p).reshape_symint(x.sym_sizes());
  return {at::where(keep, x.to(wide(x.scalar_type())) * (1 / (1 - p)), 0.0).to(x.scalar_type())};
}

Specs<1> DropoutAdd::shapes(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& seed,
                            double p, const std::optional<Tensor>& extra) {
  Dropout::shapes(x, seed, p);
  return AddBias::shapes(x, bias, extra);
}

void DropoutAdd::cpu(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& seed,
                     double p, const std::optional<Tensor>& extra, Results<1>& results) {
  kernels::cpu::dropout_add(RowsIn(x), VectorIn(bias), element_of(sum_dtype(x, bias)),
                            static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()), p,
                            RowsIn(extra), rows_out(results[0]));
}

Results<1> DropoutAdd::reference(const Tensor& x, const std::optional<Tensor>& bias,
                                 const Tensor& seed, double p, const std::optional<Tensor>& extra) {
  const Tensor kept = Dropout::reference(bias ? x + *bias : x, seed, p)[0];
  return {extra ? kept + *extra : kept};
}

Specs<2> DropoutBackwardBias::shapes(const Tensor& grad_y, const Tensor& seed, double p,
                                     at::ScalarType dtype, std::array<bool, 2> output_mask) {
  Specs<2> specs{Dropout::shapes(grad_y, seed, p)[0], SumRows::shapes(grad_y, dtype)[0]};
  if (!output_mask[0]) specs[0] = like(grad_y, grad_y.scalar_type(), false);
  if (!output_mask[1]) specs[1] = like(grad_y, dtype, false);
  return specs;
}

void DropoutBackwardBias::cpu(const Tensor& grad_y, const Tensor& seed, double p, at::ScalarType,
                              std::array<bool, 2> output_mask, Results<2>& results) {
  const auto key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  if (output_mask[1]) {
    kernels::cpu::dropout_backward_bias(RowsIn(grad_y), key, p, rows_out(results[0]),
                                        vector_out(results[1]));
  } else if (output_mask[0]) {
    kernels::cpu::dropout(RowsIn(grad_y), key, p, rows_out(results[0]));
  }
}

Results<2> DropoutBackwardBias::reference(const Tensor& grad_y, const Tensor& seed, double p,
                                          at::ScalarType dtype, std::array<bool, 2> output_mask) {
  const Tensor grad_x = Dropout::reference(grad_y, seed, p)[0];
  return {output_mask[0] ? grad_x : at::empty({0}, grad_y.options()),
          output_mask[1] ? SumRows::reference(grad_x, dtype)[0]
                         : at::empty({0}, grad_y.options().dtype(dtype))};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<AddBias>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic>::these, AddBias::cpu}});
  register_kernel_op<AddScaledBias>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic>::these, AddScaledBias::cpu}});
  register_kernel_op<SumRows>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, SumRows::cpu}});
  register_kernel_op<Dropout>(library,
                              {{"cpu", at::kCPU, Takes<kArithmetic, kSeed>::these, Dropout::cpu}});
  register_kernel_op<DropoutAdd>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kSeed, kArithmetic>::these,
                 DropoutAdd::cpu}});
  register_kernel_op<DropoutBackwardBias>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kSeed, kArithmetic>::these, DropoutBackwardBias::cpu}});
  register_kernel_op<Behind>(library, {});
}

}  // namespace tandem::kernel_ops
