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

/// add_extra_input -> rms_norm (-> quantize), and the same for layer_norm: the sum of the residual
/// stream, the norm of the next branch and its quantizer, in one pass
///
///   x, extra -> + -> norm -> y (if demanded) (-> codes, dequant_scale, amax)
///               |
///               +--> sum, written only if demanded
extern const Fusion kAddRmsNorm, kAddLayerNorm, kAddRmsNormQuantize, kAddLayerNormQuantize;

/// norm.backward -> (bias.grad_bias) (quantize), and the quantize step of the y that it writes
/// again: the gradient of a norm, with the sums for the bias before it, and what the product behind
/// it multiplies once more go to codes while rows of them are in the cache, with the bits of one
/// after the other
///
///   grad_y, x -> norm.backward -> grad_x (if demanded) -> (sum over rows -> grad_bias)
///                    |              |
///                    |              +--> (codes, dequant_scale, amax)
///                    +--> y (if demanded) -> (codes, dequant_scale, amax)
extern const Fusion kRmsNormBackward, kLayerNormBackward;

/// The same of a norm at the head of a residual branch: grad_x = norm.backward(grad_y) +
/// grad_residual
///
///   grad_y, x ----> norm.backward --+--> add --> grad_x (if demanded) -> ...
///   grad_residual ------------------+
extern const Fusion kRmsNormBackwardAdd, kLayerNormBackwardAdd;

}  // namespace tandem::fusions
