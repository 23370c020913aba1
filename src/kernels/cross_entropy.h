// The cross entropy of rows of logits, and its gradient.
#pragma once

#include <limits>

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

/// What a row's loss and gradient need of its z = logits + bias, capped, besides z itself. Where
/// several shards hold the columns, those of the whole row follow from those of each.
struct LogitsSums {
  /// Of z, NaN passed over; -infinity where there is none.
  double largest = -std::numeric_limits<double>::infinity();
  /// Of exp(z - largest), of exp(z) where largest is -infinity.
  double exponentials = 0;
  /// Of w z; 0 where nothing is smoothed.
  double weighted = 0;
  /// z and w of the target; 0 where another shard has it.
  double target = 0, target_weight = 0;
  /// The first column of the largest z, 0 where all are NaN; not looked for where nobody asks.
  double best = 0;
};

/// Columns that are some of all classes.
struct ClassShard {
  /// Of all shards: their classes, the sum of their w, and the sums of each row.
  double classes, all_weights;
  const LogitsSums* sums;
};

/// z = logits + bias, capped; p = softmax(z); w = class_weight or ones; t = targets[r], e =
/// label_smoothing, C = the number of columns:
///   losses[r] = (1 - e) w_t (-log p_t) + e / C sum_c w_c (-log p_c) + z_loss logsumexp(z)^2
///   gradients[r, c] = factors[r] d losses[r] / d logits[r, c]
///   best[r] = the first column of the largest z, NaN passed over
///
/// Shapes:   logits, gradients [rows, cols]; bias, class_weight [cols]; targets, factors, losses,
///           best [rows]. A target below 0: the row has loss and gradient 0. One of at least
///           cols: another shard has the class.
/// Optional: bias, class_weight, factors (ones), losses, gradients, best, shard (the columns are
///           all classes).
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
  const ClassShard* shard = nullptr;
};
void cross_entropy(const CrossEntropy& rows);

/// The sums of each row [rows], of these columns alone; reads neither factors nor shard, and writes
/// nothing else.
void logits_sums(const CrossEntropy& rows, LogitsSums* sums);
/// The sums of a row whose columns are those of one shard and of the next, which begins at column
/// `first`.
LogitsSums joined(const LogitsSums& one, const LogitsSums& next, double first);

}  // namespace tandem::kernels::cpu
