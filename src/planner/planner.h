// The planner: from a description and a key to a plan, and from a plan and a mask to a backward
// program.
#pragma once

#include <memory>
#include <vector>

#include "core/plan.h"
#include "planner/description.h"
#include "planner/fuse.h"
#include "planner/key.h"

namespace tandem {

/// Plans forward and backward: lowers, puts quantize points, runs the joint and the forward pass,
/// derives what is kept.
///
/// Throws: c10::ValueError where the tensors do not fit the description, or where a required fusion
///         cannot be made, with the reason.
std::unique_ptr<const Plan> make_plan(const Description& description, const PlanKey& key,
                                      const UserFusions& user_fusions);

/// A weight whose codes the plan for a key caches, by the places of what it lies in among the
/// parameters.
struct CachedParams {
  std::vector<size_t> params;
  const Quantizer* quantizer;
  GroupMask parts;
};
/// Those of make_plan's plan, in its order. A memory budget does not change them, so no size is
/// asked for.
std::vector<CachedParams> cached_params(const Description& description, const PlanKey& key);

/// The backward program for a mask: sliced, then fused by the backward pass; made once per mask
/// while the plan has it.
std::shared_ptr<const BackwardPlan> backward_plan(const Plan& plan, const BackwardMask& mask);

/// The backward program where every gradient is given and asked for: what `explain` shows.
std::shared_ptr<const BackwardPlan> full_backward(const Plan& plan);

}  // namespace tandem
