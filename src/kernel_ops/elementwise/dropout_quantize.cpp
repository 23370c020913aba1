#include "kernel_ops/elementwise/dropout_quantize.h"

#include <ATen/ops/empty.h>

#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernels/elementwise.h"
#include "quantization/formats/made.h"

namespace tandem::kernel_ops {

Specs<2 + group_size> DropoutBackwardQuantize::shapes(const Tensor& grad_y, const Tensor& seed,
                                                      const std::optional<Tensor>& given, double p,
                                                      at::ScalarType dtype,
                                                      const Quantizer& quantizer,
                                                      std::array<bool, 5> output_mask) {
  return joined(
      DropoutBackwardBias::shapes(grad_y, seed, p, dtype, {output_mask[0], output_mask[1]}),
      group_specs(kName, grad_y, given, quantizer, group_mask(output_mask)));
}

void DropoutBackwardQuantize::cpu(const Tensor& grad_y, const Tensor& seed,
                                  const std::optional<Tensor>& given, double p, at::ScalarType,
                                  const Quantizer& quantizer, std::array<bool, 5>,
                                  Results<2 + group_size>& results) {
  const auto key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  const RowsIn of_grad(grad_y);
  const kernels::ConstRows from = of_grad;
  const kernels::Rows grad_x{nullptr, from.element, from.rows, from.cols, from.cols};
  const kernels::Vector grad_bias = vector_out(results[1]);
  const SumsOfMade sums(from.rows, grad_bias.size);
  const auto make = [&](size_t first, size_t count, void* to) {
    kernels::cpu::dropout_some_rows_backward(rows_from(from, first, count), key, p,
                                             rows_at(to, grad_x, count), sums.from_row(first));
  };
  make_and_quantize({.y = grad_x, .make = make, .sources = {from}, .in_order = sums.in_order()},
                    results[0], grad_y.sym_sizes(), given, &quantizer, group_of(results));
  sums.finish(grad_bias);
}

Results<2 + group_size> DropoutBackwardQuantize::reference(const Tensor& grad_y, const Tensor& seed,
                                                           const std::optional<Tensor>& given,
                                                           double p, at::ScalarType dtype,
                                                           const Quantizer& quantizer,
                                                           std::array<bool, 5> output_mask) {
  auto made = DropoutBackwardBias::reference(grad_y, seed, p, dtype, {true, output_mask[1]});
  auto codes = Quantize::reference(made[0], given, quantizer, group_mask(output_mask));
  if (!output_mask[0]) made[0] = at::empty({0}, grad_y.options());
  return joined(std::move(made), std::move(codes));
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<DropoutBackwardQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kSeed, kGiven, kArithmetic>::these,
                 DropoutBackwardQuantize::cpu}});
}

}  // namespace tandem::kernel_ops
