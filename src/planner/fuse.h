// The three fusion passes: each replaces runs of steps by one step where that is legal, and notes
// the reason where it is not.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "planner/description.h"
#include "planner/replacement.h"

namespace tandem {

/// The fusions that users registered, as a front passes them to the planner.
struct UserFusions {
  /// Fusions with a pattern, of any pass, in order of precedence.
  std::vector<std::shared_ptr<const Fusion>> patterns;
  /// Fusions over the list of ops, as TransformerEngine has them. Called once per plan and pass;
  /// returns the fused groups. `joint`: the groups of the joint pass, which the lists of the other
  /// passes contain.
  std::function<std::vector<OpGroup>(Pass pass, const Description& description,
                                     const std::vector<OpGroup>& joint)>
      groups;
};

/// The groups that users' functions over the list of ops have fused, by pass.
struct UserGroups {
  std::vector<OpGroup> joint, forward, backward;
};

/// The fusions of a pass: users' fusions first, then the library's.
std::vector<const Fusion*> fusions_of(Pass pass, const Description& description,
                                      const UserFusions& user);
/// The groups of a pass whose own rule did not refuse; refusals are noted in `scope`. Throws
/// c10::ValueError if the groups that a user's function returns do not cover all ops once and in
/// order.
std::vector<OpGroup> groups_of(Pass pass, const Description& description, const UserFusions& user,
                               FusionScope& scope, const std::vector<OpGroup>& joint = {});

/// Replaces the steps that fusions match. Users' fusions apply first, in their order; of the
/// library's, the one with the most members, then the first in the table. Every demanded write
/// stays written.
void fuse(StepList& steps, const std::vector<const Fusion*>& fusions, FusionScope& scope);

/// Replaces the steps of each group's ops by the group's fusion.
void fuse_groups(StepList& steps, const std::vector<OpGroup>& groups, FusionScope& scope);

/// Joint fusions: replaces steps of both directions and adds the private values between them to the
/// draft. A joint fusion of the library leaves an op alone if a user's fusion of one direction
/// takes it.
void fuse_jointly(const Description& description, const UserFusions& user, const UserGroups& groups,
                  FusionScope& scope, Draft& draft);

}  // namespace tandem
