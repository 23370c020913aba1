// Backward for one set of given and requested gradients.
#pragma once

#include "core/plan.h"
#include "planner/draft.h"
#include "planner/fuse.h"

namespace tandem {

/// What the backward pass needs for the program of each mask.
struct BackwardFusions {
  std::vector<const Fusion*> patterns;
  /// Owners of the patterns that users may unregister.
  std::vector<std::shared_ptr<const Fusion>> user_patterns;
  std::vector<OpGroup> groups;
  std::vector<OperandTable> operands;
  std::vector<std::string> skipped;
};

/// The steps of `plan.backward` that the mask's gradients need: sums with undefined operands are
/// resolved, then the backward pass fuses.
std::shared_ptr<const BackwardPlan> slice_backward(const Plan& plan, const BackwardMask& mask);

}  // namespace tandem
