// An activation together with the bias before it, where that stands behind no product, and its
// backward with the gradient of the bias.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// bias -> activation, and the same for gated units
///
///   x -> + bias -> act -> y
///           |
///           +--> z, written only if demanded: the activation's backward reads it
extern const Fusion kBiasActivation, kBiasGlu;

/// activation.backward -> bias.grad_bias, and the same for gated units: one pass gives the gradient
/// of z and its column sums
///
///   grad_y, z -> act.backward -> grad_z -> sum over rows -> grad_bias
///                    |
///                    +--> y, written again if a later product reads it
extern const Fusion kActivationBackwardBias, kGluBackwardBias;

}  // namespace tandem::fusions
