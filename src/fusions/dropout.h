// Fusions of the dropout of a residual branch with the sums before and after it, and of its
// backward with the gradient of the bias.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// (bias ->) dropout -> add_extra_input, in one pass. The mask is not written; backward recomputes
/// it from the seed.
///
///   x -> + bias -> dropout -> + extra -> y
extern const Fusion kBiasDropoutAdd, kDropoutAdd;

/// dropout.backward (-> bias.grad_bias) (-> quantize), in one pass. The gradient of x is the
/// gradient of the sum with the bias; it is summed over rows and quantized while rows of it are in
/// the cache, with the bits of the separate steps. The bias may also follow a product.
///
///   grad_y, seed -> dropout.backward -> grad_x (if demanded) -> (sum over rows -> grad_bias)
///                                          |
///                                          +--> (codes, dequant_scale, amax)
extern const Fusion kDropoutBackward;

}  // namespace tandem::fusions
