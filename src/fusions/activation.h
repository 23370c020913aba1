// An activation with the bias before it, where that stands behind no product, and the quantizer
// behind it; and its backward, or a bias alone, with the gradient of the bias and with the
// quantizer.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// activation -> quantize, and the same for gated units: y is looked at, and with a scale that is
/// given turned to codes, while it is in the cache
///
///   z -> act -> y (if demanded) -> codes, dequant_scale, amax
extern const Fusion kActivationQuantize, kGluQuantize;

/// bias -> activation (-> quantize), and the same for gated units
///
///   x -> + bias -> act -> y (if demanded) (-> codes, dequant_scale, amax)
///           |
///           +--> z, written only if demanded: the activation's backward reads it
extern const Fusion kBiasActivation, kBiasGlu;

/// activation.backward -> (bias.grad_bias) (quantize), and the quantize step of the y that it
/// writes again; the same for gated units: one pass gives the gradient of z, its column sums and
/// its codes, in both directions, and the codes of y, with the bits of one after the other
///
///   grad_y, z -> act.backward -> grad_z (if demanded) -> (sum over rows -> grad_bias)
///                    |             |
///                    |             +--> (codes, dequant_scale, amax)
///                    +--> y (if demanded) -> (codes, dequant_scale, amax)
extern const Fusion kActivationBackward, kGluBackward;

/// bias.grad_bias and quantize of the same gradient
///
///   grad_y -> sum over rows -> grad_bias
///      |
///      +--> codes, dequant_scale, amax
extern const Fusion kBiasBackwardQuantize;

/// constant_scale.backward (-> bias.grad_bias) -> quantize, with the bits of one after the other
///
///   grad_y -> factor * grad_y -> grad_x (if demanded) -> (sum over rows -> grad_bias)
///                                   |
///                                   +--> codes, dequant_scale, amax
extern const Fusion kScaleBackwardQuantize;

}  // namespace tandem::fusions
