// The three fusion passes: each replaces runs of steps by one step wherever that is legal, and says why where it is not.
#pragma once

#include <functional>
#include <vector>

#include "core/fusion.h"
#include "core/plan.h"
#include "planner/description.h"
#include "planner/lower.h"

namespace tandem {

/// What the planner asks a front for: fusions that users registered.
struct UserFusions {
  std::vector<const Fusion*> patterns;  ///< declarative ones of any pass, in order of precedence
  /// Fusions over the list of ops, in TE's form: called once per plan and pass, returns the groups it fused.
  std::function<std::vector<OpGroup>(Pass pass, const Description& description)> groups;
};

/// What a pass may rely on.
struct FusionScope {
  std::vector<Type>* types = nullptr;
  const std::vector<OperandTable>* operands = nullptr;  ///< by op, for groups
  std::function<bool(Value)>
      is_demanded;  ///< outside the list of steps: outputs, kept values, gradients asked for
  const std::vector<std::string>* skipped = nullptr;
  std::vector<Decision>* decisions = nullptr;
};

/// Replaces what the fusions match in `steps`, in order of precedence. Every step's demanded writes stay written.
void fuse(Steps& steps, Pass pass, const std::vector<const Fusion*>& fusions,
          const FusionScope& scope);

/// Replaces the steps of each group's ops by the group's fusion.
void fuse_groups(Steps& steps, Pass pass, const std::vector<OpGroup>& groups,
                 const FusionScope& scope);

/// Joint fusions: replaces steps of both directions and adds the private values between them.
void fuse_jointly(Steps& forward, Steps& backward, const std::vector<const Fusion*>& fusions,
                  const FusionScope& scope);
void fuse_groups_jointly(Steps& forward, Steps& backward, const std::vector<OpGroup>& groups,
                         const FusionScope& scope);

}  // namespace tandem
