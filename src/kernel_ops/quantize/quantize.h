// Quantizing as kernel ops: codes of a tensor, their numbers, and what turns the product of codes
// into numbers.
#pragma once

#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

/// The codes of x, their scales and its amax, as the quantizer says: x ~= decode(codes) *
/// dequant_scale.
///
/// given: a scale of the past or a seed, as the quantizer takes it (given_to).
/// output_mask: row codes with their scale, column codes with theirs, amax. What is masked out is
/// empty, and so are the amaxes of rows and columns unless the format has a second level of scale.
/// Where one value serves both directions, it is that of rows, written if either is wanted.
/// Shapes: x any -> codes like x, uint8, never transposed, or packed; these and scales as the
///         format's layout says; amax [], float32, those of rows and columns [1].
/// Error:  none: bitwise what the numerics page specifies (test GoldenQuantize).
struct Quantize {
  static constexpr const char* kName = "quantize";
  static constexpr const char* kQualifiedName = "tandem::quantize";
  static constexpr const char* kSchema =
      "quantize(Tensor x, Tensor? given, str quantizer, bool[3] output_mask) -> (Tensor row_codes, "
      "Tensor row_scale, Tensor row_amax, Tensor column_codes, Tensor column_scale, Tensor "
      "column_amax, Tensor amax)";
  static Specs<group_size> shapes(const Tensor& x, const std::optional<Tensor>& given,
                                  const Quantizer& quantizer, std::array<bool, 3> output_mask);
  static void cpu(const Tensor& x, const std::optional<Tensor>& given, const Quantizer& quantizer,
                  std::array<bool, 3> output_mask, Results<group_size>& results);
  static Results<group_size> reference(const Tensor& x, const std::optional<Tensor>& given,
                                       const Quantizer& quantizer, std::array<bool, 3> output_mask);
};

/// Quantize::reference where there may be no quantizer.
Results<group_size> quantize_reference(const Tensor& x, const std::optional<Tensor>& given,
                                       const Quantizer* quantizer, GroupMask mask);

/// y = decode(codes) * dequant_scale in float32, rounded once to `dtype`; `column` says which
/// direction the codes are of, `amax` is what comes with codes that have one. Packed codes have
/// numbers of more than one size: `sizes` says which, without it the padding is there too.
/// Throws:  c10::TypeError on a dtype other than float32, bfloat16, float16 and float64.
struct Dequantize {
  static constexpr const char* kName = "dequantize";
  static constexpr const char* kQualifiedName = "tandem::dequantize";
  static constexpr const char* kSchema =
      "dequantize(Tensor codes, Tensor dequant_scale, str quantizer, bool column, ScalarType "
      "dtype, Tensor? amax=None, SymInt[]? sizes=None) -> Tensor";
  static Specs<1> shapes(const Tensor& codes, const Tensor& dequant_scale,
                         const Quantizer& quantizer, bool column, at::ScalarType dtype,
                         const std::optional<Tensor>& amax, at::OptionalSymIntArrayRef sizes);
  static void cpu(const Tensor& codes, const Tensor& dequant_scale, const Quantizer& quantizer,
                  bool column, at::ScalarType dtype, const std::optional<Tensor>& amax,
                  at::OptionalSymIntArrayRef sizes, Results<1>& results);
  static Results<1> reference(const Tensor& codes, const Tensor& dequant_scale,
                              const Quantizer& quantizer, bool column, at::ScalarType dtype,
                              const std::optional<Tensor>& amax, at::OptionalSymIntArrayRef sizes);
};

/// An operand of an emulated product as float32, exactly: decode(codes), times its scales unless
/// those apply at the product's end; of packed codes with their padding.
struct Decode {
  static constexpr const char* kName = "decode";
  static constexpr const char* kQualifiedName = "tandem::decode";
  static constexpr const char* kSchema =
      "decode(Tensor codes, Tensor dequant_scale, str quantizer, bool column, Tensor? amax=None) "
      "-> "
      "Tensor";
  static Specs<1> shapes(const Tensor& codes, const Tensor& dequant_scale,
                         const Quantizer& quantizer, bool column,
                         const std::optional<Tensor>& amax);
  static void cpu(const Tensor& codes, const Tensor& dequant_scale, const Quantizer& quantizer,
                  bool column, const std::optional<Tensor>& amax, Results<1>& results);
  static Results<1> reference(const Tensor& codes, const Tensor& dequant_scale,
                              const Quantizer& quantizer, bool column,
                              const std::optional<Tensor>& amax);
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
