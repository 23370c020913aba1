// The cross entropy of rows of logits, and its gradient.
#pragma once

#include <limits>

#include "kernels/views.h"

namespace tandem::kernels::cpu {

struct CrossEntropyOptions {
  /// The share of a target that is spread over all classes.
  double label_smoothing = 0;
  /// z = soft_cap tanh(logits / soft_cap); 0: z = logits.
  double soft_cap = 0;
  /// The factor of logsumexp(z)^2 in a loss.
  double z_loss = 0;
};

/// The sums over a row of z = logits + bias, after the cap, from which the row's loss and gradient
/// follow. Where several shards hold the columns, the sums of the row follow from those of the
/// shards.
struct LogitsSums {
  /// The largest z, NaN skipped; -infinity where there is none.
  double largest = -std::numeric_limits<double>::infinity();
  /// The sum of exp(z - largest), or of exp(z) where largest is -infinity.
  double exponentials = 0;
  /// The sum of w z; 0 without label smoothing.
  double weighted = 0;
  /// z and w of the target; 0 where another shard has the target.
  double target = 0, target_weight = 0;
  /// The first column of the largest z, 0 where all are NaN; computed only where `best` is
  /// requested.
  double best = 0;
};

/// A shard, whose columns are a part of the classes.
struct ClassShard {
  /// Totals of all shards: the number of classes, the sum of w, and the sums of each row.
  double classes, all_weights;
  const LogitsSums* sums;
};

/// z = logits + bias, capped; p = softmax(z); w = class_weight or ones; t = targets[r], e =
/// label_smoothing, C = the number of columns:
///   losses[r] = (1 - e) w_t (-log p_t) + e / C sum_c w_c (-log p_c) + z_loss logsumexp(z)^2
///   gradients[r, c] = factors[r] d losses[r] / d logits[r, c]
///   best[r] = the first column of the largest z, NaN skipped
///
/// Shapes:   logits, gradients [rows, cols]; bias, class_weight [cols]; targets, factors, losses,
///          best [rows]. A row with a target below 0 has loss and gradient 0. A target of at least
///          cols belongs to another shard.
/// Optional: bias, class_weight, factors (ones), losses, gradients, best, shard (the columns are
///          all classes).
/// Memory:   gradients may be the logits.
/// Dtypes:   any Element; arithmetic in float32, sums over a row in float64.
/// Error:    of a loss 2^-20 (1 + max |z|), of a gradient 2^-20 |factor| times the loss's weights
///          before its one rounding (test CrossEntropy.MatchesFloat64).
/// Limits:   a NaN or +infinity in z makes loss and gradients of the row NaN; -infinity has p = 0.
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

/// Computes the sums of each row [rows] over the columns of this shard. Reads neither factors nor
/// shard, and writes nothing but `sums`.
void logits_sums(const CrossEntropy& rows, LogitsSums* sums);
/// Returns the sums of a row over the columns of two shards; the columns of `next` begin at
/// `first`.
LogitsSums joined(const LogitsSums& one, const LogitsSums& next, double first);

}  // namespace tandem::kernels::cpu
