// The basic ops of a linear layer: a product with a weight, and a bias.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// y = x W^T over the last dimension. A recipe quantizes x, W and grad_y. Backward has two
/// products, grad_x and grad_weight.
///
/// Shapes:  x [..., in_features], weight [out_features, in_features] -> y [..., out_features].
/// Dtypes:  y has the dtype of autocast, else of weight.
/// Throws:  c10::ValueError where the features do not fit.
extern const OpDef kBasicLinear;

/// y = x + bias. grad_bias is summed in float32 and rounded once.
///
/// Shapes:  x [..., features], bias [features] -> y like x.
/// Dtypes:  y has the dtype to which torch promotes x and bias; under autocast, bias is cast to the
///          dtype of x.
extern const OpDef kBias;

}  // namespace tandem::ops
