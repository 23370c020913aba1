// Fusions of a product with the steps after it, and of its gradients with the steps before and
// after them. Each adds at most one pass over memory to the product.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// linear (-> bias) (-> constant_scale) (-> add_extra_input). Without a bias the product itself
/// multiplies and adds; an extra input with `in_place` is the tensor that it adds to.
///
///   x, weight -> product -> + bias -> * factor -> + extra -> y
extern const Fusion kLinearSum;

/// linear (-> bias) -> activation (-> quantize), and linear (-> bias) -> gated unit (-> quantize).
/// The quantize step is included only with a bias; without one, the product is z, and the unit and
/// its quantizer are a fusion of their own.
///
///   x, weight -> product (-> + bias) -> act -> y (if demanded) (-> codes, dequant_scale, amax)
///                                    |
///                                    +--> z, written only if demanded, into the memory of the
///                                         product: the activation's backward reads it
extern const Fusion kLinearActivation, kLinearGlu;

/// Backward of a linear that reads the residual stream: grad_x = grad_y W + grad_residual.
///
///   grad_y, weight -> product -> + grad_residual -> grad_x
extern const Fusion kLinearBackwardAdd;

/// Backward of linear -> constant_scale. Both products are multiplied by the factor, and the
/// gradient between linear and constant_scale is not written.
///
///   grad_y, weight -> factor * product -> grad_x
///   grad_y, x      -> factor * product -> grad_weight
extern const Fusion kLinearBackwardScale;

}  // namespace tandem::fusions
