// Rules of attention that the C++ and the Python front both enforce.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tandem/export.h"

namespace tandem {

/// The names of mask types, in the order of AttnMaskType.
inline constexpr std::array<std::string_view, 6> kAttnMaskNames = {
    "no_mask", "causal", "padding", "padding_causal", "causal_bottom_right", "arbitrary"};

/// The share of one rank in the heads of an attention.
struct AttentionHeads {
  /// Features of a head, heads of queries, heads of keys and values.
  int64_t channels, heads, groups;
};

/// Returns the share of one of `ranks` ranks. Throws c10::ValueError, in the name of `op`, where a
/// number is not positive, where groups do not divide heads, where heads do not divide hidden_size
/// and kv_channels is nullopt, or where ranks cannot share heads evenly.
TANDEM_API AttentionHeads attention_heads(const std::string& op, int64_t hidden_size,
                                          int64_t num_attention_heads,
                                          std::optional<int64_t> num_gqa_groups,
                                          std::optional<int64_t> kv_channels, int64_t ranks);

}  // namespace tandem
