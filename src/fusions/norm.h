// Fusions of a norm with what reads its output, and of its backward with the gradient of the
// residual stream.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// rms_norm -> quantize, layer_norm -> quantize
///
///   x -> norm -> y (if demanded) -> codes, dequant_scale, amax
///
/// The same bits as one after the other; y is not written to memory for its own sake.
extern const Fusion kRmsNormQuantize, kLayerNormQuantize;

/// Backward of a norm at the head of a residual branch: grad_x = norm.backward(grad_y) +
/// grad_residual
///
///   grad_y, x ----> norm.backward --+--> add --> grad_x
///   grad_residual ------------------+
extern const Fusion kRmsNormBackwardAdd, kLayerNormBackwardAdd;

}  // namespace tandem::fusions
