// The rule of all fusions: when a run of steps may become one step.
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

using Members = StepList::Places;  // in pattern order, or ascending

/// What a pass may rely on.
struct FusionScope {
  Pass pass = Pass::forward;
  const std::vector<Type>* types = nullptr;
  /// By op.
  const std::vector<OperandTable>* operands = nullptr;
  /// Outside the list of steps: outputs, kept values, gradients asked for.
  std::function<bool(Value)> is_demanded = nullptr;
  /// In the backward pass: what is there before the list runs, and what has become of a gradient
  /// where others are undefined.
  std::function<bool(Value)> is_there = nullptr;
  std::function<Value(Value)> resolved = nullptr;
  const std::vector<std::string>* skipped = nullptr;
  std::vector<Decision>* decisions = nullptr;
  /// Each decision once.
  std::set<std::tuple<std::string, std::string, std::string>> noted = {};

  bool skips(const std::string& fusion) const;
  /// What has become of a candidate at a place.
  void note(const Fusion& fusion, const std::string& name, const std::string& place,
            const Refusal& refusal);
};

/// How a fused step finds what it stands for.
struct Lookup {
  std::function<Values(const MemberOperand&)> read, write;
  /// The steps of a member in the direction; nullptr where none of them mutates or quantizes.
  std::function<std::vector<const Step*>(uint32_t member)> steps = nullptr;
};
/// The fused step of one direction: its operands, mutations and quantizers are those of the members
/// that `run` names.
Step fused_step(const Fusion& fusion, const FusedRun& run, std::vector<Options> options,
                const Lookup& lookup, const FusionScope& scope);
/// Whether the step is one of an op's that the names, separated by '|', mean; any for no names.
bool is_step_of(const Step& step, std::string_view names, const FusionScope& scope);

/// One replacement under way: members of a list, and what the fused step reads, writes and mutates.
class Replacement {
 public:
  /// `only_gradients`: what members write again of forward does not count; a joint fusion's forward
  /// writes it.
  Replacement(const StepList& steps, Members members, const FusionScope& scope,
              const std::function<bool(Value)>& is_demanded, bool only_gradients = false);

  /// Why the members cannot become `fused`; finds the place of the fused step.
  Refusal check(const Step& fused);
  void drop_undemanded_writes(Step& fused) const;
  /// Puts the fused step in place of the members.
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
