// Fusions of a product with what follows it: after the product there is one pass over memory.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// linear -> bias
///
///   x, weight -> product -> + bias -> y
extern const Fusion kLinearBias;

/// linear -> bias -> add_extra_input
///
///   x, weight -> product -> + bias -> + extra -> y
extern const Fusion kLinearBiasAdd;

/// linear -> bias -> activation
///
///   x, weight -> product -> + bias -> act -> y
///                              |
///                              +--> z, written only if demanded: the activation's backward reads
///                              it
extern const Fusion kLinearBiasActivation;

/// linear -> bias -> gated linear unit, likewise
extern const Fusion kLinearBiasGlu;

}  // namespace tandem::fusions
