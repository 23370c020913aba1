// Casts of numbers to the formats of quantized tensors and back, without any scale, as kernel ops.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// codes = the nearest numbers of a format, ties to even: "e4m3", "e5m2", "e2m1", or "e8m0", powers
/// of two, which round up. The casts of this library, on every device bit by bit the same.
///
/// saturate: what rounds above the largest number, infinities among it, becomes that number; else
/// NaN in E4M3, infinity in E5M2. E2M1 and E8M0 always saturate. NaN of either sign gives 0x7F, in
/// E2M1 0x7, which is 6, and in E8M0 0xFF; other signs are kept. E8M0 has none: negative numbers
/// become its least.
/// seed: one int64, or two with an offset: rounded up or down by chance, right on average
/// (kernels/cast.h), not in E8M0.
///
/// Shapes:  x any -> codes like x, uint8, one each.
/// Dtypes:  float32, bfloat16, float16; float64 is rounded to float32 before.
/// Error:   none: bitwise what the numerics page specifies (tests Cast, GoldenBlocks, CastFront).
/// Throws:  c10::ValueError on another format or seed.
struct CastToCodes {
  static constexpr const char* kName = "cast_to_codes";
  static constexpr const char* kQualifiedName = "tandem::cast_to_codes";
  static constexpr const char* kSchema =
      "cast_to_codes(Tensor x, str format, bool saturate=True, Tensor? seed=None) -> Tensor";
  static Specs<1> shapes(const Tensor& x, std::string_view format, bool saturate,
                         const std::optional<Tensor>& seed);
  static void cpu(const Tensor& x, std::string_view format, bool saturate,
                  const std::optional<Tensor>& seed, Results<1>& results);
  static Results<1> reference(const Tensor& x, std::string_view format, bool saturate,
                              const std::optional<Tensor>& seed);
};

/// The values of codes, rounded once to `dtype`: float32, bfloat16, float16 or float64.
///
/// Throws:  c10::ValueError on another format, c10::TypeError on another dtype.
struct CastFromCodes {
  static constexpr const char* kName = "cast_from_codes";
  static constexpr const char* kQualifiedName = "tandem::cast_from_codes";
  static constexpr const char* kSchema =
      "cast_from_codes(Tensor codes, str format, ScalarType dtype) -> Tensor";
  static Specs<1> shapes(const Tensor& codes, std::string_view format, at::ScalarType dtype);
  static void cpu(const Tensor& codes, std::string_view format, at::ScalarType dtype,
                  Results<1>& results);
  static Results<1> reference(const Tensor& codes, std::string_view format, at::ScalarType dtype);
};

}  // namespace tandem::kernel_ops
