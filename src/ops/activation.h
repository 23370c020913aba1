// Activations and gated units: one table row each.
#pragma once

#include <span>
#include <string>

#include "core/op_def.h"

namespace tandem::ops {

/// The ops of the rows of tandem/activations.h, computed in float32 and rounded once: y = act(x)
/// element by element; for a gated unit y = act(a) * b. The gate a and b are the halves of the last
/// dimension of x, or alternate in blocks of glu_interleave_size columns. Scaled units multiply y
/// by the extra input `scales`, which has one number for each row.
///
/// Shapes:  x any -> y like x; for a gated unit x [..., 2 * features] -> y [..., features]; scales
///          like x without its last dimension.
/// Dtypes:  y has the dtype of autocast, else of x.
/// Throws:  c10::ValueError where the last dimension of a gated unit is odd or no multiple of two
///          blocks, and where a beta is not above 0.
/// Source:  Hendrycks and Gimpel 2016, arXiv:1606.08415; Shazeer 2020, arXiv:2002.05202.
std::span<const OpDef> activations();

/// The options of the steps, which are the same for every struct of options that a user fills in.
struct ActivationOptions {
  /// The name by which kernel ops know the function (kernel_ops/unit/activation_function.h).
  std::string function;
  bool is_gated = false;
};

}  // namespace tandem::ops
