// Scalar NVFP4: what the vector code must equal to the bit.
#include "kernels/nvfp4.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <vector>

#include "kernels/cast.h"
#include "kernels/cpu/float_mode.h"
#include "kernels/scalar.h"

namespace tandem::kernels {
namespace {

float to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return std::bit_cast<float>((bits | 0x00400000u) & 0xFFFF0000u);
  return std::bit_cast<float>((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u);
}

/// The operand of one direction: [outer, blocks of 16 of what is contracted], padded.
struct Operand {
  Operand(ConstRows x, const Fp4Scaling& scaling, Fp4Direction along)
      : direction(along),
        outer(along == Fp4Direction::row ? x.rows : x.cols),
        inner(fp4_blocks(along == Fp4Direction::row ? x.cols : x.rows) * kFp4Block),
        numbers(outer * inner, 0.0f) {
    for (size_t r = 0; r < x.rows; ++r)
      for (size_t c = 0; c < x.cols; ++c)
        numbers[along == Fp4Direction::row ? r * inner + c : c * inner + r] = element_of(x, r, c);
    if (direction == Fp4Direction::row || !scaling.options.hadamard) return;
    for (size_t at = 0; at < numbers.size(); at += kFp4Block) {
      float group[kFp4Block];
      std::transform(&numbers[at], &numbers[at] + kFp4Block, group, to_bfloat16);
      hadamard(group, &numbers[at]);
    }
  }

  Fp4Direction direction;
  size_t outer, inner;
  std::vector<float> numbers;
};

uint32_t magnitude_of(float value) { return std::bit_cast<uint32_t>(value) & 0x7FFFFFFF; }

/// The numbers of a block, one line of x's rows or of an operand after the other: of `lines` lines.
struct Block {
  float numbers[kFp4Block][kFp4Block] = {};
  size_t lines = 1;

  /// That of element (o, first) of an operand.
  Block(const Operand& x, const Fp4Scaling& scaling, size_t o, size_t first)
      : lines(scaling.options.square_blocks ? kFp4Block : 1) {
    const size_t from = scaling.options.square_blocks ? o / kFp4Block * kFp4Block : o;
    for (size_t i = 0; i < lines && from + i < x.outer; ++i)
      for (size_t k = 0; k < kFp4Block; ++k) {
        const float value = x.numbers[(from + i) * x.inner + first + k];
        // Lines of a square are rows of x in both directions, as errors are added by rows.
        const bool turned = scaling.options.square_blocks && x.direction == Fp4Direction::column;
        (turned ? numbers[k][i] : numbers[i][k]) = value;
      }
  }

  /// NaN, whose bits are above those of infinity, is the largest.
  float amax() const {
    uint32_t largest = 0;
    for (const auto& line : numbers)
      for (const float value : line) largest = std::max(largest, magnitude_of(value));
    return std::bit_cast<float>(largest);
  }

  float error(uint8_t scale, const Fp4TensorScale& tensor, FourOverSix metric) const {
    float sums[kFp4Block] = {};
    for (size_t i = 0; i < lines; ++i) sums[i] = fp4_error(numbers[i], scale, tensor, metric);
    for (size_t half = lines / 2; half > 0; half /= 2)
      for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
  }

