// Quantizers: how a tensor is quantized, as interned values with one canonical text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/quantize_options.h"
#include "tandem/export.h"

namespace tandem {

/// The dimension of a matrix along which the numbers of a block lie, or over which a product sums.
enum class Direction : uint8_t {
  /// The last dimension.
  row,
  /// All other dimensions.
  column,
};

struct FormatDef;
struct ScalingDef;

/// A format, a kind of scale and its options. Identified by its address: equal quantizers are one
/// object, which lives as long as the process.
struct Quantizer : kernels::QuantizeOptions {
  const FormatDef* format = nullptr;
  const ScalingDef* scaling = nullptr;
  /// Canonical: "fp8_e4m3:current:eps=0:pow2=0".
  std::string text;
};

/// The quantizer of a text: a format, then a kind of scale if the format has several, then options
/// that differ from their defaults, separated by colons. A text is parsed once per process. Throws
/// c10::ValueError for a text that is not valid.
TANDEM_API const Quantizer& quantizer(std::string_view text);

/// The quantizer with these options. `scaling` may be absent and is then the format's first; `text`
/// is not read. Throws c10::ValueError for an epsilon below 0, for options that the kind of scale
/// does not have, and for options that exclude each other: "2d" with "rht", because square blocks
/// are not rotated, and "4over6" with "sr", because its comparison of errors would compare random
/// ones.
TANDEM_API const Quantizer& quantizer(Quantizer options);

/// Half a unit in the last place of the format, relative to the number's size.
TANDEM_API double unit_of(const Quantizer& quantizer);
/// Whether the codes and the scale of one direction serve the other direction too.
TANDEM_API bool serves_both_directions(const Quantizer& quantizer);
/// The number of tensors of a value in codes: codes, scales and, in formats with a second level of
/// scale, the amax.
TANDEM_API size_t tensors_of_codes(const Quantizer& quantizer);
/// The format as `explain` prints it: "fp8_e4m3".
TANDEM_API std::string_view format_name(const Quantizer& quantizer);

}  // namespace tandem
