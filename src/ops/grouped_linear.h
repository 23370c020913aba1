// A linear layer with one weight for each group of rows, such as the experts of a mixture.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// y_g = x_g weight_g^T + bias_g for the rows x_g of group g; groups follow each other, and rows
/// after the last group give zeros. With `scale_bias`, each row's bias is multiplied by the row's
/// number in the extra input scales.
///
/// A recipe quantizes the rows of each group, and each weight, as a tensor of its own. A recipe
/// with a state has slots for x_0, weight_0, x_1, ..., and for grad_y_0, grad_y_1, ...
///
/// Gradients of weights are returned, added to main_grad, or delayed. For delayed gradients the
/// step stores in `deferred`: grad_y, x, splits, the arguments of the quantizers of grad_y and x,
/// and a text with the versions of x and splits and, one per line, the texts of both quantizers. A
/// line is empty without a quantizer. An x in codes is decoded where grad_y has no quantizer.
///
/// Shapes:  x [..., in_features], splits [groups], the rows of each group, scales [...]; weight
///          [out_features, in_features] and bias [out_features] for each group, or packed [groups,
///          ...] -> y [..., out_features].
/// Dtypes:  splits integers; y has the dtype of autocast, else of the weights.
/// Error:   as a linear layer, and one more rounding where a bias is added
///          (test_grouped_linear.py).
/// Throws:  c10::ValueError where features, splits, scales or tensors of the caller do not fit.
extern const OpDef kGroupedLinear;

}  // namespace tandem::ops
