// The planner: makes plans from descriptions and keys, and backward programs from plans and masks.
#pragma once

#include <memory>
#include <vector>

#include "core/plan.h"
#include "planner/description.h"
#include "planner/fuse.h"
#include "planner/key.h"

namespace tandem {

/// Plans forward and backward: lowers the ops, inserts quantize points, runs the joint and the
/// forward pass, and derives what is kept.
///
/// Throws: c10::ValueError if the tensors do not fit the description, or if a required fusion
///         cannot be made, with the reason.
std::unique_ptr<const Plan> make_plan(const Description& description, const PlanKey& key,
                                      const UserFusions& user_fusions);

/// A weight whose codes are cached: the parameters it consists of, by index.
struct CachedParams {
  std::vector<size_t> params;
  const Quantizer* quantizer;
  GroupMask parts;
};
/// The cached weights of make_plan's plan, in the plan's order. They do not depend on a memory
/// budget, so `key` needs no sizes.
std::vector<CachedParams> cached_params(const Description& description, const PlanKey& key);

/// The backward program for a mask: sliced, then fused by the backward pass. The plan caches it.
std::shared_ptr<const BackwardPlan> backward_plan(const Plan& plan, const BackwardMask& mask);

/// The mask in which every gradient is given and requested, and its backward program, which
/// `explain` shows.
BackwardMask full_mask(const Plan& plan);
std::shared_ptr<const BackwardPlan> full_backward(const Plan& plan);

/// The decisions on fusions in the plan, and in the backward program of a mask if the plan needs
/// backward.
std::vector<Decision> decisions_of(const Plan& plan, const BackwardMask& mask);

}  // namespace tandem
