// Backward of an activation together with the gradient of the bias before it.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// activation.backward -> bias.grad_bias, and the same for gated units: one pass gives the gradient
/// of z and its column sums
///
///   grad_y, z -> act.backward -> grad_z -> sum over rows -> grad_bias
///                    |
///                    +--> y, written again if a later product reads it
extern const Fusion kActivationBackwardBias, kGluBackwardBias;

}  // namespace tandem::fusions
