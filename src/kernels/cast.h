// Casts of single numbers to the formats of quantized tensors and back, without any scale.
#pragma once

#include "kernels/fp8.h"
#include "kernels/views.h"

namespace tandem::kernels {

/// What a number can be cast to: an element format, or E8M0, which holds powers of two.
enum class CastFormat : uint8_t { e4m3, e5m2, e2m1, e8m0 };

enum class Rounding : uint8_t {
  /// To nearest, ties to even; to E8M0 up, as scales are.
  nearest,
  /// Up or down by chance, right on average.
  stochastic,
};

/// How numbers are cast. E8M0 has no stochastic rounding and saturates, as E2M1 does.
struct Cast {
  CastFormat format = CastFormat::e4m3;
  /// What rounds above the largest number, infinities among it, becomes that number; else NaN in
  /// E4M3, infinity in E5M2, with its sign.
  bool saturates = true;
  Rounding rounding = Rounding::nearest;
  /// Of stochastic rounding.
  uint64_t seed = 0;
  uint32_t offset = 0;
};

/// The code of one number, which stands at `index` of its tensor. NaN of either sign gives all bits
/// below the sign, 0xFF in E8M0. Other signs are kept, of zeros too; E8M0 has none, and negative
/// numbers become its least.
///
/// Stochastic: with a = |value| between the neighbours low <= a < high, high where u < (a - low) /
/// (high - low), else low; u = (r >> 8) 2^-24, r the word `index` mod 4 of Philox4x32-10 of the
/// counter (index / 4, offset, stream) and the key seed. What is no less than the largest number
/// becomes that; where the cast does not saturate, the format goes on for a step, which overflows.
uint8_t cast_reference(float value, const Cast& cast, uint64_t index, uint32_t stream = 0);

/// The value of a code; the bits above those of the format are not looked at.
float float_from_code(uint8_t code, CastFormat format);

namespace cpu {

/// codes[i] = cast_reference(x[i], cast, i), a byte each.
///
/// Shapes: x [rows, cols], either possibly 0; codes [rows, cols], contiguous.
/// Error:  none: bitwise equal to the reference on every target and thread count (test Cast).
void cast_to_codes(ConstRows x, const Cast& cast, uint8_t* codes);

/// y = float_from_code(codes), rounded once to y's element.
void cast_from_codes(const uint8_t* codes, CastFormat format, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
