// RMSNorm, LayerNorm and L2 normalization.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// y = x * inv_rms * gamma with inv_rms = 1 / sqrt(mean(x^2) + eps), over the last dimensions of x,
/// as many as weight has. gamma = weight, or 1 + weight with zero_centered_gamma. With
/// rounds_before_weight, x * inv_rms is rounded to the dtype of x; gradients ignore this rounding.
///
/// Shapes:  x [..., *hidden], weight [*hidden] -> y like x, inv_rms [rows].
/// Dtypes:  y has the dtype of autocast, else of weight; sums are float32 or wider.
/// Error:   at most 8 float32 ULP from float64 for hidden <= 16384 (test NormOp).
/// Throws:  c10::ValueError (shapes).
/// Source:  Zhang and Sennrich 2019, arXiv:1910.07467.
extern const OpDef kRmsNorm;

/// y = (x - mean) / sqrt(variance + eps) * gamma + bias, over the last dimensions of x, as many as
/// weight has. gamma = weight, or 1 + weight with zero_centered_gamma.
///
/// Shapes:  x [..., *hidden], weight and bias [*hidden] -> y like x, mean and inv_std [rows].
/// Dtypes:  as kRmsNorm.
/// Error:   as kRmsNorm.
/// Throws:  as kRmsNorm.
/// Source:  Ba, Kiros and Hinton 2016, arXiv:1607.06450.
extern const OpDef kLayerNorm;

/// y = x / sqrt(sum(x^2) + eps), over the last dimension.
///
/// Shapes:  x [..., hidden] -> y like x, inv_norm [rows].
/// Dtypes:  y has the dtype of x, also under autocast; sums are float32 or wider.
/// Error:   as kRmsNorm.
/// Throws:  c10::ValueError for a scalar.
extern const OpDef kL2Normalization;

}  // namespace tandem::ops
