// NVFP4: E2M1 codes with one E4M3 scale per block of 16 numbers, and one float32 per tensor.
#pragma once

#include <bit>

#include "kernels/fp8.h"
#include "kernels/views.h"

namespace tandem::kernels {

inline constexpr size_t kFp4Block = 16;

/// Blocks are 16 adjacent elements of a row (1x16), or of a column (16x1); what is missing of the
/// last one is zeros, which have codes.
enum class Fp4Direction : uint8_t { row, column };

constexpr size_t fp4_blocks(size_t n) { return (n + kFp4Block - 1) / kFp4Block; }

/// Codes of a [rows, cols] matrix in bytes, two codes each, the first in the low half: row [rows,
/// up(cols, 16) / 2] with neighbours of a row, column [up(rows, 16) / 2, cols] with neighbours of a
/// column, where up(n, m) is n rounded up to a multiple of m.
constexpr MatrixShape fp4_code_shape(Fp4Direction direction, size_t rows, size_t cols) {
  constexpr size_t kBytes = kFp4Block / 2;
  if (direction == Fp4Direction::row) return {rows, fp4_blocks(cols) * kBytes};
  return {fp4_blocks(rows) * kBytes, cols};
}

/// Scales: row [up(rows, 128), up(blocks, 4)], column [up(blocks, 4), up(cols, 128)]; zero where
/// there is no block.
constexpr MatrixShape fp4_scale_shape(Fp4Direction direction, size_t rows, size_t cols) {
  const auto up = [](size_t n, size_t to) { return (n + to - 1) / to * to; };
  if (direction == Fp4Direction::row) return {up(rows, 128), up(fp4_blocks(cols), 4)};
  return {up(fp4_blocks(rows), 4), up(cols, 128)};
}

/// One direction to be written.
struct Fp4Output {
  /// fp4_code_shape, contiguous; null where the direction is not wanted.
  uint8_t* codes = nullptr;
  /// E4M3, fp4_scale_shape.
  uint8_t* dequant_scale = nullptr;
  /// The amax of what the codes are of, one element.
  float* amax = nullptr;
  explicit operator bool() const { return codes != nullptr; }
};

/// Scales that a block chooses from. Between 4 and 6 E2M1 has no number: where the largest number
/// of a block becomes 4, those a little smaller are nearer to a code, and the least ones farther.
enum class FourOverSix : uint8_t {
  /// The largest number becomes 6.
  off,
  /// 6 or 4, as the sum of absolute errors is less.
  mae,
  /// 6 or 4, as the sum of squared errors is less.
  mse,
};

struct Fp4Scaling {
  /// 16x16: both directions have the same codes, and each block's scale repeated.
  bool square_blocks = false;
  /// Column codes are of columns whose groups of 16 are rotated by `hadamard`; x is rounded to
  /// bfloat16 before, and what comes out too.
  bool rotates_columns = false;
  /// Codes are rounded up or down by chance, right on average.
  bool stochastic = false;
  uint64_t seed = 0;
  uint32_t offset = 0;
  /// Not with `stochastic`.
  FourOverSix four_over_six = FourOverSix::off;
  /// What the scale of a block becomes whose amax is the tensor's, where that becomes 6: 448, the
  /// largest of E4M3, or 256, whose 1.5-fold E4M3 has too.
  float largest_scale = 448;
};

/// Negative signs of the random Hadamard transform, by index.
inline constexpr uint32_t kHadamardSigns = 0xD7E8;
/// Whether x[i] counts negatively in y[j].
constexpr bool hadamard_is_negative(size_t i, size_t j) {
  return (std::popcount(i & j) & 1) != static_cast<int>(kHadamardSigns >> i & 1);
}
/// y[j] = sum of +-x[i] / 4, in float64 by ascending i, rounded to float32 and then to bfloat16: an
/// orthogonal matrix, so that two operands that are both rotated have the same product.
void hadamard(const float* x, float* y);

/// What is the same for all blocks of a tensor of this amax.
struct Fp4TensorScale {
  Fp4TensorScale(float amax, float largest_scale);
  /// s of cpu::nvfp4_quantize.
  float scale;
  /// What block amaxes are multiplied by to give scales; and what scales are multiplied by to give
  /// the inverse of what numbers are multiplied by.
  float per_amax, inverse;
  /// A, and 6 times the largest scale.
  float amax, divisor;
};
/// The scale of a block in E4M3; NaN of NaN.
uint8_t fp4_block_scale(float block_amax, const Fp4TensorScale& tensor);
/// The scales that four over six chooses from: the largest number becomes 6, or 4.
struct Fp4Candidates {
  uint8_t six, four;
};
Fp4Candidates fp4_candidates(float block_amax, const Fp4TensorScale& tensor);
/// Sum over 16 numbers of a block, by ascending index, of |y - x| or (y - x)^2 in float32, where y
/// = codes * scale * A / (6 * largest scale), multiplied and divided from left to right.
float fp4_error(const float* x, uint8_t block_scale, const Fp4TensorScale& tensor,
                FourOverSix metric);
/// What the numbers of a block are multiplied by; NaN of a NaN.
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
/// each product and quotient rounded once, casts saturating; with L the largest scale, 6 L in place
/// of 2688.
///
/// With four over six, of each block either E4M3(b) or E4M3(1.5 b) is the scale, with b = (block
/// amax / 6) * s, whichever has the smaller fp4_error; the former where they are equal, or NaN. Of
/// square blocks the errors of rows, absent ones 0, are added by halves: of 16 sums the i-th and
/// the i + 8-th, of 8 the i-th and the i + 4-th, and so on.
/// Source: Cook et al., Four Over Six, 2025.
///
///   x [16, cols] --+--> amax of each block of 16 of a row --> row.dequant_scale --> row.codes
///                  +--> (rotate) --> amax of each column --> column.dequant_scale --> column.codes
///                  +--> amax of x
///
/// A block with a NaN has the scale 0x7F and decodes to NaN, as its codes cannot say it. Stochastic
/// rounding as of cast.h, with the index of an element in the padded operand, of columns the
/// transposed one, and the direction as the counter's last word.
///
/// Shapes: x [rows, cols], either possibly 0; outputs as in Fp4Output; amax one element or null.
/// Bytes:  reads x twice, for column codes that are rotated once more; writes half a byte per
///         element and direction, and 1/8 of that in scales.
/// Error:  none: bitwise equal to the reference on every target and thread count (tests Nvfp4,
///         GoldenBlocks).
void nvfp4_quantize(ConstRows x, const Fp4Scaling& scaling, Fp4Output row, Fp4Output column,
                    float* amax);

/// y = codes * (dequant_scale * A * (1 / (6 L))) in float32, rounded once to y's element, with L
/// the largest scale.
///
/// Shapes: y [rows, cols], where what the blocks lie along may be padded to 16 or not; codes
///         [fp4_code_shape(direction, rows, cols)], dequant_scale [fp4_scale_shape(...)].
/// Bytes:  reads half a byte per element and writes one element.
void nvfp4_dequantize(const uint8_t* codes, const uint8_t* dequant_scale, float amax,
                      float largest_scale, Fp4Direction direction, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
