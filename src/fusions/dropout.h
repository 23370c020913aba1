// Dropout of a residual branch together with the sums before and behind it, and its backward with
// the gradient of the bias.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// (bias ->) dropout -> add_extra_input
///
///   x -> + bias -> dropout -> + extra -> y
///
/// One pass; the mask is not written, backward makes it again from the seed.
extern const Fusion kBiasDropoutAdd, kDropoutAdd;

/// dropout.backward (-> bias.grad_bias) (-> quantize)
///
///   grad_y, seed -> dropout.backward -> grad_x (if demanded) -> (sum over rows -> grad_bias)
///                                          |
///                                          +--> (codes, dequant_scale, amax)
///
/// One pass: the gradient of x, which is that of the sum with the bias, is added up, and goes to
/// codes with the bits of one after the other, while rows of it are in the cache. Any bias before a
/// dropout has it, that of a product too.
extern const Fusion kDropoutBackward;

}  // namespace tandem::fusions
