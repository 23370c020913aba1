#include "kernel_ops/quantize/quantize.h"

#include <ATen/TensorOperators.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/gradient.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/elementwise.h"
#include "kernels/quantize.h"

namespace tandem::kernel_ops {

namespace {

Direction direction_of(bool column) { return column ? Direction::column : Direction::row; }

/// The sizes of the numbers of these codes, after checking that all of it belongs together.
c10::SymDimVector checked_sizes(const char* op, const Tensor& codes, const Tensor& dequant_scale,
                                const Quantizer& quantizer, bool column,
                                const std::optional<Tensor>& amax) {
  check_codes(op, codes);
  const CodeLayout& layout = quantizer.format->layout;
  TORCH_CHECK_VALUE(amax.has_value() == layout.has_amax, op, ": expected ",
                    layout.has_amax ? "an" : "no", " amax with codes of ", quantizer.text, ", got ",
                    amax ? "one" : "none", ". Pass what quantize returned beside the codes.");
  if (amax) check_one_element(op, *amax, "amax");
  TORCH_CHECK_VALUE(!is_packed(quantizer) || codes.dim() >= 1, op,
                    ": expected packed codes with at least 1 dimension, got a scalar. Pass what ",
                    "quantize returned.");
  const Direction direction = direction_of(column);
  const c10::SymDimVector numbers = sizes_of_numbers(quantizer, codes.sym_sizes(), direction);
  const auto sizes = layout.sizes(MatrixSize(numbers), direction);
  if (sizes.empty()) {
    check_one_element(op, dequant_scale, "dequant_scale");
    return numbers;
  }
  TORCH_CHECK_VALUE(dequant_scale.sym_sizes() == c10::SymIntArrayRef(sizes) &&
                        dequant_scale.scalar_type() == layout.dtype,
                    op, ": expected dequant_scale of shape ", c10::SymIntArrayRef(sizes), ", ",
                    dtype_name(layout.dtype), ", for ", column ? "column" : "row", " codes ",
                    codes.sym_sizes(), " of ", quantizer.text, ", got shape ",
                    dequant_scale.sym_sizes(), ", ", dtype_name(dequant_scale.scalar_type()),
                    ". Pass what quantize returned beside the codes.");
  return numbers;
}

float number_of(const std::optional<Tensor>& scale) {
  return scale ? *scale->const_data_ptr<float>() : 1.0f;
}

}  // namespace

Specs<group_size> Quantize::shapes(const Tensor& x, const std::optional<Tensor>& given,
                                   const Quantizer& quantizer, std::array<bool, 3> output_mask) {
  return group_specs("quantize", x, given, quantizer, output_mask);
}

void Quantize::cpu(const Tensor& x, const std::optional<Tensor>& given, const Quantizer& quantizer,
                   std::array<bool, 3>, Results<group_size>& results) {
  quantizer.scaling->quantize(x, given, quantizer, results);
}

Results<group_size> Quantize::reference(const Tensor& x, const std::optional<Tensor>& given,
                                        const Quantizer& quantizer,
                                        std::array<bool, 3> output_mask) {
  check_no_gradient("quantize", x);
  return group_reference(x, given, quantizer, output_mask);
}

Results<group_size> quantize_reference(const Tensor& x, const std::optional<Tensor>& given,
                                       const Quantizer* quantizer, GroupMask mask) {
  return quantizer != nullptr ? Quantize::reference(x, given, *quantizer, mask)
                              : group_reference(x, given, quantizer, mask);
}

Specs<1> Dequantize::shapes(const Tensor& codes, const Tensor& dequant_scale,
                            const Quantizer& quantizer, bool column, at::ScalarType dtype,
                            const std::optional<Tensor>& amax, at::OptionalSymIntArrayRef sizes) {
  check_decoded_dtype("dequantize", dtype);
  c10::SymDimVector numbers =
      checked_sizes("dequantize", codes, dequant_scale, quantizer, column, amax);
  if (!sizes) return {ResultSpec{std::move(numbers), dtype, true}};
  const auto packed = sizes_of_codes(quantizer, *sizes, direction_of(column));
  TORCH_CHECK_VALUE(codes.sym_sizes() == c10::SymIntArrayRef(packed),
                    "dequantize: expected codes of shape ", c10::SymIntArrayRef(packed),
                    " for numbers of shape ", *sizes, ", got ", codes.sym_sizes(),
                    ". Pass the sizes of what was quantized.");
  return {ResultSpec{{sizes->begin(), sizes->end()}, dtype, true}};
}

void Dequantize::cpu(const Tensor& codes, const Tensor& dequant_scale, const Quantizer& quantizer,
                     bool column, at::ScalarType, const std::optional<Tensor>& amax,
                     at::OptionalSymIntArrayRef, Results<1>& results) {
  const FormatDef& format = *quantizer.format;
  const Tensor source = codes.contiguous(), scale = dequant_scale.contiguous();
  format.layout.dequantize({source, scale, amax, direction_of(column)}, format.element, results[0]);
}

Results<1> Dequantize::reference(const Tensor& codes, const Tensor& dequant_scale,
                                 const Quantizer& quantizer, bool column, at::ScalarType dtype,
                                 const std::optional<Tensor>& amax,
                                 at::OptionalSymIntArrayRef sizes) {
  const FormatDef& format = *quantizer.format;
  const Direction direction = direction_of(column);
  const Tensor scales = format.layout.scales_of_elements({codes, dequant_scale, amax, direction});
  const Tensor each =
      format.layout.unpacked == nullptr ? codes : format.layout.unpacked(codes, direction);
  Tensor numbers = (decode_values(each, format.element) * scales).to(dtype);
  if (is_packed(quantizer) && sizes) {
    const MatrixSize padded(numbers.sym_sizes()), size(*sizes);
    numbers = numbers.reshape_symint({padded.rows, padded.cols})
                  .narrow_symint(0, 0, size.rows)
                  .narrow_symint(1, 0, size.cols)
                  .reshape_symint(*sizes);
  }
  return {numbers};
}

Specs<1> Decode::shapes(const Tensor& codes, const Tensor& dequant_scale,
                        const Quantizer& quantizer, bool column,
                        const std::optional<Tensor>& amax) {
  return {ResultSpec{checked_sizes("decode", codes, dequant_scale, quantizer, column, amax),
                     at::kFloat, true}};
}

void Decode::cpu(const Tensor& codes, const Tensor& dequant_scale, const Quantizer& quantizer,
                 bool column, const std::optional<Tensor>& amax, Results<1>& results) {
  if (!quantizer.format->layout.applies_at_end) {
    Dequantize::cpu(codes, dequant_scale, quantizer, column, at::kFloat, amax, std::nullopt,
                    results);
    return;
  }
  const Tensor source = codes.contiguous();
  kernels::cpu::dequantize(source.const_data_ptr<uint8_t>(), quantizer.format->element, 1.0f,
                           rows_out(results[0]));
}

Results<1> Decode::reference(const Tensor& codes, const Tensor& dequant_scale,
                             const Quantizer& quantizer, bool column,
                             const std::optional<Tensor>& amax) {
  if (!quantizer.format->layout.applies_at_end)
    return Dequantize::reference(codes, dequant_scale, quantizer, column, at::kFloat, amax,
                                 std::nullopt);
  return {decode_values(codes, quantizer.format->element)};
}

Specs<1> ScaleProduct::shapes(const Tensor& product, const std::optional<Tensor>& a_scale,
                              const std::optional<Tensor>& b_scale, at::ScalarType dtype) {
  if (a_scale) check_one_element("scale_product", *a_scale, "a_scale");
  if (b_scale) check_one_element("scale_product", *b_scale, "b_scale");
  return {like(product, dtype)};
}

void ScaleProduct::cpu(const Tensor& product, const std::optional<Tensor>& a_scale,
                       const std::optional<Tensor>& b_scale, at::ScalarType, Results<1>& results) {
  kernels::cpu::multiply_twice(RowsIn(product), number_of(a_scale), number_of(b_scale),
                               rows_out(results[0]));
}

Results<1> ScaleProduct::reference(const Tensor& product, const std::optional<Tensor>& a_scale,
                                   const std::optional<Tensor>& b_scale, at::ScalarType dtype) {
  Tensor scaled = product;
  for (const auto* scale : {&a_scale, &b_scale})
    if (*scale) scaled = scaled * **scale;
  return {scaled.to(dtype)};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<Quantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kGiven>::these, Quantize::cpu}});
  register_kernel_op<Dequantize>(
      library,
      {{"cpu", at::kCPU, Takes<kCodes, kScale, kArithmetic, kStatistic>::these, Dequantize::cpu}});
  register_kernel_op<Decode>(
      library, {{"cpu", at::kCPU, Takes<kCodes, kScale, kStatistic>::these, Decode::cpu}});
  register_kernel_op<ScaleProduct>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kStatistic, kStatistic, kArithmetic>::these,
                 ScaleProduct::cpu}});
}

}  // namespace tandem::kernel_ops