  uint8_t scale(const Fp4TensorScale& tensor, FourOverSix metric) const {
    if (metric == FourOverSix::off) return fp4_block_scale(amax(), tensor);
    const Fp4Candidates of = fp4_candidates(amax(), tensor);
    return error(of.four, tensor, metric) < error(of.six, tensor, metric) ? of.four : of.six;
  }
};

void write(const Operand& x, const Fp4Scaling& scaling, Fp4Output out, size_t rows, size_t cols) {
  uint32_t bits = 0;
  for (const float value : x.numbers)
    if (magnitude_of(value) <= 0x7F800000) bits = std::max(bits, magnitude_of(value));
  const auto amax = std::bit_cast<float>(bits);
  const Fp4TensorScale tensor(amax, scaling);
  if (out.amax != nullptr) *out.amax = tensor.amax;
  const bool by_row = x.direction == Fp4Direction::row;
  const MatrixShape code_shape = fp4_code_shape(x.direction, rows, cols),
                    scale_shape = fp4_scale_shape(x.direction, rows, cols);
  std::fill_n(out.dequant_scale, scale_shape.size(), uint8_t{0});
  std::fill_n(out.codes, code_shape.size(), uint8_t{0});
  for (size_t o = 0; o < x.outer; ++o) {
    for (size_t first = 0; first < x.inner; first += kFp4Block) {
      const uint8_t scale =
          Block(x, scaling, o, first).scale(tensor, scaling.options.four_over_six);
      const float factor = fp4_factor(scale, tensor);
      const size_t block = first / kFp4Block;
      out.dequant_scale[by_row ? o * scale_shape.cols + block : block * scale_shape.cols + o] =
          scale;
      for (size_t k = first; k < first + kFp4Block; ++k) {
        const size_t index = o * x.inner + k;
        const Cast cast{
            CastFormat::e2m1, true,
            scaling.options.stochastic_rounding ? Rounding::stochastic : Rounding::nearest,
            scaling.seed, scaling.offset};
        const uint8_t code = cast_reference(x.numbers[index] * factor, cast, index,
                                            static_cast<uint32_t>(x.direction));
        const size_t byte = by_row ? o * code_shape.cols + k / 2 : k / 2 * code_shape.cols + o;
        out.codes[byte] = static_cast<uint8_t>(out.codes[byte] | code << (k % 2 * 4));
      }
    }
  }
}

}  // namespace

void hadamard(const float* x, float* y) {
  const cpu::ScopedFloatMode mode;
  for (size_t j = 0; j < kFp4Block; ++j) {
    double sum = 0;
    for (size_t i = 0; i < kFp4Block; ++i)
      sum += hadamard_is_negative(i, j) ? -double{x[i]} : double{x[i]};
    y[j] = to_bfloat16(static_cast<float>(sum * 0.25));
  }
}

Fp4TensorScale::Fp4TensorScale(float amax_of_tensor, const Fp4Scaling& scaling)
    : amax(amax_of_tensor), divisor(6 * scaling.largest_scale) {
  const cpu::ScopedFloatMode mode;
  // Volatile: nothing is computed before the mode is set.
  volatile float s = 1.0f;
  if ((std::bit_cast<uint32_t>(amax) & 0x7FFFFFFF) != 0)
    s = std::min(cpu::divide(divisor, amax), FLT_MAX);
  if (s == 0) s = 1.0f;  // the amax is infinite
  scale = s;
  per_amax = s * (1.0f / 6.0f);
  inverse = cpu::divide(1.0f, s);
}

uint8_t fp4_block_scale(float block_amax, const Fp4TensorScale& tensor) {
  const cpu::ScopedFloatMode mode;
  return fp8_from_float(block_amax * tensor.per_amax, Fp8Format::e4m3);
}

Fp4Candidates fp4_candidates(float block_amax, const Fp4TensorScale& tensor) {
  const cpu::ScopedFloatMode mode;
  volatile float base = cpu::divide(block_amax, 6.0f);
  base = base * tensor.scale;
  return {fp8_from_float(base, Fp8Format::e4m3), fp8_from_float(base * 1.5f, Fp8Format::e4m3)};
}

float fp4_error(const float* x, uint8_t block_scale, const Fp4TensorScale& tensor,
                FourOverSix metric) {
  const cpu::ScopedFloatMode mode;
  const float factor = fp4_factor(block_scale, tensor),
              scale = float_from_fp8(block_scale, Fp8Format::e4m3);
  float sum = 0;
  for (size_t i = 0; i < kFp4Block; ++i) {
    const uint8_t code = fp8_from_float(x[i] * factor, Fp8Format::e2m1);
    const float value = float_from_fp8(code, Fp8Format::e2m1) * scale * tensor.amax;
    const float difference = cpu::divide(value, tensor.divisor) - x[i];
    sum += metric == FourOverSix::mse ? difference * difference : std::abs(difference);
  }
  return sum;
}

float fp4_factor(uint8_t block_scale, const Fp4TensorScale& tensor) {
  const cpu::ScopedFloatMode mode;
  const float scale = float_from_fp8(block_scale, Fp8Format::e4m3) * tensor.inverse;
  if (std::isnan(scale)) return scale;
  return scale == 0 ? FLT_MAX : std::min(cpu::divide(1.0f, scale), FLT_MAX);
}

void nvfp4_quantize_reference(ConstRows x, const Fp4Scaling& scaling, Fp4Output row,
                              Fp4Output column, float* amax) {
  const cpu::ScopedFloatMode mode;
  if (row) write(Operand(x, scaling, Fp4Direction::row), scaling, row, x.rows, x.cols);
  if (column) write(Operand(x, scaling, Fp4Direction::column), scaling, column, x.rows, x.cols);
  if (amax != nullptr) *amax = amax_of(x, {0, x.rows, 0, x.cols});
}

}  // namespace tandem::kernels
