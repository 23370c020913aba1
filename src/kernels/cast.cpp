// Scalar casts: what the vector code must equal to the bit.
#include "kernels/cast.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/float_mode.h"
#include "kernels/philox.h"

namespace tandem::kernels {
namespace {

/// The magnitude's code where exponents go on above the largest number, and whether that overflows.
uint32_t stochastic_magnitude(double magnitude, const Fp8Traits& traits, uint32_t word) {
  if (magnitude >= 4.0 * double{traits.max}) return traits.largest + 1;
  int exponent = traits.min_exponent();
  if (magnitude > 0) exponent = std::max(std::ilogb(magnitude), exponent);
  const double steps = std::ldexp(magnitude, traits.mantissa_bits - exponent);
  const double low = std::floor(steps), chance = static_cast<double>(word >> 8) * 0x1p-24;
  const uint32_t binade = static_cast<uint32_t>(exponent - traits.min_exponent());
  return (binade << traits.mantissa_bits) + static_cast<uint32_t>(low) +
         (chance < steps - low ? 1 : 0);
}

}  // namespace

uint8_t cast_reference(float value, const Cast& cast, uint64_t index, uint32_t stream) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFF;
  if (cast.format == CastFormat::e8m0)
    return e8m0_from_float(magnitude <= 0x7F800000 && bits >> 31 != 0 ? 0.0f : value);
  const auto format = static_cast<Fp8Format>(cast.format);
  const Fp8Traits& traits = traits_of(format);
  const uint32_t sign = bits >> 31 != 0 ? traits.sign() : 0;
  if (magnitude > 0x7F800000) return static_cast<uint8_t>(traits.nan_code());
  const bool saturates = cast.saturates || traits.above == traits.sign();
  if (cast.rounding == Rounding::nearest) {
    const uint8_t code = fp8_from_float(value, format);
    const float size = std::bit_cast<float>(magnitude);
    // A tie goes to the even one of the largest number and what would follow it.
    const bool is_above =
        traits.largest % 2 == 0 ? size > traits.overflow_from : size >= traits.overflow_from;
    return saturates || !is_above ? code : static_cast<uint8_t>(sign | traits.above);
  }
  const auto words = philox4x32_10(index / 4, cast.seed, {cast.offset, stream});
  const cpu::ScopedFloatMode mode;
  double size = double{std::bit_cast<float>(magnitude)};
  if (saturates) size = std::min(size, double{traits.max});
  const uint32_t code = stochastic_magnitude(size, traits, words[index % 4]);
  if (code <= traits.largest) return static_cast<uint8_t>(sign | code);
  return static_cast<uint8_t>(sign | (saturates ? traits.largest : traits.above));
}

float float_from_code(uint8_t code, CastFormat format) {
  if (format == CastFormat::e8m0) return float_from_e8m0(code);
  return float_from_fp8(code, static_cast<Fp8Format>(format));
}

}  // namespace tandem::kernels
