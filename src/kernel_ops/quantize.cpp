#include "kernel_ops/quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/round.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/signbit.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "kernel_ops/checks.h"
#include "kernel_ops/operands.h"
#include "kernel_ops/register.h"
#include "kernel_ops/shapes.h"
#include "kernels/elementwise.h"

namespace tandem::kernel_ops {

kernels::Fp8Format fp8_format(std::string_view name) {
  for (size_t i = 0; i < std::size(kernels::kFp8Formats); ++i)
    if (name == kernels::kFp8Formats[i].name) return static_cast<kernels::Fp8Format>(i);
  TORCH_CHECK_VALUE(false, "quantize: expected format \"e4m3\" or \"e5m2\", got \"", name,
                    "\". Choose one of the two.");
}

kernels::CurrentScaling current_scaling(std::string_view format, double amax_epsilon,
                                        bool power_of_two) {
  return {fp8_format(format), static_cast<float>(amax_epsilon), power_of_two};
}

namespace {

constexpr double kFloatMax = std::numeric_limits<float>::max();

/// The saturating cast in ATen operations: exact in float64, where no step of it rounds but the one that should.
Tensor encode(const Tensor& scaled, kernels::Fp8Format format) {
  const kernels::Fp8Traits& f = kernels::traits_of(format);
  const Tensor x = scaled.to(at::kDouble), magnitude = at::clamp(at::abs(x), 0, f.max);
  // frexp gives zero the exponent 0, as if it lay in [0.5, 1).
  const Tensor exponent =
      at::where(magnitude == 0, f.min_exponent(),
                at::clamp(std::get<1>(at::frexp(magnitude)) - 1, f.min_exponent()));
  const Tensor quantum =
      at::ldexp(at::scalar_tensor(1.0, x.options()), (exponent - f.mantissa_bits).to(at::kDouble));
  const Tensor steps =
      at::round(magnitude / quantum).to(at::kLong);  // nearest even, as at::round is
  const Tensor code =
      ((exponent - f.min_exponent()).to(at::kLong) * (int64_t{1} << f.mantissa_bits) + steps);
  const Tensor with_sign =
      at::bitwise_or(at::clamp(code, 0, int64_t{f.largest}), at::signbit(x).to(at::kLong) * 128);
  return at::where(at::isnan(x), 0x7F, with_sign).to(at::kByte);
}

Tensor decode_values(const Tensor& codes, kernels::Fp8Format format) {
  std::vector<float> table(256);
  for (size_t code = 0; code < table.size(); ++code)
    table[code] = kernels::float_from_fp8(static_cast<uint8_t>(code), format);
  return at::tensor(table, codes.options().dtype(at::kFloat)).index({codes.to(at::kLong)});
}

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

}  // namespace

Specs<3> QuantizeCurrent::shapes(const Tensor& x, std::string_view format, double amax_epsilon,
                                 bool) {
  fp8_format(format);
  TORCH_CHECK_VALUE(amax_epsilon >= 0, "quantize: expected amax_epsilon >= 0, got ", amax_epsilon,
                    ". 0 sets no lower bound.");
  return {like(x, at::kByte), scalar(at::kFloat), scalar(at::kFloat)};
}

void QuantizeCurrent::cpu(const Tensor& x, std::string_view format, double amax_epsilon,
                          bool power_of_two, Results<3>& results) {
  kernels::cpu::quantize_current(
      RowsIn(x), current_scaling(format, amax_epsilon, power_of_two),
      {results[0].data_ptr<uint8_t>(), results[1].data_ptr<float>(), results[2].data_ptr<float>()});
}

Results<3> QuantizeCurrent::reference(const Tensor& x, std::string_view format, double amax_epsilon,
                                      bool power_of_two) {
  no_gradient("quantize", x);
  const auto fp8 = fp8_format(format);
  const Tensor source = x.to(at::kFloat), magnitude = at::abs(source);
  const Tensor finite = at::where(at::isnan(magnitude), 0.0f, magnitude).flatten();
  const Tensor amax = at::cat({finite, at::zeros({1}, finite.options())}).amax();
  const Tensor bounded = at::clamp(amax, static_cast<float>(amax_epsilon));
  // A float64 quotient of two float32 numbers, rounded to float32, is the correctly rounded float32 quotient.
  const Tensor quotient =
      (at::scalar_tensor(double{kernels::fp8_max(fp8)}, bounded.options().dtype(at::kDouble)) /
       bounded.to(at::kDouble))
          .to(at::kFloat);
  Tensor scale = at::where(at::isinf(quotient), static_cast<float>(kFloatMax), quotient);
  if (power_of_two) {
    const Tensor exponent = std::get<1>(at::frexp(scale)) - 1;
    scale = at::ldexp(at::scalar_tensor(1.0, scale.options().dtype(at::kDouble)),
                      exponent.to(at::kDouble))
                .to(at::kFloat);
  }
  scale = at::where((bounded == 0).bitwise_or(at::isinf(bounded)), 1.0f, scale).to(at::kFloat);
  const Tensor dequant_scale = (1.0 / scale.to(at::kDouble)).to(at::kFloat);
  return {encode(source * scale, fp8), dequant_scale, amax};
}

Specs<1> Dequantize::shapes(const Tensor& codes, const Tensor& dequant_scale,
                            std::string_view format, at::ScalarType dtype) {
  fp8_format(format);
  check_codes("dequantize", codes);
  check_one_element("dequantize", dequant_scale, "dequant_scale");
  return {like(codes, dtype)};
}

void Dequantize::cpu(const Tensor& codes, const Tensor& dequant_scale, std::string_view format,
                     at::ScalarType, Results<1>& results) {
  const Tensor source = codes.contiguous();
  kernels::cpu::dequantize(source.const_data_ptr<uint8_t>(), fp8_format(format),
                           *dequant_scale.const_data_ptr<float>(), rows_out(results[0]));
}

Results<1> Dequantize::reference(const Tensor& codes, const Tensor& dequant_scale,
                                 std::string_view format, at::ScalarType dtype) {
  return {(decode_values(codes, fp8_format(format)) * dequant_scale).to(dtype)};
}

Specs<1> Decode::shapes(const Tensor& codes, std::string_view format) {
  fp8_format(format);
  check_codes("decode", codes);
  return {like(codes, at::kFloat)};
}

void Decode::cpu(const Tensor& codes, std::string_view format, Results<1>& results) {
  const Tensor source = codes.contiguous();
  kernels::cpu::dequantize(source.const_data_ptr<uint8_t>(), fp8_format(format), 1.0f,
                           rows_out(results[0]));
}

Results<1> Decode::reference(const Tensor& codes, std::string_view format) {
  return {decode_values(codes, fp8_format(format))};
}

Specs<1> ScaleProduct::shapes(const Tensor& product, const Tensor& a_scale, const Tensor& b_scale,
                              at::ScalarType dtype) {
  check_one_element("scale_product", a_scale, "a_scale");
  check_one_element("scale_product", b_scale, "b_scale");
  return {like(product, dtype)};
}

void ScaleProduct::cpu(const Tensor& product, const Tensor& a_scale, const Tensor& b_scale,
                       at::ScalarType, Results<1>& results) {
  kernels::cpu::multiply_twice(RowsIn(product), *a_scale.const_data_ptr<float>(),
                               *b_scale.const_data_ptr<float>(), rows_out(results[0]));
}

Results<1> ScaleProduct::reference(const Tensor& product, const Tensor& a_scale,
                                   const Tensor& b_scale, at::ScalarType dtype) {
  return {(product * a_scale * b_scale).to(dtype)};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<QuantizeCurrent>(library);
  register_kernel_op<Dequantize>(library);
  register_kernel_op<Decode>(library);
  register_kernel_op<ScaleProduct>(library);
}

}  // namespace tandem::kernel_ops
