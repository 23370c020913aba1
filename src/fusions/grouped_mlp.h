// Fusions of experts: a product of groups of rows, a unit, and another product of the same groups.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// grouped_linear -> activation, gated unit or scaled one -> grouped_linear, one group after the
/// other: what lies between the products is made for the rows of one group, and is used while it is
/// in the cache.
///
///   x_g, weight_g -> product -> + bias_g -> z_g -> unit -> h_g, weight'_g -> product -> y_g
///                                            |
///                                            +--> z, written only if demanded
///
/// With a backward both directions are one fusion, which keeps z and nothing else of its own:
///
///   grad_y_g, weight'_g -> product -> unit.backward(z_g) -> grad_z_g, h_g
///   grad_y_g^T h_g, grad_z_g weight_g, grad_z_g^T x_g, sums over rows -> gradients
///
/// Gradients of weights go where the products would put them: to the caller, into main_grad, or,
/// with what they are computed from, to be computed later. Under a recipe each product quantizes
/// the rows of a group as it would by itself.
///
/// Both products need the same numbers of rows in each group; where they turn out to differ, the
/// step computes all groups of one product before the next.
extern const Fusion kGroupedMlpActivation, kGroupedMlpGlu, kGroupedMlpScaledActivation,
    kGroupedMlpScaledGlu;
extern const Fusion kGroupedMlpActivationForward, kGroupedMlpGluForward,
    kGroupedMlpScaledActivationForward, kGroupedMlpScaledGluForward;

}  // namespace tandem::fusions
