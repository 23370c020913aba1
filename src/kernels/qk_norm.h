// RMSNorm of each head of queries and keys.
#pragma once

#include "kernels/norm.h"
#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// The operands of forward and backward. A row of x is heads of head_dim columns side by side:
/// num_heads queries, num_kv_heads keys, then columns that no norm changes, the values.
///
/// Shapes:  x [rows, columns of whole heads, also of values]; query_weight, key_weight [head_dim].
/// Dtypes:  any Element each.
struct QkNorm {
  ConstRows x;
  ConstVector query_weight, key_weight;
  size_t num_heads, num_kv_heads;
  NormOptions options;
};

/// y = x_hat * gamma for each head of queries and of keys: norm_forward with the head as a row,
/// and with gamma from query_weight or key_weight. Other columns are copied.
///
/// Shapes:  y like x.
/// Memory:  y may be x.
/// Dtypes:  y has the element of x; arithmetic in float32.
/// Error:   as norm_forward (test QkNorm.NormsHeads).
/// Bytes:   reads x once from memory (the second read of a head hits L1), writes y once.
void qk_norm_forward(const QkNorm& norm, Rows y);

/// grad_x as in norm_backward, head by head; other columns of grad_x are those of grad_y.
/// grad_query_weight and grad_key_weight = sum over rows and heads of grad_y * x_hat, in float32,
/// rounded once: first over the heads of a row, then as in PartialSums, so that bits do not depend
/// on threads. The norms of heads are recomputed with forward's bits.
///
/// Shapes:   grad_y, grad_x like x; grad_query_weight, grad_key_weight [head_dim].
/// Memory:   grad_x may be grad_y or x.
/// Dtypes:   grad_y, grad_x have the element of x; gradients of weights any Element.
/// Error:    as norm_backward (test QkNorm.HasTheGradientsOfItsDefinition).
/// Optional: grad_x, grad_query_weight, grad_key_weight.
/// Bytes:    reads grad_y and x once from memory, writes grad_x once.
void qk_norm_backward(const QkNorm& norm, ConstRows grad_y, Rows grad_x, Vector grad_query_weight,
                      Vector grad_key_weight);

}  // namespace tandem::kernels::cpu
