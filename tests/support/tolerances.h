// How far two right results may lie apart, with the reason for each number.
#pragma once

#include <c10/core/ScalarType.h>

namespace tandem::testing {

/// Difference of 1 and the next number.
constexpr double unit_of(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Double     ? 0x1p-52
         : dtype == c10::ScalarType::BFloat16 ? 0x1p-7
         : dtype == c10::ScalarType::Half     ? 0x1p-10
                                              : 0x1p-23;
}

/// Relative to the largest element: sums of up to some hundred terms in another order, in float32
/// or wider, lose a few bits each; where the terms have 16 bits, some of them are rounded the other
/// way.
constexpr double sum_error_of(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Double  ? 0x1p-44
         : dtype == c10::ScalarType::Float ? 0x1p-17
                                           : unit_of(dtype) / 4;
}

/// Central differences in float64 with a step of 1e-5: the third derivative times 1e-10 and
/// cancellation of 2^-52 / 1e-5.
inline constexpr double kDifferenceStep = 1e-5, kDifferenceError = 1e-6;

}  // namespace tandem::testing
