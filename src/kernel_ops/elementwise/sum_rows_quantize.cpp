#include "kernel_ops/elementwise/sum_rows_quantize.h"

#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernels/elementwise.h"
#include "quantization/formats/made.h"

namespace tandem::kernel_ops {

Specs<1 + group_size> SumRowsQuantize::shapes(const Tensor& x, const std::optional<Tensor>& given,
                                              at::ScalarType dtype, const Quantizer& quantizer,
                                              std::array<bool, 3> output_mask) {
  return joined(SumRows::shapes(x, dtype), group_specs(kName, x, given, quantizer, output_mask));
}

void SumRowsQuantize::cpu(const Tensor& x, const std::optional<Tensor>& given, at::ScalarType,
                          const Quantizer& quantizer, std::array<bool, 3>,
                          Results<1 + group_size>& results) {
  const RowsIn from(x);
  // Where one scale is found from all of x, that is read once more for the codes anyway, and one
  // after the other is as fast. Rows with gaps are read where they lie.
  const bool finds_one_scale =
      quantizer.format->layout.applies_at_end && !quantizer.scaling->takes_scale;
  if (finds_one_scale || !x.is_contiguous()) {
    Group group = group_of(results);
    kernels::cpu::sum_rows(from, vector_out(results[0]));
    return quantizer.scaling->quantize(x, given, quantizer, group);
  }
  const kernels::ConstRows rows = from;
  const SumsOfMade sums(rows.rows, rows.cols);
  const auto add = [&](size_t first, size_t count, void*) {
    kernels::cpu::sum_some_rows(rows_from(rows, first, count), sums.from_row(first));
  };
  make_and_quantize({.y = {nullptr, rows.element, rows.rows, rows.cols, rows.cols},
                     .make = add,
                     .sources = {rows},
                     .in_order = sums.in_order()},
                    x, x.sym_sizes(), given, &quantizer, group_of(results));
  sums.finish(vector_out(results[0]));
}

Results<1 + group_size> SumRowsQuantize::reference(const Tensor& x,
                                                   const std::optional<Tensor>& given,
                                                   at::ScalarType dtype, const Quantizer& quantizer,
                                                   std::array<bool, 3> output_mask) {
  return joined(SumRows::reference(x, dtype),
                Quantize::reference(x, given, quantizer, output_mask));
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<SumRowsQuantize>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kGiven, kArithmetic>::these, SumRowsQuantize::cpu}});
}

}  // namespace tandem::kernel_ops
