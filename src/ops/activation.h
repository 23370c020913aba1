// Activations and gated linear units: one table row each.
#pragma once

#include <span>

#include "core/op_def.h"

namespace tandem::ops {

/// The rows of tandem/activations.h: y = act(x), element by element, in float32, rounded once; and
/// y = act(a) * b with [a, b] the halves of the last dimension of x, the gate first.
///
/// Shapes:  x any -> y like x; for a gated unit x [..., 2 * features] -> y [..., features].
/// Dtypes:  that of autocast, else of x.
/// Throws:  c10::ValueError where a gated unit's last dimension is odd.
/// Source:  Hendrycks and Gimpel 2016, arXiv:1606.08415; Shazeer 2020, arXiv:2002.05202.
std::span<const OpDef> activations();

/// What kernels are told: the name of an activation.
struct ActivationOptions {
  std::string_view function;
};

}  // namespace tandem::ops
