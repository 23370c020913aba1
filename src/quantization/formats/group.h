// What a quantizer writes for one tensor: codes, scales and amaxes, as one group of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "quantization/formats/quantizer.h"

namespace tandem {

/// The tensors of a group, in the order in which kernel ops return them; absent ones are empty.
/// Each direction has three, of which formats with one level of scale have two.
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
/// Their names in schemas.
inline constexpr std::array kGroupNames{"row_codes",    "row_scale",   "row_amax", "column_codes",
                                        "column_scale", "column_amax", "amax"};
/// The tensors of one direction: codes, scales, and the amax of the second level of scale.
inline constexpr size_t kPartsOfCodes = 3;
/// The index in a group of a part of a direction's codes.
constexpr size_t part_of(Direction direction, size_t part) {
  return kPartsOfCodes * static_cast<size_t>(direction) + part;
}
using Group = std::array<at::Tensor, group_size>;
/// Whether the part is an amax that belongs to codes.
constexpr bool is_amax_part(size_t group_part) {
  return group_part != group_amax && group_part % kPartsOfCodes == kPartsOfCodes - 1;
}
/// The direction of a part of codes.
constexpr Direction direction_of(size_t group_part) {
  return group_part < kPartsOfCodes ? Direction::row : Direction::column;
}
/// Which parts are wanted: row codes, column codes, the amax; each with what belongs to it.
using GroupMask = std::array<bool, 3>;
/// The index in a GroupMask of a part of a group.
constexpr size_t place_in_mask(size_t group_part) { return group_part / kPartsOfCodes; }

}  // namespace tandem
