#include "kernel_ops/quantize.h"

#include <ATen/TensorOperators.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "kernel_ops/checks.h"
#include "kernel_ops/operands.h"
#include "kernel_ops/register.h"
#include "kernel_ops/shapes.h"
#include "kernels/elementwise.h"
#include "kernels/quantize.h"

namespace tandem::kernel_ops {

namespace {

void no_gradient(std::string_view op, const Tensor& x) {
  // Below autograd whoever calls has the gradient in hand.
  const bool is_recorded =
      c10::GradMode::is_enabled() &&
      !c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
  TORCH_CHECK_NOT_IMPLEMENTED(!(is_recorded && x.requires_grad()), op,
                              ": expected a tensor that needs no gradient, got one that requires "
                              "it. Rounding has no useful ",
                              "derivative: quantize inside a pipeline, whose backward passes the "
                              "gradient through, or detach x.");
}

Direction direction_of(bool column) { return column ? Direction::column : Direction::row; }

void check_codes_and_scale(const char* op, const Tensor& codes, const Tensor& dequant_scale,
                           const Quantizer& quantizer, bool column) {
  check_codes(op, codes);
  const ScaleLayout& layout = quantizer.format->layout;
  const auto sizes = layout.sizes(codes, direction_of(column));
  if (sizes.empty()) {
    check_one_element(op, dequant_scale, "dequant_scale");
    return;
  }
  TORCH_CHECK_VALUE(dequant_scale.sym_sizes() == c10::SymIntArrayRef(sizes) &&
                        dequant_scale.scalar_type() == layout.dtype,
                    op, ": expected dequant_scale of shape ", c10::SymIntArrayRef(sizes), ", ",
                    dtype_name(layout.dtype), ", for ", column ? "column" : "row", " codes ",
                    codes.sym_sizes(), " of ", quantizer.text, ", got shape ",
                    dequant_scale.sym_sizes(), ", ", dtype_name(dequant_scale.scalar_type()),
                    ". Pass what quantize returned beside the codes.");
}

float number_of(const std::optional<Tensor>& scale) {
  return scale ? *scale->const_data_ptr<float>() : 1.0f;
}

}  // namespace

Specs<5> Quantize::shapes(const Tensor& x, const std::optional<Tensor>& scale,
                          const Quantizer& quantizer, std::array<bool, 3> output_mask) {
  return group_specs("quantize", x, scale, quantizer, output_mask);
}

void Quantize::cpu(const Tensor& x, const std::optional<Tensor>& scale, const Quantizer& quantizer,
                   std::array<bool, 3>, Results<5>& results) {
  quantizer.scaling->quantize(x, scale, quantizer, results);
}

Results<5> Quantize::reference(const Tensor& x, const std::optional<Tensor>& scale,
                               const Quantizer& quantizer, std::array<bool, 3> output_mask) {
  no_gradient("quantize", x);
  return group_reference(x, scale, quantizer, output_mask);
}

Specs<1> Dequantize::shapes(const Tensor& codes, const Tensor& dequant_scale,
                            const Quantizer& quantizer, bool column, at::ScalarType dtype) {
  check_codes_and_scale("dequantize", codes, dequant_scale, quantizer, column);
  return {like(codes, dtype)};
}

void Dequantize::cpu(const Tensor& codes, const Tensor& dequant_scale, const Quantizer& quantizer,
                     bool column, at::ScalarType, Results<1>& results) {
  const FormatDef& format = *quantizer.format;
  format.layout.dequantize(codes.contiguous(), dequant_scale.contiguous(), format.element,
                           direction_of(column), results[0]);
}

Results<1> Dequantize::reference(const Tensor& codes, const Tensor& dequant_scale,
                                 const Quantizer& quantizer, bool column, at::ScalarType dtype) {
  const FormatDef& format = *quantizer.format;
  const Tensor scales =
      format.layout.scales_of_elements(codes, dequant_scale, direction_of(column));
  return {(decode_values(codes, format.element) * scales).to(dtype)};
}

Specs<1> Decode::shapes(const Tensor& codes, const Tensor& dequant_scale,
                        const Quantizer& quantizer, bool column) {
  check_codes_and_scale("decode", codes, dequant_scale, quantizer, column);
  return {like(codes, at::kFloat)};
}

void Decode::cpu(const Tensor& codes, const Tensor& dequant_scale, const Quantizer& quantizer,
                 bool column, Results<1>& results) {
  if (!quantizer.format->layout.applies_at_end) {
    Dequantize::cpu(codes, dequant_scale, quantizer, column, at::kFloat, results);
    return;
  }
  const Tensor source = codes.contiguous();
  kernels::cpu::dequantize(source.const_data_ptr<uint8_t>(), quantizer.format->element, 1.0f,
                           rows_out(results[0]));
}

Results<1> Decode::reference(const Tensor& codes, const Tensor& dequant_scale,
                             const Quantizer& quantizer, bool column) {
  if (!quantizer.format->layout.applies_at_end)
    return Dequantize::reference(codes, dequant_scale, quantizer, column, at::kFloat);
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
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kStatistic>::these, Quantize::cpu}});
  register_kernel_op<Dequantize>(
      library, {{"cpu", at::kCPU, Takes<kCodes, kScale, kArithmetic>::these, Dequantize::cpu}});
  register_kernel_op<Decode>(library,
                             {{"cpu", at::kCPU, Takes<kCodes, kScale>::these, Decode::cpu}});
  register_kernel_op<ScaleProduct>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kStatistic, kStatistic, kArithmetic>::these,
                 ScaleProduct::cpu}});
}

}  // namespace tandem::kernel_ops
