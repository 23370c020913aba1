// The sizes of a plan's values and the operations of its steps, from shapes alone. A memory budget
// weighs choices by them.
#pragma once

#include <vector>

#include "planner/draft.h"
#include "planner/key.h"

namespace tandem {

/// Sizes and operations per row of the main input, counting only what grows with its rows: seeds,
/// scales of whole tensors and values of parameters alone count as 0. Under a key with all sizes
/// (SizesInKey::all), everything counts, divided by the rows.
struct PerRow {
  /// By value. What user code saves is unknown before it runs and counts as 0; its results are
  /// taken to be as wide as its main operand.
  std::vector<double> bytes;
  /// By forward step: the operations of products.
  std::vector<double> flops;
};

/// Runs the steps of `draft.forward` on tensors without memory, with the sizes in `key`. Throws
/// c10::NotImplementedError if a step cannot run without data.
PerRow measure(const Description& description, const PlanKey& key, const Draft& draft);

}  // namespace tandem
