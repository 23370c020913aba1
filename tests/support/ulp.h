// Errors in units in the last place, against float64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <span>
#include <string>

#include "kernels/views.h"

namespace tandem::testing {

/// How far a result may be from float64: `float_ulps` units of float32, and half a unit of the
/// element for the one rounding into it. A unit is that of max(|expected|, magnitude, the element's
/// smallest normal number); `magnitude` is what the operands of a cancelling sum were like.
inline double allowed_error(kernels::Element element, double float_ulps, double expected,
                            double magnitude = 0.0) {
  const int mantissa_bits = element == kernels::Element::float32    ? 23
                            : element == kernels::Element::bfloat16 ? 7
                                                                    : 10;
  const int min_exponent = element == kernels::Element::float16 ? -14 : -126;
  const auto unit = [](double value, int bits, int lowest) {
    const int exponent =
        value > 0.0 && std::isfinite(value) ? std::max(std::ilogb(value), lowest) : lowest;
    return std::ldexp(1.0, exponent - bits);
  };
  const double value = std::max(std::abs(expected), magnitude);
  const double float_error = float_ulps * unit(value, 23, -126);
  if (element == kernels::Element::float32) return float_error;
  return float_error + 0.5 * unit(std::abs(expected) + float_error, mantissa_bits, min_exponent);
}

/// Fails with index, expected and got at the first element further from `expected` than allowed.
/// NaN wants NaN, infinity itself.
inline ::testing::AssertionResult within_ulps(std::span<const float> got,
                                              std::span<const double> expected, double float_ulps,
                                              kernels::Element element = kernels::Element::float32,
                                              std::span<const double> magnitudes = {}) {
  if (got.size() != expected.size()) {
    return ::testing::AssertionFailure()
           << "expected " << expected.size() << " elements, got " << got.size();
  }
  for (size_t i = 0; i < got.size(); ++i) {
    const double want = expected[i], have = static_cast<double>(got[i]);
    if (std::isnan(want) && std::isnan(have)) continue;
    if (want == have) continue;
    const double allowed =
        allowed_error(element, float_ulps, want, magnitudes.empty() ? 0.0 : magnitudes[i]);
    if (std::abs(want - have) <= allowed) continue;
    return ::testing::AssertionFailure()
           << "element " << i << ": expected " << want << ", got " << have << ", off by "
           << std::abs(want - have) << " where " << allowed << " is allowed";
  }
  return ::testing::AssertionSuccess();
}

/// Fails at the first element whose bits differ.
template <typename T>
::testing::AssertionResult same_bits(std::span<const T> got, std::span<const T> expected) {
  if (got.size() != expected.size()) {
    return ::testing::AssertionFailure()
           << "expected " << expected.size() << " elements, got " << got.size();
  }
  for (size_t i = 0; i < got.size(); ++i) {
    const auto bits = [](T value) {
      if constexpr (sizeof(T) == 4) {
        return std::bit_cast<uint32_t>(value);
      } else if constexpr (sizeof(T) == 2) {
        return std::bit_cast<uint16_t>(value);
      } else {
        return std::bit_cast<uint8_t>(value);
      }
    };
    if (bits(got[i]) == bits(expected[i])) continue;
    return ::testing::AssertionFailure()
           << "element " << i << std::hex << ": expected bits " << uint32_t{bits(expected[i])}
           << ", got " << uint32_t{bits(got[i])};
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tandem::testing
