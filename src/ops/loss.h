// The losses of a model with many classes.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// The cross entropy of logits = x weight^T + bias, as kernel_ops::LinearCrossEntropy defines it.
/// The logits of all rows are never in memory together. With a mean or a sum, forward also computes
/// the required gradients, and backward multiplies them by the gradient of y; it reads neither x
/// nor weight, and nothing is computed twice. With a loss for each row, backward recomputes the
/// logits.
///
/// Shapes:  x [..., in_features], targets [...], weight [num_classes, in_features], bias and
///          class_weight [num_classes] -> y [], or [...] with a loss for each row; predictions
///          [...].
/// Dtypes:  targets and predictions int64; y float32, float64 where weight is; the product has the
///          dtype of autocast, else of weight.
/// Throws:  as kernel_ops::LinearCrossEntropy.
extern const OpDef kLinearCrossEntropy;

/// The cross entropy of logits x, which other code may read and overwrite. Forward also computes
/// the gradient of x, which backward multiplies by the gradient of y.
///
/// Shapes:  x [..., num_classes], targets [...], class_weight [num_classes] -> y [], or [...] with
///          a loss for each row.
/// Dtypes:  targets int64; y float32, float64 where x is.
/// Throws:  as kernel_ops::LinearCrossEntropy.
extern const OpDef kCrossEntropy;

/// kLinearCrossEntropy with an extra output: the class of the largest logit of each row, also of
/// rows that are ignored.
extern const OpDef kLinearCrossEntropyWithPredictions;

}  // namespace tandem::ops
