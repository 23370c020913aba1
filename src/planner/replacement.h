// The rule of all fusions: when several steps may become one.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/fusion.h"
#include "core/plan.h"
#include "planner/draft.h"
#include "planner/step_list.h"

namespace tandem {

using Members = StepList::Places;  // positions, in pattern order or ascending

/// The facts about a list of steps that a pass uses.
struct FusionScope {
  Pass pass = Pass::forward;
  const std::vector<Type>* types = nullptr;
  /// By op of the description.
  const std::vector<OperandTable>* operands = nullptr;
  /// Whether a value is demanded outside the list of steps: outputs, kept values, requested
  /// gradients.
  std::function<bool(Value)> is_demanded = nullptr;
  /// Of the backward pass only. `is_there`: whether a value exists before the list runs.
  /// `resolved`: the value that a gradient is replaced by if operands of its sum are undefined.
  std::function<bool(Value)> is_there = nullptr;
  std::function<Value(Value)> resolved = nullptr;
  const std::vector<std::string>* skipped = nullptr;
  std::vector<Decision>* decisions = nullptr;
  /// Decisions that were noted: each is noted once.
  std::set<std::tuple<std::string, std::string, std::string>> noted = {};

  bool skips(const std::string& fusion) const;
  /// Notes that a candidate was made (no refusal) or refused.
  void note(const Fusion& fusion, const std::string& name, const std::string& place,
            const Refusal& refusal);
};

/// Finds the values behind a fusion's names.
struct Lookup {
  std::function<Values(const MemberOperand&)> read, write;
  /// The steps of a member in this direction; nullptr if no member mutates or quantizes.
  std::function<std::vector<const Step*>(uint32_t member)> steps = nullptr;
};
/// The fused step of one direction. `run` names the members that its operands, mutations and
/// quantizers come from.
Step fused_step(const Fusion& fusion, const FusedRun& run, std::vector<Options> options,
                const Lookup& lookup, const FusionScope& scope);
/// Whether `step` is a step of an op with one of these names, separated by '|'. Always true if
/// `names` is empty.
bool is_step_of(const Step& step, std::string_view names, const FusionScope& scope);

/// A replacement of members of a list by a fused step.
class Replacement {
 public:
  /// `only_gradients`: ignore what members re-emit, because the forward half of a joint fusion
  /// writes it.
  Replacement(const StepList& steps, Members members, const FusionScope& scope,
              const std::function<bool(Value)>& is_demanded, bool only_gradients = false);

  /// Replaces the members by `fused`, without the writes that nobody demands, unless that is
  /// refused.
  Refusal replace(StepList& steps, Step fused);

  // The same in three parts, for a step of which another part may be refused:

  /// Why the members cannot become `fused`. Also finds the position of the fused step.
  Refusal check(const Step& fused);
  void drop_undemanded_writes(Step& fused) const;
  /// Replaces the members by the fused step.
  void apply(StepList& steps, Step fused) const;

 private:
  bool is_member(size_t place) const;
  const std::string& name(Value value) const { return types_[index_of(value)].name; }
  bool counts(const Step& member, Value value) const;
  bool is_written_by_member(Value value) const;
  bool is_demanded_outside(Value value) const;
  Refusal check_demanded(const Step& fused) const;
  Refusal check_reads(const Step& fused) const;
  Refusal check_writes(const Step& fused) const;
  Refusal check_mutations(const Step& fused) const;
  bool can_stand_at(size_t place, const Step& fused) const;

  const StepList& steps_;
  Members members_;
  const std::vector<Type>& types_;
  const std::function<bool(Value)>& is_demanded_;
  bool only_gradients_;
  size_t place_ = 0;
};

}  // namespace tandem
