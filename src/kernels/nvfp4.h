// NVFP4: E2M1 codes with one E4M3 scale per block of 16 numbers, and one float32 per tensor.
#pragma once

#include <bit>

#include "kernels/quantize_made.h"
#include "kernels/quantize_options.h"

namespace tandem::kernels {

inline constexpr size_t kFp4Block = 16;

/// Blocks are 16 adjacent elements of a row (1x16), or of a column (16x1), or square (16x16). The
/// last block is padded with zeros, which have codes.
enum class Fp4Direction : uint8_t { row, column };

constexpr size_t fp4_blocks(size_t n) { return (n + kFp4Block - 1) / kFp4Block; }

/// Returns the shape of the codes of a [rows, cols] matrix in bytes, with two codes each, the first
/// one in the low half: row [rows, up(cols, 16) / 2], which pairs neighbours of a row, column
/// [up(rows, 16) / 2, cols], which pairs neighbours of a column, where up(n, m) is n rounded up to
/// a multiple of m.
constexpr MatrixShape fp4_code_shape(Fp4Direction direction, size_t rows, size_t cols) {
  constexpr size_t kBytes = kFp4Block / 2;
  if (direction == Fp4Direction::row) return {rows, fp4_blocks(cols) * kBytes};
  return {fp4_blocks(rows) * kBytes, cols};
}

/// Returns the shape of the scales: row [up(rows, 128), up(blocks, 4)], column [up(blocks, 4),
/// up(cols, 128)]. Scales without a block are zero.
constexpr MatrixShape fp4_scale_shape(Fp4Direction direction, size_t rows, size_t cols) {
  const auto up = [](size_t n, size_t to) { return (n + to - 1) / to * to; };
  if (direction == Fp4Direction::row) return {up(rows, 128), up(fp4_blocks(cols), 4)};
  return {up(fp4_blocks(rows), 4), up(cols, 128)};
}

/// The output for one direction.
struct Fp4Output {
  /// In the shape fp4_code_shape, contiguous; null where the direction is not requested.
  uint8_t* codes = nullptr;
  /// E4M3, in the shape fp4_scale_shape.
  uint8_t* dequant_scale = nullptr;
  /// The amax of the numbers that have codes, one element.
  float* amax = nullptr;
  explicit operator bool() const { return codes != nullptr; }
};

struct Fp4Scaling {
  QuantizeOptions options = {};
  /// Of stochastic rounding.
  uint64_t seed = 0;
  uint32_t offset = 0;
  /// The scale, where the largest number becomes 6, of a block whose amax is the tensor's: 448, the
  /// largest number of E4M3, or 256, because E4M3 has 1.5 * 256 too.
  float largest_scale = 448;
};

/// The negative signs of the random Hadamard transform, by index.
inline constexpr uint32_t kHadamardSigns = 0xD7E8;
/// Whether x[i] has a negative sign in y[j].
constexpr bool hadamard_is_negative(size_t i, size_t j) {
  return (std::popcount(i & j) & 1) != static_cast<int>(kHadamardSigns >> i & 1);
}
/// y[j] = sum of +-x[i] / 4, in float64 by ascending i, rounded to float32 and then to bfloat16.
/// The matrix is orthogonal, so that the product of two rotated operands is the product of the
/// operands.
void hadamard(const float* x, float* y);

/// The numbers that all blocks of a tensor with this amax share.
struct Fp4TensorScale {
  Fp4TensorScale(float amax, const Fp4Scaling& scaling);
  /// s of cpu::nvfp4_quantize.
  float scale;
  /// Factors: block amax * per_amax is the scale of a block, and scale * inverse is the reciprocal
  /// of the block's fp4_factor.
  float per_amax, inverse;
  /// A of cpu::nvfp4_quantize, and 6 times the largest scale.
  float amax, divisor;
};
/// Returns the scale of a block in E4M3; NaN for NaN.
uint8_t fp4_block_scale(float block_amax, const Fp4TensorScale& tensor);
/// The scales from which four over six chooses: the largest number becomes 6, or 4.
struct Fp4Candidates {
  uint8_t six, four;
};
Fp4Candidates fp4_candidates(float block_amax, const Fp4TensorScale& tensor);
/// Returns the sum over the 16 numbers of a block, by ascending index, of |y - x| or (y - x)^2 in
/// float32, where y = codes * scale * A / (6 * largest scale), multiplied and divided from left to
/// right.
float fp4_error(const float* x, uint8_t block_scale, const Fp4TensorScale& tensor,
                FourOverSix metric);
/// Returns the factor of the numbers of a block; NaN for NaN.
float fp4_factor(uint8_t block_scale, const Fp4TensorScale& tensor);

/// The definition of cpu::nvfp4_quantize, element by element.
void nvfp4_quantize_reference(ConstRows x, const Fp4Scaling& scaling, Fp4Output row,
                              Fp4Output column, float* amax);

namespace cpu {

/// With A the amax of the operand, NaN skipped:
///   s = min(2688 / A, the largest float32), 1 where A is 0 or infinite
///   dequant_scale = E4M3(min(block amax * (s * (1 / 6)), the largest float32))
///   codes = E2M1(x * min(1 / (dequant_scale * (1 / s)), the largest float32))
///   source ~= codes * (dequant_scale * A * (1 / 2688))
/// Each product and quotient is rounded once, and casts saturate. With L the largest scale, 6 L
/// replaces 2688.
///
/// With four over six, the scale of each block is E4M3(b) or E4M3(1.5 b), with b = (block amax / 6)
/// * s, whichever has the smaller fp4_error; E4M3(b) where the errors are equal or NaN. The errors
/// of the rows of a square block, 0 for absent rows, are added by halves: of 16 sums the i-th and
/// the i + 8-th, of 8 the i-th and the i + 4-th, and so on.
///
///   x [16, cols] --+--> amax of each block of 16 of a row --> row.dequant_scale --> row.codes
///                  +--> (rotate) --> amax of each column --> column.dequant_scale --> column.codes
///                  +--> amax of x
///
/// A block with a NaN has the scale 0x7F and decodes to NaN, because its codes cannot represent
/// NaN. With an infinity in x every number decodes to an infinity, or to NaN where its code is 0.
/// Stochastic rounding is that of cast_reference. The index of an element is its index in the
/// padded operand, for columns in the transposed one, and the direction is the last word of the
/// counter.
///
/// Shapes:  x [rows, cols], either of which may be 0; outputs as in Fp4Output; amax one element or
///          null.
/// Bytes:   reads x twice, and once more for rotated column codes; writes half a byte per element
///          and direction, and 1/8 of that in scales.
/// Error:   none: bitwise equal to the reference on every target and thread count (tests Nvfp4,
///          GoldenQuantize).
/// Source:  Cook et al., Four Over Six, 2025.
void nvfp4_quantize(const Input& x, const Fp4Scaling& scaling, Fp4Output row, Fp4Output column,
                    float* amax);
/// nvfp4_quantize of a matrix whose amax is known, with the same bits.
void nvfp4_quantize_seen(ConstRows x, const Seen& seen, const Fp4Scaling& scaling, Fp4Output row,
                         Fp4Output column, float* amax);

/// y = codes * (dequant_scale * A * (1 / (6 L))) in float32, rounded once to y's element, with L
/// the largest scale.
///
/// Shapes:  y [rows, cols], where the dimension of the blocks may be padded to 16 or not; codes
///          [fp4_code_shape(direction, rows, cols)], dequant_scale [fp4_scale_shape(direction,
///          rows, cols)].
/// Bytes:   reads half a byte per element and writes one element.
void nvfp4_dequantize(const uint8_t* codes, const uint8_t* dequant_scale, float amax,
                      float largest_scale, Fp4Direction direction, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
