// The ops between the product that computes queries, keys and values and the product after
// attention.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// Rotates queries and keys by the angles of their positions, as kernel_ops::Rotary defines it.
/// Backward rotates the gradient by the opposite angles. It keeps nothing but tables, where the
/// caller passes them.
///
/// Shapes:  x as in kernel_ops::Heads -> y like x; with the option `tables` the extra inputs
///          cosines and sines as in kernel_ops::Rotary.
/// Dtypes:  y has the dtype of x, also under autocast.
/// Throws:  as kernel_ops::Rotary.
extern const OpDef kRotary;

/// Attention as kernel_ops::AttentionForward defines it. Backward recomputes the scores from x, y
/// and the logarithm of the sums.
///
/// Shapes:  x as in kernel_ops::Heads -> y [..., sequence, num_heads head_dim]; with the option
///          `mask` the extra input mask as in kernel_ops::AttentionForward.
/// Dtypes:  y has the dtype of autocast, else of x; a mask is not cast.
/// Throws:  as kernel_ops::AttentionForward.
extern const OpDef kAttention;

/// y = each head of queries and keys divided by its root mean square and multiplied by query_weight
/// or key_weight, as kernel_ops::QkNormForward defines it. The op stands before rotary. Backward
/// keeps x and recomputes the norms of heads.
///
/// Shapes:  x as in kernel_ops::Heads; query_weight, key_weight [head_dim] -> y like x.
/// Dtypes:  y, with its values, has the dtype of autocast, else of query_weight; arithmetic is
///          float32, or float64 where y is, and rounded once.
/// Error:   as kernel_ops::QkNormForward.
/// Throws:  as kernel_ops::QkNormForward.
/// Source:  as kernel_ops::QkNormForward.
extern const OpDef kQkNorm;

}  // namespace tandem::ops
