// Groups: runs of ops that a user's function over the list of ops has fused.
#pragma once

#include "planner/fuse.h"

namespace tandem {

/// As `explain` prints it: "ops 1 to 3".
std::string place_of(const OpGroup& group);

/// Why not: a step covers ops of the group and others, then a fusion of this group could not have
/// the ops as a whole.
Refusal refuse_group(const StepList& steps, const OpGroup& group);

/// The fused step of a group in one direction, and the steps that it replaces: those of the group's
/// ops, and the planner's own that only they read, or that sum up or draw what it writes. What a
/// channel
/// brings from one op of the group to another is the fusion's own business: an extra input that an
/// op of the group makes is absent, and so is what ops of the group contribute to the gradient of
/// an extra output. What the fused step writes in name only, as a rename of what comes from
/// outside, is absent as well.
struct GroupStep {
  Step step;
  Members members;
  /// Why there is none.
  Refusal refusal;
};
GroupStep step_of_group(const StepList& steps, const OpGroup& group, const FusionScope& scope,
                        const FusedRun& run, bool backward);

}  // namespace tandem
