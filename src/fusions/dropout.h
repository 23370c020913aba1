// Dropout of a residual branch together with the sums before and behind it.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// (bias ->) dropout -> add_extra_input
///
///   x -> + bias -> dropout -> + extra -> y
///
/// One pass; the mask is not written, backward makes it again from the seed.
extern const Fusion kBiasDropoutAdd, kDropoutAdd;

}  // namespace tandem::fusions
