// How large the values of a plan are and how much its steps compute, from shapes alone: what a
// memory budget is weighed by.
#pragma once

#include <vector>

#include "planner/draft.h"
#include "planner/key.h"

namespace tandem {

/// Per row of the main input, of what grows with its rows: a seed, a scale of a tensor, and what is
/// made of parameters alone take nothing. Under a key with all sizes, what a row has of everything.
struct PerRow {
  /// By value. What user code saves is known to nobody before it runs, and takes nothing; its
  /// results are taken to be as wide as its main operand.
  std::vector<double> bytes;
  /// By step of forward: those of products.
  std::vector<double> flops;
};

/// Runs the steps of `draft.forward` on tensors without memory, of the sizes in `key`. Throws
/// c10::NotImplementedError where a step cannot run so.
PerRow measure(const Description& description, const PlanKey& key, const Draft& draft);

}  // namespace tandem
