// The three fusion passes: each replaces runs of steps by one step wherever that is legal, and says
// why where it is not.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "planner/description.h"
#include "planner/replacement.h"

namespace tandem {

/// What the planner asks a front for: fusions that users registered.
struct UserFusions {
  /// Declarative ones of any pass, in order of precedence.
  std::vector<std::shared_ptr<const Fusion>> patterns;
  /// Fusions over the list of ops, in TE's form: called once per plan and pass, returns the groups
  /// it fused. `joint`: those of both directions, which the lists of the other passes contain.
  std::function<std::vector<OpGroup>(Pass pass, const Description& description,
                                     const std::vector<OpGroup>& joint)>
      groups;
};

/// What users' functions over the list of ops have fused, by pass.
struct UserGroups {
  std::vector<OpGroup> joint, forward, backward;
};

/// The fusions of a pass: those of users first, then the library's.
std::vector<const Fusion*> fusions_of(Pass pass, const Description& description,
                                      const UserFusions& user);
/// Those that no rule of their own refused; the others are noted in `scope`. Throws c10::ValueError
/// where the groups that a user's function returns do not cover the ops once and in order.
std::vector<OpGroup> groups_of(Pass pass, const Description& description, const UserFusions& user,
                               FusionScope& scope, const std::vector<OpGroup>& joint = {});

/// Replaces what the fusions match in `steps`: those of users in their order, then of the library's
/// what has the most members, in the order of the table. Every step's demanded writes stay written.
void fuse(StepList& steps, const std::vector<const Fusion*>& fusions, FusionScope& scope);

/// Replaces the steps of each group's ops by the group's fusion.
void fuse_groups(StepList& steps, const std::vector<OpGroup>& groups, FusionScope& scope);

/// Joint fusions: replaces steps of both directions and adds the private values between them to the
/// draft. The library's leave ops alone that a user's fusion of one direction takes later.
void fuse_jointly(const Description& description, const UserFusions& user, const UserGroups& groups,
                  FusionScope& scope, Draft& draft);

}  // namespace tandem
