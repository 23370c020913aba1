// The three fusion passes: each replaces runs of steps by one step wherever that is legal, and says why where it is not.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "core/fusion.h"
#include "core/plan.h"
#include "planner/description.h"
#include "planner/lower.h"
#include "planner/step_list.h"

namespace tandem {

/// What the planner asks a front for: fusions that users registered.
struct UserFusions {
  std::vector<std::shared_ptr<const Fusion>>
      patterns;  ///< declarative ones of any pass, in order of precedence
  /// Fusions over the list of ops, in TE's form: called once per plan and pass, returns the groups it fused.
  std::function<std::vector<OpGroup>(Pass pass, const Description& description)> groups;
};

/// What a pass may rely on.
struct FusionScope {
  Pass pass = Pass::forward;
  const std::vector<Type>* types = nullptr;
  const std::vector<OperandTable>* operands = nullptr;  ///< by op
  /// Outside the list of steps: outputs, kept values, gradients asked for.
  std::function<bool(Value)> is_demanded = nullptr;
  /// In the backward pass: what is there before the list runs, and what has become of a gradient where others are undefined.
  std::function<bool(Value)> is_there = nullptr;
  std::function<Value(Value)> resolved = nullptr;
  const std::vector<std::string>* skipped = nullptr;
  std::vector<Decision>* decisions = nullptr;
  std::set<std::tuple<std::string, std::string, std::string>> noted = {};  ///< each decision once
};

/// Replaces what the fusions match in `steps`, in order of precedence. Every step's demanded writes stay written.
void fuse(StepList& steps, const std::vector<const Fusion*>& fusions, FusionScope& scope);

/// Replaces the steps of each group's ops by the group's fusion.
void fuse_groups(StepList& steps, const std::vector<OpGroup>& groups, FusionScope& scope);

/// Joint fusions: replaces steps of both directions and adds the private values between them to `types`, which is that of the scope.
void fuse_jointly(StepList& forward, StepList& backward, const std::vector<const Fusion*>& fusions,
                  FusionScope& scope, std::vector<Type>& types);
void fuse_groups_jointly(StepList& forward, StepList& backward, const std::vector<OpGroup>& groups,
                         FusionScope& scope, std::vector<Type>& types);

}  // namespace tandem
