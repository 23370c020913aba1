// Casts of single numbers, without a scale, to the formats of quantized tensors and back.
#pragma once

#include "kernels/fp8.h"
#include "kernels/views.h"

namespace tandem::kernels {

/// The target of a cast: an element format, or E8M0, which holds powers of two.
enum class CastFormat : uint8_t { e4m3, e5m2, e2m1, e8m0 };

enum class Rounding : uint8_t {
  /// To nearest, with ties to even; to E8M0 up, as scales are rounded.
  nearest,
  /// Up or down at random, right on average.
  stochastic,
};

/// The options of a cast. E8M0 has no stochastic rounding. E8M0 and E2M1 always saturate.
struct Cast {
  CastFormat format = CastFormat::e4m3;
  /// Magnitudes that round above the largest number, also infinities, become the largest number;
  /// else NaN in E4M3, infinity in E5M2, with their sign.
  bool saturates = true;
  Rounding rounding = Rounding::nearest;
  /// The seed and offset of stochastic rounding.
  uint64_t seed = 0;
  uint32_t offset = 0;
};

/// Returns the code of one number with the index `index` in its tensor. NaN of either sign gives
/// all bits below the sign, in E8M0 0xFF. All other signs are kept, also of zeros; E8M0 has no
/// sign, and gives negative numbers its least code.
///
/// Stochastic: with a = |value| between the neighbours low <= a < high, high where u < (a - low) /
/// (high - low), else low; u = (r >> 8) 2^-24, where r is the word `index` mod 4 of Philox4x32-10
/// of the counter (index / 4, offset, stream) and the key seed. A magnitude of at least the largest
/// number becomes this number; in a cast that does not saturate, the format has one more step,
/// which overflows.
uint8_t cast_reference(float value, const Cast& cast, uint64_t index, uint32_t stream = 0);

/// Returns the value of a code, and ignores the bits above those of the format.
float float_from_code(uint8_t code, CastFormat format);

namespace cpu {

/// codes[i] = cast_reference(x[i], cast, i), one code in each byte.
///
/// Shapes:  x [rows, cols], either of which may be 0; codes [rows, cols], contiguous.
/// Error:   none: bitwise equal to the reference on every target and thread count (test Cast).
void cast_to_codes(ConstRows x, const Cast& cast, uint8_t* codes);

/// y = float_from_code(codes), rounded once to y's element.
void cast_from_codes(const uint8_t* codes, CastFormat format, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
