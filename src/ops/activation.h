// Activations and gated linear units: one table row each.
#pragma once

#include <span>
#include <string>

#include "core/op_def.h"

namespace tandem::ops {

/// The rows of tandem/activations.h: y = act(x), element by element, in float32, rounded once; and
/// y = act(a) * b with [a, b] the halves of the last dimension of x, the gate first, or blocks of
/// glu_interleave_size columns by turns. Then the latter times a number per row, the extra input.
///
/// Shapes:  x any -> y like x; for a gated unit x [..., 2 * features] -> y [..., features]; scales
///          like x without its last dimension.
/// Dtypes:  that of autocast, else of x.
/// Throws:  c10::ValueError where a gated unit's last dimension is odd, or no multiple of two
///          blocks; where a beta is not above 0.
/// Source:  Hendrycks and Gimpel 2016, arXiv:1606.08415; Shazeer 2020, arXiv:2002.05202.
std::span<const OpDef> activations();

/// What steps are told, whatever the struct of options that a user fills in.
struct ActivationOptions {
  /// As kernel ops take it (kernel_ops/unit/activation_function.h).
  std::string function;
  bool is_gated = false;
};

}  // namespace tandem::ops
