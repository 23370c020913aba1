// Access to single elements of matrices, for scalar references.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/views.h"

namespace tandem::kernels {

inline float float_from_float16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00)
    return std::bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  if (magnitude >= 0x0400) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -value : value;
}

inline float element_of(ConstRows x, size_t r, size_t c) {
  const auto* bytes =
      static_cast<const uint8_t*>(x.data) + (r * x.stride + c) * bytes_per_element(x.element);
  if (x.element == Element::float32) {
    float value;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return x.element == Element::bfloat16 ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)
                                        : float_from_float16(bits);
}

/// A part of a matrix that shares one scale.
struct Block {
  size_t row, rows, col, cols;
};

/// max |x|, NaN skipped.
inline float amax_of(ConstRows x, const Block& block) {
  uint32_t amax = 0;  // as bits, which order like magnitudes
  for (size_t r = block.row; r < block.row + block.rows; ++r) {
    for (size_t c = block.col; c < block.col + block.cols; ++c) {
      const uint32_t bits = std::bit_cast<uint32_t>(element_of(x, r, c)) & 0x7FFFFFFF;
      if (bits <= 0x7F800000) amax = std::max(amax, bits);
    }
  }
  return std::bit_cast<float>(amax);
}

}  // namespace tandem::kernels
