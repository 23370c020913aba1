// Backward for one set of gradients that are given and asked for.
#pragma once

#include "core/plan.h"
#include "planner/draft.h"
#include "planner/fuse.h"

namespace tandem {

/// What the backward pass applies to each mask's program.
struct BackwardFusions {
  std::vector<const Fusion*> patterns;
  /// Those of them that may be removed.
  std::vector<std::shared_ptr<const Fusion>> user_patterns;
  std::vector<OpGroup> groups;
  std::vector<OperandTable> operands;
  std::vector<std::string> skipped;
};

/// The steps of `plan.backward` that a mask's gradients reach: sums with undefined operands
/// resolved, fused by the backward pass.
std::shared_ptr<const BackwardPlan> slice_backward(const Plan& plan, const BackwardMask& mask);

}  // namespace tandem
