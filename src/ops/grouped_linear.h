// A linear layer per group of rows: experts.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// y_g = x_g weight_g^T (+ bias_g, times a number per row with `scale_bias`) for the rows x_g of
/// group g, which follow each other; zeros for rows behind the last group.
///
/// Under a recipe the rows of each group, and each weight, are quantized as tensors of their own.
/// One with a state keeps it of each: of x_0, weight_0, x_1, ... and of grad_y_0, grad_y_1, ...
/// Gradients of weights go to the caller, into main_grad, or are left to be computed later from
/// grad_y, x, splits, what the quantizers of the first two are given, and a text, put into
/// `deferred`: versions of x and splits, and the texts of the quantizers, one per line, empty where
/// there is none. An x that alone has one is decoded.
///
/// Shapes:  x [..., in_features], splits integers [groups]: rows of each group; scales [...];
///          weight [out_features, in_features] and bias [out_features] each, or packed
///          [groups, ...] -> y [..., out_features].
/// Dtypes:  that of autocast, else of the weights.
/// Error:   as a linear layer's; one more rounding where a bias is added (test_grouped_linear.py).
/// Throws:  c10::ValueError where features, splits, scales or tensors of the caller do not fit.
extern const OpDef kGroupedLinear;

}  // namespace tandem::ops
