// What stands between the product of queries, keys and values and the product behind attention.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// Queries and keys turned by the angles of their positions, as kernel_ops::Rotary defines it;
/// backward turns the gradient back, and keeps nothing but tables that were given.
///
/// Shapes:  x as kernel_ops::Heads says -> y like x; cosines and sines, extra inputs where an
///          option says so, as kernel_ops::Rotary.
/// Dtypes:  y as x, whatever autocast says.
/// Throws:  as kernel_ops::Rotary.
extern const OpDef kRotary;

/// As kernel_ops::AttentionForward defines it. Backward computes scores again, from x, y and the
/// logarithm of their sums.
///
/// Shapes:  x as kernel_ops::Heads says -> y [..., sequence, num_heads head_dim]; mask, an extra
///          input where an option says so, as kernel_ops::AttentionForward.
/// Dtypes:  that of autocast, else of x; a mask keeps its own.
/// Throws:  as kernel_ops::AttentionForward.
extern const OpDef kAttention;

/// Each head of queries and of keys normed by its root mean square and multiplied with query_weight
/// or key_weight, as kernel_ops::QkNormForward defines it; it stands before rotary. Backward keeps
/// x, and computes the norms of heads again.
///
/// Shapes:  x as kernel_ops::Heads says; query_weight, key_weight [head_dim] -> y like x.
/// Dtypes:  that of autocast, else of query_weight, values too; arithmetic in float32, or in
///          float64 where that is it, rounded once.
/// Error, Throws, Source: as kernel_ops::QkNormForward.
extern const OpDef kQkNorm;

}  // namespace tandem::ops
