// Per-tensor FP8 as kernel ops: quantize, decode, and what turns the product of codes into numbers.
#pragma once

#include "kernel_ops/kernel_op.h"
#include "kernels/quantize.h"

namespace tandem::kernel_ops {

kernels::Fp8Format fp8_format(
    std::string_view name);  ///< "e4m3" or "e5m2"; throws c10::ValueError on anything else
kernels::CurrentScaling current_scaling(std::string_view format, double amax_epsilon,
                                        bool power_of_two);

/// codes = cast(x * scale), saturating, with scale = format max / max(amax(x), amax_epsilon): x ~= decode(codes) * dequant_scale.
///
/// Shapes: x any -> codes like x, uint8; dequant_scale and amax [], float32.
/// Error:  none: bitwise what the numerics page specifies (test GoldenCurrent).
struct QuantizeCurrent {
  static constexpr const char* kName = "quantize_current";
  static constexpr const char* kQualifiedName = "tandem::quantize_current";
  static constexpr const char* kSchema =
      "quantize_current(Tensor x, str format, float amax_epsilon, bool power_of_two) -> (Tensor "
      "codes, Tensor dequant_scale, Tensor "
      "amax)";
  static constexpr std::array kTakes{kArithmetic};
  static Specs<3> shapes(const Tensor& x, std::string_view format, double amax_epsilon,
                         bool power_of_two);
  static void cpu(const Tensor& x, std::string_view format, double amax_epsilon, bool power_of_two,
                  Results<3>& results);
  static Results<3> reference(const Tensor& x, std::string_view format, double amax_epsilon,
                              bool power_of_two);
};

/// y = decode(codes) * dequant_scale in float32, rounded once to `dtype`.
struct Dequantize {
  static constexpr const char* kName = "dequantize";
  static constexpr const char* kQualifiedName = "tandem::dequantize";
  static constexpr const char* kSchema =
      "dequantize(Tensor codes, Tensor dequant_scale, str format, ScalarType dtype) -> Tensor";
  static constexpr std::array kTakes{kCodes, kStatistic, kArithmetic};
  static Specs<1> shapes(const Tensor& codes, const Tensor& dequant_scale, std::string_view format,
                         at::ScalarType dtype);
  static void cpu(const Tensor& codes, const Tensor& dequant_scale, std::string_view format,
                  at::ScalarType dtype, Results<1>& results);
  static Results<1> reference(const Tensor& codes, const Tensor& dequant_scale,
                              std::string_view format, at::ScalarType dtype);
};

/// decode(codes) as float32, exactly: an operand of an emulated product, whose scales are applied at its end.
struct Decode {
  static constexpr const char* kName = "decode";
  static constexpr const char* kQualifiedName = "tandem::decode";
  static constexpr const char* kSchema = "decode(Tensor codes, str format) -> Tensor";
  static constexpr std::array kTakes{kCodes};
  static Specs<1> shapes(const Tensor& codes, std::string_view format);
  static void cpu(const Tensor& codes, std::string_view format, Results<1>& results);
  static Results<1> reference(const Tensor& codes, std::string_view format);
};

/// y = (product * a_scale) * b_scale in float32, rounded once to `dtype`.
struct ScaleProduct {
  static constexpr const char* kName = "scale_product";
  static constexpr const char* kQualifiedName = "tandem::scale_product";
  static constexpr const char* kSchema =
      "scale_product(Tensor product, Tensor a_scale, Tensor b_scale, ScalarType dtype) -> Tensor";
  static constexpr std::array kTakes{kArithmetic, kStatistic, kStatistic, kArithmetic};
  static Specs<1> shapes(const Tensor& product, const Tensor& a_scale, const Tensor& b_scale,
                         at::ScalarType dtype);
  static void cpu(const Tensor& product, const Tensor& a_scale, const Tensor& b_scale,
                  at::ScalarType dtype, Results<1>& results);
  static Results<1> reference(const Tensor& product, const Tensor& a_scale, const Tensor& b_scale,
                              at::ScalarType dtype);
};

}  // namespace tandem::kernel_ops
