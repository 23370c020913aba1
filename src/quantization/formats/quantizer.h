// Quantizers: what is asked of whoever writes codes, as interned values with one canonical text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tandem/export.h"

namespace tandem {

/// Along which dimension of a matrix a product sums, and along which the numbers of a block lie.
enum class Direction : uint8_t {
  /// The last dimension.
  row,
  /// All others.
  column,
};

struct FormatDef;
struct ScalingDef;
namespace kernels {
enum class FourOverSix : uint8_t;  // nvfp4.h
}

/// A format, a kind of scale and its options. Known by its address: equal quantizers are one
/// object, which lives as long as the process.
struct Quantizer {
  const FormatDef* format = nullptr;
  const ScalingDef* scaling = nullptr;
  /// "eps": lower bound of amax.
  double amax_epsilon = 0;
  /// "pow2": scales are powers of two.
  bool power_of_two = false;
  /// "2d": a block is as high as it is wide, and both directions have the same codes.
  bool square_blocks = false;
  /// "rht": column codes are of groups that an orthogonal matrix has rotated, the same for both
  /// operands of a product.
  bool hadamard = false;
  /// "sr": codes are rounded up or down by chance, right on average, by a seed that is passed in.
  bool stochastic_rounding = false;
  /// "4over6": the largest number of a block becomes 6 or 4, whichever errs less, by "mae", the sum
  /// of absolute errors, or by "mse", that of squares. Not with `stochastic_rounding`.
  kernels::FourOverSix four_over_six{};
  /// Canonical: "fp8_e4m3:current:eps=0:pow2=0".
  std::string text;
};

/// The quantizer of a text: a format, then a kind of scale where the format has several, then
/// options that differ from their defaults, all behind colons. A text is parsed once per process.
/// Throws c10::ValueError on what is none.
TANDEM_API const Quantizer& quantizer(std::string_view text);

/// The quantizer of these options, whose `scaling` may be left out where it is the format's first,
/// and whose `text` is not read. Throws c10::ValueError on an epsilon below 0, on options that
/// this kind of scale does not have, and on two that exclude each other: "2d" with "rht", as
/// squares are not rotated, and "4over6" with "sr", as what is rounded by chance errs by chance.
TANDEM_API const Quantizer& quantizer(Quantizer options);

/// Half a unit in the last place of the format's numbers, relative to their size.
TANDEM_API double unit_of(const Quantizer& quantizer);
/// Whether codes and scale of one direction are those of the other too.
TANDEM_API bool serves_both_directions(const Quantizer& quantizer);
/// Tensors that a value in codes consists of: codes, their scales and, in formats with a second
/// level of scale, the amax that it comes from.
TANDEM_API size_t tensors_of_codes(const Quantizer& quantizer);
/// As `explain` prints the format: "fp8_e4m3".
TANDEM_API std::string_view format_name(const Quantizer& quantizer);

}  // namespace tandem
