// Scalar FP8: what the vector code must equal to the bit.
#include "kernels/fp8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cpu/float_mode.h"
#include "kernels/quantize.h"

namespace tandem::kernels {
namespace {

constexpr uint32_t kInfinity = 0x7F800000;

/// `value` / 2^`bits`, to nearest, ties to even.
constexpr uint32_t shift_rounding(uint32_t value, int bits) {
  const uint32_t kept = value >> bits, rest = value & ((1u << bits) - 1), half = 1u << (bits - 1);
  return kept + (rest > half || (rest == half && (kept & 1)) ? 1 : 0);
}

/// The code of a magnitude, as if the format's exponents went on above its largest value.
uint32_t round_magnitude(uint32_t magnitude, const Fp8Traits& traits) {
  const int field = static_cast<int>(magnitude >> 23);
  const uint32_t significand = (magnitude & 0x7FFFFF) | (field > 0 ? 0x800000 : 0);
  const int steps_above = std::max(field, 1) - 127 -
                          traits.min_exponent();  // exponent over that of the smallest normal
  const int dropped = traits.dropped_bits();
  if (steps_above >= 0) {
    // The leading bit of the significand adds the one to the exponent that tells normal from
    // subnormal.
    return shift_rounding(significand, dropped) +
           (static_cast<uint32_t>(steps_above) << traits.mantissa_bits);
  }
  return dropped - steps_above > 25 ? 0 : shift_rounding(significand, dropped - steps_above);
}

/// amax < eps by the bits of two non-negative numbers, whatever the calling thread does with
/// subnormals; false for NaN.
bool is_below(float amax, float eps) {
  const uint32_t left = std::bit_cast<uint32_t>(amax), right = std::bit_cast<uint32_t>(eps);
  return left < right && right <= kInfinity;
}

}  // namespace

uint8_t fp8_from_float(float value, Fp8Format format) {
  const Fp8Traits& traits = traits_of(format);
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF, sign = bits >> 31 != 0 ? traits.sign() : 0;
  if (magnitude > kInfinity) return static_cast<uint8_t>(traits.nan_code());
  return static_cast<uint8_t>(sign | std::min(round_magnitude(magnitude, traits), traits.largest));
}

float float_from_fp8(uint8_t code, Fp8Format format) {
  const Fp8Traits& traits = traits_of(format);
  const uint32_t magnitude = code & traits.nan_code(), sign = (code & traits.sign())
                                                              << (32 - traits.bits);
  if (magnitude >= traits.first_nan) return std::numeric_limits<float>::quiet_NaN();
  if (magnitude > traits.largest) return std::bit_cast<float>(sign | kInfinity);
  const int mantissa_bits = traits.mantissa_bits;
  const uint32_t field = magnitude >> mantissa_bits,
                 mantissa = magnitude & ((1u << mantissa_bits) - 1);
  const int significand = static_cast<int>(field > 0 ? mantissa | (1u << mantissa_bits) : mantissa);
  const int exponent =
      traits.min_exponent() - mantissa_bits + static_cast<int>(std::max(field, 1u)) - 1;
  const float value = std::ldexp(static_cast<float>(significand), exponent);
  return sign != 0 ? -value : value;
}

float scale_from_amax(float amax, const Fp8Scaling& scaling, float big) {
  const float eps = cpu::rounded(scaling.options.amax_epsilon);
  const float divisor = is_below(amax, eps) ? eps : amax;
  const uint32_t bits = std::bit_cast<uint32_t>(divisor);
  if ((bits & 0x7FFFFFFF) == 0 || (bits & kInfinity) == kInfinity) return 1.0f;
  float scale = cpu::divide(fp8_max(scaling.format), divisor);
  if (std::isinf(scale)) scale = big;
  if (scaling.options.power_of_two)
    scale = std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & 0xFF800000u);
  return scale;
}

}  // namespace tandem::kernels
