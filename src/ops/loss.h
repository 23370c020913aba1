// The loss of a model with many classes.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// The cross entropy of logits = x weight^T + bias, as kernel_ops::LinearCrossEntropy defines it,
/// without memory for them. Where the losses are reduced, forward computes their gradients too,
/// those that somebody asks for: backward multiplies them by the gradient of y, reads neither x nor
/// weight, and nothing is computed twice. Where each row has a gradient of its own, backward
/// computes the logits again.
///
/// Shapes:  x [..., in_features], targets [...], weight [num_classes, in_features], bias and
///          class_weight [num_classes] -> y [] or, by row, [...]; predictions [...].
/// Dtypes:  that of autocast, else of weight; targets and predictions int64; y float32, float64
///          where weight is.
/// Throws:  as kernel_ops::LinearCrossEntropy.
extern const OpDef kLinearCrossEntropy;

/// The same, and as extra output the class of the largest logit of each row, also of those that are
/// ignored.
extern const OpDef kLinearCrossEntropyWithPredictions;

}  // namespace tandem::ops
