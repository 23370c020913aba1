// What quantizers of blocks write, for tests of their kernels.
#pragma once

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/views.h"
#include "support/ulp.h"

namespace tandem::testing {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
/// What memory holds before a kernel writes to it.
constexpr uint8_t kUnwritten = 0xA5;

/// Codes and scales of `kOutputs` directions or shapes of blocks, empty where they are not wanted.
template <typename Scale, size_t kOutputs>
struct BlockCodes {
  std::vector<uint8_t> codes[kOutputs];
  std::vector<Scale> scales[kOutputs];
  /// Of x, and of what the codes of each output are of, where a format writes that.
  float amax = -1, amaxes[kOutputs] = {};
};

template <typename Scale, size_t kOutputs>
::testing::AssertionResult same(const BlockCodes<Scale, kOutputs>& got,
                                const BlockCodes<Scale, kOutputs>& expected) {
  if (auto amax = same_bits<float>({&got.amax, 1}, {&expected.amax, 1}); !amax)
    return amax << " of the amax";
  if (auto amaxes = same_bits<float>(got.amaxes, expected.amaxes); !amaxes)
    return amaxes << " of the outputs' amaxes";
  for (size_t i = 0; i < kOutputs; ++i) {
    auto scales = same_bits<Scale>(got.scales[i], expected.scales[i]);
    if (!scales) return scales << " in the scales of output " << i;
    auto codes = same_bits<uint8_t>(got.codes[i], expected.codes[i]);
    if (!codes) return codes << " in the codes of output " << i;
  }
  return ::testing::AssertionSuccess();
}

inline kernels::ConstRows one_row(const std::vector<float>& x) {
  return {x.data(), kernels::Element::float32, 1, x.size(), x.size()};
}

/// 40 rows of 30 numbers that are denormal.
inline std::vector<float> denormals() {
  std::vector<float> x;
  for (int i = -600; i < 600; ++i) x.push_back(static_cast<float>(i) * 1e-41f);
  return x;
}

/// Columns of bfloat16_below_amaxes.
inline constexpr size_t kColsBelowAmaxes = 128;

/// A bfloat16 matrix in which every exponent is that of some blocks' amax, and the other numbers of
/// these are all those from there down to what becomes a code of 0, of either sign, and zeros. An
/// amax stands in every row and column of each 32 by 32.
inline std::vector<uint16_t> bfloat16_below_amaxes() {
  constexpr uint16_t kSign = 0x8000;
  constexpr int kBelow = 35 * 128;  // more than the exponents of E5M2
  std::vector<uint16_t> x;
  for (int exponent = 0; exponent < 255; ++exponent) {
    const int amax = exponent * 128 + exponent * 37 % 128;
    for (size_t i = 0; i < 128 * kColsBelowAmaxes; ++i) {
      const size_t row = i / kColsBelowAmaxes, col = i % kColsBelowAmaxes;
      const bool is_amax = row % 32 == 0 || col % 32 == 0;
      const int below = static_cast<int>(i) % kBelow;
      const int magnitude = is_amax ? amax : std::max(0, amax - below);
      x.push_back(static_cast<uint16_t>(magnitude | (i / 3 % 2 == 0 ? 0 : kSign)));
    }
  }
  return x;
}

}  // namespace tandem::testing
