// Groups: runs of ops that a user's function over the list of ops has fused.
#pragma once

#include "planner/fuse.h"

namespace tandem {

/// As `explain` prints it: "ops 1 to 3".
std::string place_of(const OpGroup& group);

/// Why not: a step covers ops of the group and others, then a fusion of this group could not have
/// the ops as a whole; or an op has a list of operands, and the fusion is written in Python.
Refusal refuse_group(const StepList& steps, const OpGroup& group, const FusionScope& scope);

/// Steps that belong to the group's ops, with the planner's own steps whose results only they read.
Members members_of(const StepList& steps, const OpGroup& group, const FusionScope& scope);

/// What the group's fusion means by the names that it reads and writes in one direction.
Lookup reads_of(const OpGroup& group, const FusionScope& scope, bool backward);
Lookup writes_of(const OpGroup& group, const FusionScope& scope, bool backward);

}  // namespace tandem
