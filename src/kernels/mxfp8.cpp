// Scalar MXFP8: what the vector code must equal to the bit.
#include "kernels/mxfp8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/cpu/float_mode.h"

namespace tandem::kernels {
namespace {

float float_from_float16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00)
    return std::bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  if (magnitude >= 0x0400) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -value : value;
}

float element_of(ConstRows x, size_t r, size_t c) {
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

float amax_of(ConstRows x, const Block& block) {
  uint32_t amax = 0;  // as bits, which order like magnitudes
  for (size_t r = block.row; r < block.row + block.rows; ++r) {
    for (size_t c = block.col; c < block.col + block.cols; ++c) {
      const uint32_t bits = std::bit_cast<uint32_t>(element_of(x, r, c)) & 0x7FFFFFFF;
      if (bits <= 0x7F800000) amax = std::max(amax, bits);
    }
  }
  return std::bit_cast<float>(amax);
}

void quantize_block(ConstRows x, const Block& block, Fp8Format format, uint8_t dequant_scale,
                    uint8_t* codes) {
  const float factor = reciprocal_of_e8m0(dequant_scale);
  for (size_t r = block.row; r < block.row + block.rows; ++r) {
    for (size_t c = block.col; c < block.col + block.cols; ++c)
      codes[r * x.cols + c] = fp8_from_float(element_of(x, r, c) * factor, format);
  }
}

void quantize(ConstRows x, const Mxfp8Scaling& scaling, MxDirection direction, Mxfp8Output out) {
  if (!out) return;
  const bool by_row = direction == MxDirection::row, square = scaling.square_blocks;
  const MxScaleShape shape = mx_scale_shape(direction, x.rows, x.cols);
  if (out.dequant_scale != nullptr) std::fill_n(out.dequant_scale, shape.size(), uint8_t{0});
  const size_t high = by_row && !square ? 1 : kMxBlock, wide = by_row || square ? kMxBlock : 1;
  for (size_t r = 0; r < x.rows; r += high) {
    for (size_t c = 0; c < x.cols; c += wide) {
      const Block block{r, std::min(high, x.rows - r), c, std::min(wide, x.cols - c)};
      const uint8_t code = e8m0_from_float(amax_of(x, block) * (1.0f / fp8_max(scaling.format)));
      if (out.codes != nullptr) quantize_block(x, block, scaling.format, code, out.codes);
      if (out.dequant_scale == nullptr) continue;
      if (by_row) {
        for (size_t i = 0; i < block.rows; ++i)
          out.dequant_scale[(r + i) * shape.cols + c / kMxBlock] = code;
      } else {
        for (size_t i = 0; i < block.cols; ++i)
          out.dequant_scale[r / kMxBlock * shape.cols + c + i] = code;
      }
    }
  }
}

}  // namespace

void mxfp8_quantize_reference(ConstRows x, const Mxfp8Scaling& scaling, Mxfp8Output row,
                              Mxfp8Output column, float* amax) {
  const cpu::ScopedFloatMode mode;
  quantize(x, scaling, MxDirection::row, row);
  quantize(x, scaling, MxDirection::column, column);
  if (amax != nullptr) *amax = amax_of(x, {0, x.rows, 0, x.cols});
}

}  // namespace tandem::kernels
