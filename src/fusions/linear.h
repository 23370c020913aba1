// Fusions of a product with what follows it, and of its gradients with what comes before and after
// them: at most one pass over memory beside the product.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// linear (-> bias) (-> constant_scale) (-> add_extra_input)
///
///   x, weight -> product -> + bias -> * factor -> + extra -> y
///
/// Without a bias the product itself multiplies and adds. An extra input that is written in place
/// is what it adds to.
extern const Fusion kLinearSum;

/// linear (-> bias) -> activation (-> quantize behind a bias), and the same for gated units.
/// Without a bias the product is z, and the unit and its quantizer are a fusion of their own.
///
///   x, weight -> product (-> + bias) -> act -> y (if demanded) (-> codes, dequant_scale, amax)
///                                    |
///                                    +--> z, written only if demanded, into the memory of the
///                                         product: the activation's backward reads it
extern const Fusion kLinearActivation, kLinearGlu;

/// Backward of a linear that reads the residual stream: grad_x = grad_y W + grad_residual
///
///   grad_y, weight -> product -> + grad_residual -> grad_x
extern const Fusion kLinearBackwardAdd;

/// Backward of linear -> constant_scale: each product is multiplied by the factor, the gradient
/// between the two is not written.
///
///   grad_y, weight -> factor * product -> grad_x
///   grad_y, x      -> factor * product -> grad_weight
extern const Fusion kLinearBackwardScale;

}  // namespace tandem::fusions
