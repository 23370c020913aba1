// FP8 with one float32 scale per block of 128 numbers of a row or of a column, or of 128 by 128.
#pragma once

#include "kernels/quantize_made.h"
#include "kernels/quantize_options.h"

namespace tandem::kernels {

inline constexpr size_t kFp8Block = 128;

/// The blocks that share a scale: 1x128, 128x1 or 128x128. Blocks at the edge hold the elements
/// that exist.
enum class Fp8BlockShape : uint8_t { row, column, square };

/// Returns the shape of the scales of a [rows, cols] matrix in memory: row [blocks, up(rows, 4)],
/// which has the blocks of a row below each other, column [blocks, up(cols, 4)], square [blocks,
/// up(blocks, 4)], where up(n, m) is n rounded up to a multiple of m. Scales without a block are
/// zero.
constexpr MatrixShape fp8_block_scales(Fp8BlockShape shape, size_t rows, size_t cols) {
  const auto up = [](size_t n) { return (n + 3) / 4 * 4; };
  const auto blocks = [](size_t n) { return (n + kFp8Block - 1) / kFp8Block; };
  if (shape == Fp8BlockShape::row) return {blocks(cols), up(rows)};
  return {blocks(rows), up(shape == Fp8BlockShape::column ? cols : blocks(cols))};
}

/// The output for one shape of blocks: source ~= decode(codes) * dequant_scale. A null pointer is
/// not written.
struct Fp8BlockOutput {
  /// [rows, cols], contiguous; never transposed.
  uint8_t* codes = nullptr;
  /// In the shape fp8_block_scales.
  float* dequant_scale = nullptr;
  explicit operator bool() const { return codes != nullptr || dequant_scale != nullptr; }
};

/// The replacement of an infinite scale: the largest finite number of the source's element.
constexpr float largest_of(Element element) {
  return element == Element::float32    ? 0x1.fffffep+127f
         : element == Element::bfloat16 ? 0x1.fep+127f
                                        : 65504.0f;
}

/// The definition of cpu::fp8_block_quantize, element by element.
void fp8_block_quantize_reference(ConstRows x, const Fp8Scaling& scaling, Fp8BlockOutput row,
                                  Fp8BlockOutput column, Fp8BlockOutput square, float* amax);

namespace cpu {

/// Per block: scale = scale_from_amax(amax), with largest_of(x.element) for an infinite one;
/// dequant_scale = 1 / scale, codes = fp8_from_float(x * scale). The amax skips NaN, and is 0 for a
/// block of NaN.
///
///   x [128, 256] --+--> amax of each row of a block --> row.dequant_scale    --> row.codes
///                  +--> amax of each column         --> column.dequant_scale --> column.codes
///                  +--> amax of each block          --> square.dequant_scale --> square.codes
///                  +--> amax of x
///
/// Codes for each shape of blocks are computed from x, not from other codes. A call with square
/// blocks requests no other ones.
///
/// Shapes:  x [rows, cols], either of which may be 0; outputs as in Fp8BlockOutput; amax one
///          element or null.
/// Bytes:   reads x once from memory, and once more from the second-level cache; writes one byte
///          per element and shape, and 1/32 of that in scales.
/// Error:   none: bitwise equal to the reference on every target and thread count (tests Fp8Block,
///          GoldenQuantize).
void fp8_block_quantize(const Input& x, const Fp8Scaling& scaling, Fp8BlockOutput row,
                        Fp8BlockOutput column, Fp8BlockOutput square, float* amax);

/// y = decode(codes) * dequant_scale in float32, rounded once to y's element.
///
/// Shapes:  codes [y.rows, y.cols], contiguous; dequant_scale [fp8_block_scales(shape, y.rows,
///          y.cols)].
/// Bytes:   reads one byte per element and writes one element.
void fp8_block_dequantize(const uint8_t* codes, const float* dequant_scale, Fp8Format format,
                          Fp8BlockShape shape, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
