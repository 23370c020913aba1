// The cross entropy of rows of logits, and its gradient.
#pragma once

#include "kernels/views.h"

namespace tandem::kernels::cpu {

struct CrossEntropyOptions {
  /// The share of a target that is spread over all classes.
  double label_smoothing = 0;
  /// z = cap tanh(logits / cap); 0: z = logits.
  double soft_cap = 0;
  /// The factor of logsumexp(z)^2 in a loss.
  double z_loss = 0;
};

/// z = logits + bias, capped; p = softmax(z); w = class_weight or ones; t = targets[r], e =
/// label_smoothing, C = the number of columns:
///   losses[r] = (1 - e) w_t (-log p_t) + e / C sum_c w_c (-log p_c) + z_loss logsumexp(z)^2
///   gradients[r, c] = factors[r] d losses[r] / d logits[r, c]
///   best[r] = the first column of the largest z, NaN passed over
///
/// Shapes:   logits, gradients [rows, cols]; bias, class_weight [cols]; targets, factors, losses,
///           best [rows]. A target below 0: the row has loss and gradient 0.
/// Optional: bias, class_weight, factors (ones), losses, gradients, best.
/// Memory:   gradients may be the logits.
/// Dtypes:   any Element; arithmetic in float32, sums over a row in float64.
/// Error:    of a loss 2^-20 (1 + |z| at its largest), of a gradient 2^-20 |factor| times the
///           loss's weights before its one rounding (test CrossEntropy.MatchesFloat64).
/// Limits:   NaN or +infinity among z makes loss and gradients of the row NaN; -infinity has p = 0.
/// Bytes:    reads a row once from memory, writes its gradient once.
struct CrossEntropy {
  ConstRows logits;
  ConstVector bias = {};
  const int64_t* targets;
  const float* class_weight = nullptr;
  const float* factors = nullptr;
  CrossEntropyOptions options = {};
  float* losses = nullptr;
  Rows gradients = {};
  int64_t* best = nullptr;
};
void cross_entropy(const CrossEntropy& rows);

}  // namespace tandem::kernels::cpu
