// The layout in which one product writes queries, keys and values: head by head, side by side in
// the last dimension.
#pragma once

#include <string_view>

#include "kernel_ops/framework/results.h"

namespace tandem::kernel_ops {

/// The layout of x [..., sequence, (num_heads + 2 num_kv_heads) head_dim]: num_heads queries, then
/// num_kv_heads keys, then num_kv_heads values. Each num_heads / num_kv_heads adjacent queries
/// share a key.
struct Heads {
  int64_t num_heads, num_kv_heads, head_dim;

  int64_t all() const { return num_heads + 2 * num_kv_heads; }
  int64_t per_key() const { return num_heads / num_kv_heads; }
};

/// Throws c10::ValueError, in the name of `op`, unless the numbers of heads are positive,
/// num_kv_heads divides num_heads, and x has a dimension of positions before the last one, which
/// must hold all heads; c10::TypeError unless x has a floating dtype.
void check_heads(std::string_view op, const Tensor& x, const Heads& heads);

/// The sizes of x with `last` in place of its last dimension.
c10::SymDimVector with_last(const Tensor& x, std::initializer_list<c10::SymInt> last);

}  // namespace tandem::kernel_ops
