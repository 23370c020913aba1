#include "kernel_ops/quantize/quantize.h"

#include <ATen/TensorOperators.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/elementwise.h"
#include "kernels/quantize.h"
#include "quantization/formats/cpu_scaling.h"

namespace tandem::kernel_ops {

namespace {

Direction direction_along(bool column) { return column ? Direction::column : Direction::row; }

/// The sizes of the dequantized values of K's codes. Checks that codes, scales and amax fit each
/// other.
template <typename K>
c10::SymDimVector checked_sizes(const typename K::Args& args) {
  constexpr const char* op = K::kName;
  const Tensor &codes = args.codes, &dequant_scale = args.dequant_scale;
  const Quantizer& quantizer = args.quantizer;
  check_codes(op, codes);
  const CodeLayout& layout = quantizer.format->layout;
  TORCH_CHECK_VALUE(args.amax.has_value() == layout.has_amax, op, ": expected ",
                    layout.has_amax ? "an" : "no", " amax with codes of ", quantizer.text, ", got ",
                    args.amax ? "one" : "none", ". Pass what quantize returned beside the codes.");
  if (args.amax) check_one_element(op, *args.amax, "amax");
  TORCH_CHECK_VALUE(!is_packed(quantizer) || codes.dim() >= 1, op,
                    ": expected packed codes with at least 1 dimension, got a scalar. Pass what ",
                    "quantize returned.");
  const Direction direction = direction_along(args.column);
  const c10::SymDimVector numbers = sizes_of_numbers(quantizer, codes.sym_sizes(), direction);
  const auto sizes = layout.sizes(MatrixSize(numbers), direction);
  if (sizes.empty()) {
    check_one_element(op, dequant_scale, "dequant_scale");
    return numbers;
  }
  TORCH_CHECK_VALUE(dequant_scale.sym_sizes() == c10::SymIntArrayRef(sizes) &&
                        dequant_scale.scalar_type() == layout.dtype,
                    op, ": expected dequant_scale of shape ", c10::SymIntArrayRef(sizes), ", ",
                    dtype_name(layout.dtype), ", for ", args.column ? "column" : "row", " codes ",
                    codes.sym_sizes(), " of ", quantizer.text, ", got shape ",
                    dequant_scale.sym_sizes(), ", ", dtype_name(dequant_scale.scalar_type()),
                    ". Pass what quantize returned beside the codes.");
  return numbers;
}

/// The operand in these arguments.
template <typename Args>
CodedMatrix codes_of(const Args& args) {
  return {args.codes, &args.quantizer, direction_along(args.column), &args.dequant_scale,
          args.amax ? &*args.amax : nullptr};
}

float number_of(const std::optional<Tensor>& scale) {
  return scale ? *scale->const_data_ptr<float>() : 1.0f;
}

}  // namespace

Specs<group_size> Quantize::shapes(const Args& args) {
  return group_specs(kName, args.x.sym_sizes(), args.given, args.quantizer, args.output_mask);
}

void Quantize::cpu(const Args& args, std::span<Tensor> results) {
  quantize_on_cpu(RowsIn(args.x), args.given, args.quantizer, results.first<group_size>());
}

Results<group_size> Quantize::reference(const Args& args) {
  return group_reference(args.x, args.given, args.quantizer, args.output_mask);
}

Specs<1> Dequantize::shapes(const Args& args) {
  check_decoded_dtype(kName, args.dtype);
  c10::SymDimVector numbers = checked_sizes<Dequantize>(args);
  if (!args.sizes) return {ResultSpec{std::move(numbers), args.dtype}};
  const auto packed = sizes_of_codes(args.quantizer, *args.sizes, direction_along(args.column));
  TORCH_CHECK_VALUE(args.codes.sym_sizes() == c10::SymIntArrayRef(packed),
                    "dequantize: expected codes of shape ", c10::SymIntArrayRef(packed),
                    " for numbers of shape ", *args.sizes, ", got ", args.codes.sym_sizes(),
                    ". Pass the sizes of what was quantized.");
  return {ResultSpec{{args.sizes->begin(), args.sizes->end()}, args.dtype}};
}

void Dequantize::cpu(const Args& args, std::span<Tensor> results) {
  const Tensor codes = args.codes.contiguous(), scale = args.dequant_scale.contiguous();
  args.quantizer.scaling->cpu->dequantize({codes, &args.quantizer, direction_along(args.column),
                                           &scale, args.amax ? &*args.amax : nullptr},
                                          results[0]);
}

Results<1> Dequantize::reference(const Args& args) {
  const FormatDef& format = *args.quantizer.format;
  const Tensor scales = format.layout.scales_of_elements(codes_of(args));
  const Tensor each = format.layout.unpacked == nullptr
                          ? args.codes
                          : format.layout.unpacked(args.codes, direction_along(args.column));
  Tensor numbers = (decode_values(each, format.element) * scales).to(args.dtype);
  if (is_packed(args.quantizer) && args.sizes) {
    const MatrixSize padded(numbers.sym_sizes()), size(*args.sizes);
    numbers = numbers.reshape_symint({padded.rows, padded.cols})
                  .narrow_symint(0, 0, size.rows)
                  .narrow_symint(1, 0, size.cols)
                  .reshape_symint(*args.sizes);
  }
  return {numbers};
}

Specs<1> Decode::shapes(const Args& args) {
  return {ResultSpec{checked_sizes<Decode>(args), at::kFloat}};
}

void Decode::cpu(const Args& args, std::span<Tensor> results) {
  const FormatDef& format = *args.quantizer.format;
  if (!format.layout.applies_at_end)
    return Dequantize::cpu(dequantizing(codes_of(args), at::kFloat), results);
  const Tensor codes = args.codes.contiguous();
  kernels::cpu::dequantize(codes.const_data_ptr<uint8_t>(), format.element, 1.0f,
                           rows_out(results[0]));
}

Results<1> Decode::reference(const Args& args) {
  const FormatDef& format = *args.quantizer.format;
  if (!format.layout.applies_at_end)
    return Dequantize::reference(dequantizing(codes_of(args), at::kFloat));
  return {decode_values(args.codes, format.element)};
}

Specs<1> ScaleProduct::shapes(const Args& args) {
  if (args.a_scale) check_one_element(kName, *args.a_scale, "a_scale");
  if (args.b_scale) check_one_element(kName, *args.b_scale, "b_scale");
  return {like(args.product, args.dtype)};
}

void ScaleProduct::cpu(const Args& args, std::span<Tensor> results) {
  kernels::cpu::multiply_twice(RowsIn(args.product), number_of(args.a_scale),
                               number_of(args.b_scale), rows_out(results[0]));
}

Results<1> ScaleProduct::reference(const Args& args) {
  Tensor scaled = args.product;
  for (const auto* scale : {&args.a_scale, &args.b_scale})
    if (*scale) scaled = scaled * **scale;
  return {scaled.to(args.dtype)};
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
