// Groups: runs of ops that a user's function over the list of ops has fused.
#pragma once

#include "planner/fuse.h"

namespace tandem {

/// The group as `explain` prints it: "ops 1 to 3".
std::string place_of(const OpGroup& group);

/// Refuses a group if some step covers both an op of the group and another op: a fusion cannot take
/// half of a step.
Refusal refuse_group(const StepList& steps, const OpGroup& group);

/// The fused step of a group in one direction, and the steps that it replaces: the steps of the
/// group's ops, and the planner's steps that only these read, or that sum or draw what the fused
/// step writes.
///
/// The fusion computes what channels between ops of the group carry: an extra input that an op of
/// the group produces is absent, and so are the contributions of the group's ops to the gradient of
/// an extra output. A write that no member performs, such as a rename of a value from outside, is
/// absent too.
struct GroupStep {
  Step step;
  Members members;
  /// Why the group cannot become one step, if it cannot.
  Refusal refusal;
};
GroupStep step_of_group(const StepList& steps, const OpGroup& group, const FusionScope& scope,
                        const FusedRun& run, bool backward);

}  // namespace tandem
