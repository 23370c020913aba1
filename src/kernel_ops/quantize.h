// Quantizing as kernel ops: codes of a tensor, their numbers, and what turns the product of codes
// into numbers.
#pragma once

#include "kernel_ops/format.h"

namespace tandem::kernel_ops {

/// The codes of x, their scales and its amax, as the quantizer says: x ~= decode(codes) *
/// dequant_scale.
///
/// output_mask: row codes with their scale, column codes with theirs, amax. What is masked out is
/// empty. Where one value serves both directions, it is that of rows, written if either is wanted.
/// Shapes: x any -> codes like x, uint8, never transposed; scales as the format's layout says; amax
///         [], float32.
/// Error:  none: bitwise what the numerics page specifies (tests GoldenCurrent, GoldenQuantize).
struct Quantize {
  static constexpr const char* kName = "quantize";
  static constexpr const char* kQualifiedName = "tandem::quantize";
  static constexpr const char* kSchema =
      "quantize(Tensor x, Tensor? scale, str quantizer, bool[3] output_mask) -> (Tensor row_codes, "
      "Tensor row_scale, Tensor column_codes, Tensor column_scale, Tensor amax)";
  static Specs<5> shapes(const Tensor& x, const std::optional<Tensor>& scale,
                         const Quantizer& quantizer, std::array<bool, 3> output_mask);
  static void cpu(const Tensor& x, const std::optional<Tensor>& scale, const Quantizer& quantizer,
                  std::array<bool, 3> output_mask, Results<5>& results);
  static Results<5> reference(const Tensor& x, const std::optional<Tensor>& scale,
                              const Quantizer& quantizer, std::array<bool, 3> output_mask);
};

/// y = decode(codes) * dequant_scale in float32, rounded once to `dtype`; `column` says which
/// direction the codes are of.
struct Dequantize {
  static constexpr const char* kName = "dequantize";
  static constexpr const char* kQualifiedName = "tandem::dequantize";
  static constexpr const char* kSchema =
      "dequantize(Tensor codes, Tensor dequant_scale, str quantizer, bool column, ScalarType "
      "dtype) -> Tensor";
  static Specs<1> shapes(const Tensor& codes, const Tensor& dequant_scale,
                         const Quantizer& quantizer, bool column, at::ScalarType dtype);
  static void cpu(const Tensor& codes, const Tensor& dequant_scale, const Quantizer& quantizer,
                  bool column, at::ScalarType dtype, Results<1>& results);
  static Results<1> reference(const Tensor& codes, const Tensor& dequant_scale,
                              const Quantizer& quantizer, bool column, at::ScalarType dtype);
};

/// An operand of an emulated product as float32, exactly: decode(codes), times its scales unless
/// those apply at the product's end.
struct Decode {
  static constexpr const char* kName = "decode";
  static constexpr const char* kQualifiedName = "tandem::decode";
  static constexpr const char* kSchema =
      "decode(Tensor codes, Tensor dequant_scale, str quantizer, bool column) -> Tensor";
  static Specs<1> shapes(const Tensor& codes, const Tensor& dequant_scale,
                         const Quantizer& quantizer, bool column);
  static void cpu(const Tensor& codes, const Tensor& dequant_scale, const Quantizer& quantizer,
                  bool column, Results<1>& results);
  static Results<1> reference(const Tensor& codes, const Tensor& dequant_scale,
                              const Quantizer& quantizer, bool column);
};

/// y = (product * a_scale) * b_scale in float32, rounded once to `dtype`; a scale that is absent
/// was applied before.
struct ScaleProduct {
  static constexpr const char* kName = "scale_product";
  static constexpr const char* kQualifiedName = "tandem::scale_product";
  static constexpr const char* kSchema =
      "scale_product(Tensor product, Tensor? a_scale, Tensor? b_scale, ScalarType dtype) -> Tensor";
  static Specs<1> shapes(const Tensor& product, const std::optional<Tensor>& a_scale,
                         const std::optional<Tensor>& b_scale, at::ScalarType dtype);
  static void cpu(const Tensor& product, const std::optional<Tensor>& a_scale,
                  const std::optional<Tensor>& b_scale, at::ScalarType dtype, Results<1>& results);
  static Results<1> reference(const Tensor& product, const std::optional<Tensor>& a_scale,
                              const std::optional<Tensor>& b_scale, at::ScalarType dtype);
};

}  // namespace tandem::kernel_ops
