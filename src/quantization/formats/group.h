// What a quantizer writes of one tensor: codes, scales and amaxes, as one group of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "quantization/formats/quantizer.h"

namespace tandem {

/// What whoever writes codes returns, absent tensors empty: the fixed group of results. A value in
/// codes is the three tensors of a direction, of which formats with one level of scale have two.
enum GroupPart : size_t {
  row_codes,
  row_scale,
  row_amax,
  column_codes,
  column_scale,
  column_amax,
  group_amax,
  group_size
};
/// What schemas call them.
inline constexpr std::array kGroupNames{"row_codes",    "row_scale",   "row_amax", "column_codes",
                                        "column_scale", "column_amax", "amax"};
/// Of a value in codes: codes, scales, and the amax behind these.
inline constexpr size_t kPartsOfCodes = 3;
/// Which tensor of a group a part of the codes of a direction is.
constexpr size_t part_of(Direction direction, size_t part) {
  return kPartsOfCodes * static_cast<size_t>(direction) + part;
}
using Group = std::array<at::Tensor, group_size>;
/// Whether that is an amax that comes with codes.
constexpr bool is_amax_part(size_t group_part) {
  return group_part != group_amax && group_part % kPartsOfCodes == kPartsOfCodes - 1;
}
/// Which of them are wanted: those of rows, those of columns, amax.
using GroupMask = std::array<bool, 3>;
/// Place in a mask.
constexpr size_t place_in_mask(size_t group_part) { return group_part / kPartsOfCodes; }

}  // namespace tandem
