// Number formats of quantized tensors: the FP8 formats of OCP OFP8 v1.0; E2M1, the element of four
// bits, and E8M0, the scale format, of OCP MX v1.0.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace tandem::kernels {

/// An element format of 8 bits, or of 4: its index in kFp8Formats.
enum class Fp8Format : uint8_t { e4m3, e5m2, e2m1 };

/// The numbers that define a format with one sign bit, some exponent bits and some mantissa bits.
/// All other properties follow from them.
struct Fp8Traits {
  const char* name;
  /// Bits of a code.
  int bits;
  int mantissa_bits;
  int bias;
  /// The largest finite value.
  float max;
  /// The midpoint above max: smaller magnitudes round to at most max.
  float overflow_from;
  /// The code of max.
  uint32_t largest;
  /// The code after `largest`: the first NaN, or infinity.
  uint32_t above;
  /// The least code of a NaN; a smaller `above` is infinity. A format with neither has no such
  /// codes; these members then lie in its sign bit.
  uint32_t first_nan;

  /// The bit that is set in the codes of negative numbers.
  constexpr uint32_t sign() const { return 1u << (bits - 1); }
  /// The code to which NaN of either sign is cast: all bits below the sign.
  constexpr uint32_t nan_code() const { return sign() - 1; }

  /// The exponent of the smallest normal number.
  constexpr int min_exponent() const { return 1 - bias; }
  /// The bits that a float32 mantissa has in addition.
  constexpr int dropped_bits() const { return 23 - mantissa_bits; }
  /// 2^min_exponent, the smallest normal number, and the smallest number of all, as float32 bits.
  constexpr uint32_t min_normal_bits() const { return static_cast<uint32_t>(128 - bias) << 23; }
  constexpr uint32_t min_subnormal_bits() const {
    return static_cast<uint32_t>(128 - bias - mantissa_bits) << 23;
  }
};

/// The only list of formats, in the order of Fp8Format.
inline constexpr Fp8Traits kFp8Formats[] = {
    {"e4m3", 8, 3, 7, 448.0f, 464.0f, 0x7E, 0x7F, 0x7F},
    {"e5m2", 8, 2, 15, 57344.0f, 61440.0f, 0x7B, 0x7C, 0x7D},
    {"e2m1", 4, 1, 1, 6.0f, 7.0f, 0x7, 0x8, 0x8},
};

constexpr const Fp8Traits& traits_of(Fp8Format format) {
  return kFp8Formats[static_cast<size_t>(format)];
}
constexpr float fp8_max(Fp8Format format) { return traits_of(format).max; }

/// Rounds once to nearest even in the precision of the format, and saturates. NaN of either sign
/// gives all bits below the sign: 0x7F, or in E2M1 0x7, which is 6. The scalar reference.
uint8_t fp8_from_float(float value, Fp8Format format);

/// Returns the value of a code; all NaN codes give a quiet NaN.
float float_from_fp8(uint8_t code, Fp8Format format);

/// 2^127.
inline constexpr uint8_t kE8m0Largest = 0xFE;
inline constexpr uint8_t kE8m0Nan = 0xFF;

/// Returns the E8M0 code of the smallest power of two >= value, within [2^-127, 2^127]: 0 for 0,
/// 0xFE for infinity, 0xFF for NaN. It rounds up, unlike the casts of other libraries, and in
/// integers, because a logarithm is wrong next to powers of two. Requires value >= 0.
constexpr uint8_t e8m0_from_float(float value) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(value) & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return kE8m0Nan;
  if (magnitude <= 0x00400000) return 0;  // 2^-127, a subnormal float32
  const uint32_t code = (magnitude + 0x7FFFFF) >> 23;
  return static_cast<uint8_t>(code < kE8m0Largest ? code : kE8m0Largest);
}

/// 2^(code - 127), exactly; NaN for 0xFF.
constexpr float float_from_e8m0(uint8_t code) {
  if (code == kE8m0Nan) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

/// 2^(127 - code), exactly: the factor of the data; NaN for 0xFF.
constexpr float reciprocal_of_e8m0(uint8_t code) {
  return code == kE8m0Nan ? float_from_e8m0(kE8m0Nan)
                          : float_from_e8m0(static_cast<uint8_t>(kE8m0Largest - code));
}

}  // namespace tandem::kernels
