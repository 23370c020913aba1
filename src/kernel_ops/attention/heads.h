// Queries, keys and values as one product makes them: side by side in the last dimension, a head
// behind the other.
#pragma once

#include <string_view>

#include "kernel_ops/framework/results.h"

namespace tandem::kernel_ops {

/// How x [..., sequence, (num_heads + 2 num_kv_heads) head_dim] lies: num_heads queries, then as
/// many keys as values. num_heads / num_kv_heads queries, which stand together, share a key.
struct Heads {
  int64_t num_heads, num_kv_heads, head_dim;

  int64_t all() const { return num_heads + 2 * num_kv_heads; }
  int64_t per_key() const { return num_heads / num_kv_heads; }
};

/// Throws c10::ValueError, in the name of `op`, unless there are heads of which num_kv_heads
/// divides num_heads, and x has a dimension of positions before that of all heads; c10::TypeError
/// unless x has a floating dtype.
void check_heads(std::string_view op, const Tensor& x, const Heads& heads);

/// The sizes of x with `last` in place of its last dimension.
c10::SymDimVector with_last(const Tensor& x, std::initializer_list<c10::SymInt> last);

}  // namespace tandem::kernel_ops
