// Fusions of an activation with a bias before it that follows no product, and with a quantizer
// after it; fusions of its backward, or of a bias's backward, with the gradient of the bias and a
// quantizer.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// activation -> quantize, and gated unit -> quantize. The amax of y is measured while y is in the
/// cache; a quantizer with a given scale then also computes the codes.
///
///   z -> act -> y (if demanded) -> codes, dequant_scale, amax
extern const Fusion kActivationQuantize, kGluQuantize;

/// bias -> activation (-> quantize), and bias -> gated unit (-> quantize).
///
///   x -> + bias -> act -> y (if demanded) (-> codes, dequant_scale, amax)
///           |
///           +--> z, written only if demanded: the activation's backward reads it
extern const Fusion kBiasActivation, kBiasGlu;

/// activation.backward -> (bias.grad_bias) (quantize), and the quantize step of the re-emitted y;
/// also for gated units. One pass computes the gradient of z, its column sums, its codes in both
/// directions and the codes of y, with the bits of the separate steps.
///
///   grad_y, z -> act.backward -> grad_z (if demanded) -> (sum over rows -> grad_bias)
///                    |             |
///                    |             +--> (codes, dequant_scale, amax)
///                    +--> y (if demanded) -> (codes, dequant_scale, amax)
extern const Fusion kActivationBackward, kGluBackward;

/// bias.grad_bias and the quantize step of the gradient that it sums.
///
///   grad_y -> sum over rows -> grad_bias
///      |
///      +--> codes, dequant_scale, amax
extern const Fusion kBiasBackwardQuantize;

/// constant_scale.backward (-> bias.grad_bias) -> quantize, with the bits of the separate steps.
///
///   grad_y -> factor * grad_y -> grad_x (if demanded) -> (sum over rows -> grad_bias)
///                                   |
///                                   +--> codes, dequant_scale, amax
extern const Fusion kScaleBackwardQuantize;

}  // namespace tandem::fusions
