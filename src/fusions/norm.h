// Fusions of a norm with the reader of its output, and of its backward with the gradient of the
// residual stream.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// rms_norm -> quantize, and layer_norm -> quantize, with the bits of the separate steps. y is
/// written to memory only if it is demanded.
///
///   x -> norm -> y (if demanded) -> codes, dequant_scale, amax
extern const Fusion kRmsNormQuantize, kLayerNormQuantize;

/// add_extra_input -> rms_norm (-> quantize), and add_extra_input -> layer_norm (-> quantize). One
/// pass computes the sum of the residual stream, the norm of the next branch and its codes.
///
///   x, extra -> + -> norm -> y (if demanded) (-> codes, dequant_scale, amax)
///               |
///               +--> sum, written only if demanded
extern const Fusion kAddRmsNorm, kAddLayerNorm, kAddRmsNormQuantize, kAddLayerNormQuantize;

/// norm.backward -> (bias.grad_bias) (quantize), and the quantize step of the re-emitted y. The
/// gradient of x is summed over rows for the bias before the norm; the gradient, and the y that a
/// product of backward reads, are quantized. All this happens while rows are in the cache, with the
/// bits of the separate steps.
///
///   grad_y, x -> norm.backward -> grad_x (if demanded) -> (sum over rows -> grad_bias)
///                    |              |
///                    |              +--> (codes, dequant_scale, amax)
///                    +--> y (if demanded) -> (codes, dequant_scale, amax)
extern const Fusion kRmsNormBackward, kLayerNormBackward;

/// The backward fusions above for a norm at the head of a residual branch: grad_x =
/// norm.backward(grad_y) + grad_residual.
///
///   grad_y, x ----> norm.backward --+--> add --> grad_x (if demanded) -> ...
///   grad_residual ------------------+
extern const Fusion kRmsNormBackwardAdd, kLayerNormBackwardAdd;

}  // namespace tandem::fusions
