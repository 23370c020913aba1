// MXFP8: FP8 codes with one E8M0 scale per block of 32 elements, of OCP MX v1.0.
#pragma once

#include "kernels/quantize_made.h"
#include "kernels/quantize_options.h"

namespace tandem::kernels {

inline constexpr size_t kMxBlock = 32;

/// Blocks are 32 adjacent elements of a row (1x32), or of a column (32x1), or square (32x32).
/// Blocks at the edge hold the elements that exist.
enum class MxDirection : uint8_t { row, column };

/// Returns the shape of the scales of a [rows, cols] matrix in memory, in linear order: row
/// [up(rows, 128), up(blocks, 4)], column [up(blocks, 4), up(cols, 128)], where up(n, m) is n
/// rounded up to a multiple of m. Scales without a block are zero.
constexpr MatrixShape mx_scale_shape(MxDirection direction, size_t rows, size_t cols) {
  const auto up = [](size_t n, size_t to) { return (n + to - 1) / to * to; };
  if (direction == MxDirection::row)
    return {up(rows, 128), up((cols + kMxBlock - 1) / kMxBlock, 4)};
  return {up((rows + kMxBlock - 1) / kMxBlock, 4), up(cols, 128)};
}

/// The output for one direction: source ~= decode(codes) * 2^(dequant_scale - 127). A null pointer
/// is not written.
struct Mxfp8Output {
  /// [rows, cols], contiguous; never transposed.
  uint8_t* codes = nullptr;
  /// E8M0, in the shape mx_scale_shape.
  uint8_t* dequant_scale = nullptr;
  explicit operator bool() const { return codes != nullptr || dequant_scale != nullptr; }
};

/// The definition of cpu::mxfp8_quantize, element by element.
void mxfp8_quantize_reference(ConstRows x, const Fp8Scaling& scaling, Mxfp8Output row,
                              Mxfp8Output column, float* amax);

namespace cpu {

/// Per block: dequant_scale = e8m0_from_float(amax * (1 / format max)), codes = fp8_from_float(x *
/// 2^(127 - dequant_scale)). The amax skips NaN, and is 0 for a block of NaN.
///
///   x [32, 1024] --+--> amax of each row of a block --> row.dequant_scale    --> row.codes
///                  +--> amax of each column         --> column.dequant_scale --> column.codes
///                  +--> amax of x
///
/// A NaN becomes 0x7F under the scale of its neighbours. An infinity becomes the largest code under
/// the scale 0xFE, whose finite neighbours mostly become 0. Each direction is computed from x, not
/// from the codes of the other one.
///
/// Shapes:  x [rows, cols], either of which may be 0; outputs as in Mxfp8Output; amax one element
///          or null.
/// Bytes:   reads x once from memory, and once more from the second-level cache; writes one byte
///          per element and direction, and 1/32 of that in scales.
/// Error:   none: bitwise equal to the reference on every target and thread count (tests Mxfp8,
///          GoldenQuantize).
void mxfp8_quantize(const Input& x, const Fp8Scaling& scaling, Mxfp8Output row, Mxfp8Output column,
                    float* amax);

/// y = decode(codes) * 2^(dequant_scale - 127) in float32, rounded once to y's element; a scale of
/// 0xFF gives NaN.
///
/// Shapes:  codes [y.rows, y.cols], contiguous; dequant_scale [mx_scale_shape(direction, y.rows,
///          y.cols)].
/// Bytes:   reads one byte per element and writes one element.
void mxfp8_dequantize(const uint8_t* codes, const uint8_t* dequant_scale, Fp8Format format,
                      MxDirection direction, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
