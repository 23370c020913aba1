// A linear layer per group of rows: experts.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// y_g = x_g weight_g^T (+ bias_g) for the rows x_g of group g, which follow each other; zeros for
/// rows behind the last group.
///
/// Shapes:  x [..., in_features], splits integers [groups]: rows of each group; weight
///          [out_features, in_features] and bias [out_features] each, or packed [groups, ...] -> y
///          [..., out_features].
/// Dtypes:  that of autocast, else of the weights.
/// Throws:  c10::ValueError where features or splits do not fit.
extern const OpDef kGroupedLinear;

}  // namespace tandem::ops
