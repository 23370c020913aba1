// Fusions of experts: a product of groups of rows, a unit, and a second product of these groups.
#pragma once

#include "core/fusion.h"

namespace tandem::fusions {

/// grouped_linear -> activation, gated unit or scaled unit -> grouped_linear, one group after the
/// other. The values between the products are computed for the rows of one group, and read while
/// they are in the cache.
///
///   x_g, weight_g -> product -> + bias_g -> z_g -> unit -> h_g, weight'_g -> product -> y_g
///                                            |
///                                            +--> z, written only if demanded
///
/// The joint fusions replace both directions. Of the values between the products they keep only z:
///
///   grad_y_g, weight'_g -> product -> unit.backward(z_g) -> grad_z_g, h_g
///   grad_y_g^T h_g, grad_z_g weight_g, grad_z_g^T x_g, sums over rows -> gradients
///
/// As without the fusion, gradients of weights are returned, added to main_grad, or delayed, and
/// under a recipe each product quantizes the rows of each group separately.
///
/// Both products need the same rows in each group. Where their splits differ, the step computes all
/// groups of one product before the next product.
extern const Fusion kGroupedMlpActivation, kGroupedMlpGlu, kGroupedMlpScaledActivation,
    kGroupedMlpScaledGlu;
extern const Fusion kGroupedMlpActivationForward, kGroupedMlpGluForward,
    kGroupedMlpScaledActivationForward, kGroupedMlpScaledGluForward;

}  // namespace tandem::fusions
