// The options of quantizers.
#pragma once

#include "kernels/fp8.h"

namespace tandem::kernels {

/// The scales among which a block chooses. E2M1 has no number between 4 and 6: with 4 as the
/// largest code of a block, numbers a little below the largest one are nearer to a code, and the
/// least numbers are farther from one.
enum class FourOverSix : uint8_t {
  /// The largest number becomes 6.
  off,
  /// The largest number becomes 6 or 4, whichever has the smaller sum of absolute errors.
  mae,
  /// The largest number becomes 6 or 4, whichever has the smaller sum of squared errors.
  mse,
};

/// Each kind of scale has some of these options, and its kernels read no others.
struct QuantizeOptions {
  /// A lower bound of amax.
  double amax_epsilon = 0;
  /// Scales are rounded down to powers of two.
  bool power_of_two = false;
  /// Blocks are square: both directions have equal codes, and repeat the scale of each block.
  bool square_blocks = false;
  /// Column codes are codes of columns whose groups of 16 are rotated by kernels::hadamard, rounded
  /// to bfloat16 before and after. The orthogonal matrix is the one for both operands of a product,
  /// so that the rotation cancels.
  bool hadamard = false;
  /// Codes are rounded up or down at random, right on average, by a seed that is passed in.
  bool stochastic_rounding = false;
  /// `stochastic_rounding` excludes all values but `off`.
  FourOverSix four_over_six = FourOverSix::off;
};

/// A quantizer with FP8 codes.
struct Fp8Scaling {
  Fp8Format format = Fp8Format::e4m3;
  QuantizeOptions options = {};
};

}  // namespace tandem::kernels
