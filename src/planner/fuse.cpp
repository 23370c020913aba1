#include "planner/fuse.h"

#include <algorithm>
#include <map>

#include "fusions/table.h"
#include "planner/groups.h"
#include "planner/liveness.h"
#include "planner/match.h"
#include "planner/value_set.h"

namespace tandem {

std::vector<const Fusion*> fusions_of(Pass pass, const Description& description,
                                      const UserFusions& user) {
  std::vector<const Fusion*> fusions;
  if (!description.fuse) return fusions;
  for (const auto& fusion : user.patterns)
    if (fusion->pass == pass) fusions.push_back(fusion.get());
  for (const Fusion& fusion : built_in_fusions(pass)) fusions.push_back(&fusion);
  return fusions;
}

namespace {

/// Finds the values behind operand names in matched steps of a list.
Lookup lookup_in(const Match& match) {
  return {[&match](const MemberOperand& operand) { return match.all(operand); },
          [&match](const MemberOperand& operand) { return match.all_written(operand); },
          [&match](uint32_t member) {
            return std::vector<const Step*>(match.has(member) ? 1 : 0, match.steps[member]);
          }};
}

/// Replaces the members by one step if that is legal; notes the decision.
void fuse_members(StepList& steps, const Members& members, const Fusion& fusion,
                  FusionScope& scope) {
  const Candidate candidate(steps, members, fusion);
  if (scope.skips(candidate.name)) return;
  const Match match{candidate.steps, *scope.types};
  Step step = fused_step(fusion, fusion.run, candidate.options, lookup_in(match), scope);
  step.name = candidate.name;
  Refusal refusal = fusion.refuse != nullptr ? fusion.refuse(match) : std::nullopt;
  if (!refusal) refusal = check_names(fusion, match, scope);
  if (!refusal)
    refusal = Replacement(steps, members, scope, scope.is_demanded).replace(steps, std::move(step));
  scope.note(fusion, candidate.name, candidate.place, refusal);
}

}  // namespace

void fuse(StepList& steps, const std::vector<const Fusion*>& fusions, FusionScope& scope) {
  struct Search {
    const Fusion* fusion;
    Form form;
    size_t length;  // npos for a user's fusion: these come first
  };
  std::vector<Search> searches;
  for (const Fusion* fusion : fusions) {
    if (fusion->pass != scope.pass || scope.skips(fusion->name)) continue;
    const bool yields = is_built_in(*fusion);
    for (const Form& form : forms_of(*fusion))
      searches.push_back(
          {fusion, form, yields ? static_cast<size_t>(std::ranges::count(form, true)) : npos});
  }
  std::ranges::stable_sort(searches, std::greater(), &Search::length);
  for (const auto& [fusion, form, length] : searches)
    for (size_t start = 0; start < steps.size(); ++start)
      if (const Members members = find_pattern(steps, start, *fusion, form); !members.empty())
        fuse_members(steps, members, *fusion, scope);
}

namespace {

/// One half of a joint fusion, and the steps that it replaces.
struct Half {
  Step step;
  const Members& members;
};

/// Replaces forward and backward members by the two halves of a joint fusion and adds the private
/// values, or returns a refusal.
Refusal join(StepList& forward, StepList& backward, const Fusion& fusion, Half forward_part,
             Half backward_part, const FusionScope& scope, std::vector<Type>& types) {
  Step &ahead = forward_part.step, &back = backward_part.step;
  const Members &forward_members = forward_part.members, &backward_members = backward_part.members;
  if (backward_members.empty()) return "these ops have no backward here";
  // What only the replaced backward steps read need not be written any more.
  const std::function<bool(Value)> is_demanded = [&](Value value) {
    if (scope.is_demanded(value) || reads(back, value)) return true;
    const auto readers = backward.readers(value);
    return std::any_of(readers.begin(), readers.end(), [&](size_t s) {
      return std::find(backward_members.begin(), backward_members.end(), s) ==
             backward_members.end();
    });
  };
  Replacement forward_half(forward, forward_members, scope, is_demanded),
      backward_half(backward, backward_members, scope, scope.is_demanded, /*only_gradients=*/true);
  if (auto refusal = forward_half.check(ahead)) return "forward: " + *refusal;
  if (auto refusal = backward_half.check(back)) return "backward: " + *refusal;
  forward_half.drop_undemanded_writes(ahead);
  backward_half.drop_undemanded_writes(back);
  const auto read = std::find_if(ahead.reads.begin(), ahead.reads.end(), exists);
  const at::ScalarType dtype =
      read == ahead.reads.end() ? at::kFloat : types[index_of(*read)].dtype;
  for (const auto& name : fusion.keeps) {
    const Format format = fusion.runs_user_code ? Format::opaque : Format::plain;
    types.push_back(
        {dtype, format, Origin::result, Value::none, fusion.name + "." + std::string(name)});
    const Value value = static_cast<Value>(types.size() - 1);
    ahead.write_names.push_back(name);
    ahead.writes.push_back(value);
    back.read_names.push_back(name);
    back.reads.push_back(value);
  }
  forward_half.apply(forward, std::move(ahead));
  backward_half.apply(backward, std::move(back));
  return std::nullopt;
}

/// The backward steps of a matched op.
std::vector<const Step*> backward_of(const Match& match, const StepList& backward,
                                     uint32_t member) {
  std::vector<const Step*> steps;
  const Step& matched = *match.steps[member];
  if (!matched.covers.empty())
    for (const size_t s : backward.of_op(matched.covers[0].op)) steps.push_back(&backward[s]);
  return steps;
}

/// Finds the values behind operand names in the backward half.
Lookup joint_lookup(const Match& match, const StepList& backward, const FusionScope& scope) {
  using Find = Values (OperandTable::*)(std::string_view, bool) const;
  const auto find = [&match, &scope](const MemberOperand& operand, Find in_table) -> Values {
    const Step& step = *match.steps[operand.member];
    if (step.covers.empty()) return {Value::none};
    return ((*scope.operands)[step.covers[0].op].*in_table)(operand.name, true);
  };
  const auto read = [&match, &backward, &scope, find](const MemberOperand& operand) -> Values {
    Values as_read;
    if (!operand.step.empty())
      for (const Step* step : backward_of(match, backward, operand.member)) {
        if (!as_read.empty() || !is_step_of(*step, operand.step, scope)) continue;
        for (size_t i = 0; i < step->reads.size(); ++i)
          if (step->read_names[i] == operand.name) as_read.push_back(step->reads[i]);
      }
    return as_read.empty() ? find(operand, &OperandTable::read) : as_read;
  };
  return {
      read,
      [find](const MemberOperand& operand) { return find(operand, &OperandTable::written); },
      [&match, &backward](uint32_t member) { return backward_of(match, backward, member); },
  };
}

/// The ops that users' fusions of one direction take. The library's joint fusions leave them alone,
/// even if the user's fusion is refused later.
class Claims {
 public:
  Claims(const StepList& forward, const StepList& backward, const UserFusions& user,
         const UserGroups& groups, const FusionScope& scope) {
    for (const auto* of_pass : {&groups.forward, &groups.backward})
      for (const OpGroup& group : *of_pass)
        for (size_t op = group.first; op <= group.last && !scope.skips(group.fusion->name); ++op)
          by_op_.try_emplace(op, group.fusion->name);
    for (const auto& fusion : user.patterns)
      if (fusion->pass != Pass::joint && !scope.skips(fusion->name))
        add(fusion->pass == Pass::forward ? forward : backward, *fusion, *scope.types);
  }

  Refusal refuse(const Candidate& candidate) const {
    for (const Step* step : candidate.steps)
      for (const Part& part : step->covers)
        if (const auto claim = by_op_.find(part.op); claim != by_op_.end())
          return "the user's fusion \"" + claim->second + "\" covers op " + std::to_string(part.op);
    return std::nullopt;
  }

 private:
  void add(const StepList& steps, const Fusion& fusion, const std::vector<Type>& types) {
    for (const Form& form : forms_of(fusion))
      for (size_t start = 0; start < steps.size(); ++start) {
        const Members members = find_pattern(steps, start, fusion, form);
        if (members.empty()) continue;
        const Candidate candidate(steps, members, fusion);
        if (fusion.refuse != nullptr && fusion.refuse({candidate.steps, types})) continue;
        for (const Step* step : candidate.steps)
          if (step != nullptr)
            for (const Part& part : step->covers) by_op_.try_emplace(part.op, fusion.name);
      }
  }

  std::map<size_t, std::string> by_op_;
};

void fuse_patterns_jointly(StepList& forward, StepList& backward,
                           const std::vector<const Fusion*>& fusions, const Claims& claims,
                           FusionScope& scope, std::vector<Type>& types) {
  for (const Fusion* fusion : fusions) {
    if (scope.skips(fusion->name)) continue;
    const bool yields = is_built_in(*fusion);
    const Form whole(fusion->pattern.size(), true);
    for (size_t start = 0; start < forward.size(); ++start) {
      const Members members = find_pattern(forward, start, *fusion, whole);
      if (members.empty()) continue;
      const Candidate candidate(forward, members, *fusion);
      const Match match{candidate.steps, types};
      Members backward_members;
      for (const Step* step : candidate.steps)
        if (!step->covers.empty())
          for (const size_t s : backward.of_op(step->covers[0].op)) backward_members.push_back(s);
      Refusal refusal = fusion->refuse != nullptr ? fusion->refuse(match) : std::nullopt;
      if (!refusal && yields) refusal = claims.refuse(candidate);
      if (!refusal) refusal = check_names(*fusion, match, scope);
      if (!refusal) {
        Step ahead = fused_step(*fusion, fusion->run, candidate.options, lookup_in(match), scope);
        Step back = fused_step(*fusion, fusion->backward, candidate.options,
                               joint_lookup(match, backward, scope), scope);
        ahead.name = back.name = candidate.name;
        refusal = join(forward, backward, *fusion, {std::move(ahead), members},
                       {std::move(back), backward_members}, scope, types);
      }
      scope.note(*fusion, candidate.name, candidate.place, refusal);
    }
  }
}

/// Whether backward is given a gradient of any result of the group's ops.
bool takes_gradient(const OpGroup& group, const FusionScope& scope) {
  for (size_t op = group.first; op <= group.last; ++op) {
    const OperandTable& table = (*scope.operands)[op];
    for (size_t result = table.kind().first_result; result < table.kind().first_temporary; ++result)
      if (exists(table.given(result))) return true;
  }
  return false;
}

/// Replaces the forward half alone if no gradient is needed; nothing is kept.
Refusal replace_forward(StepList& forward, const StepList& backward, GroupStep ahead,
                        const FusionScope& scope) {
  const std::function<bool(Value)> is_demanded = [&](Value value) {
    return scope.is_demanded(value) || !backward.readers(value).empty();
  };
  Replacement half(forward, ahead.members, scope, is_demanded);
  if (auto refusal = half.replace(forward, std::move(ahead.step))) return "forward: " + *refusal;
  return std::nullopt;
}

void fuse_groups_jointly(StepList& forward, StepList& backward, const std::vector<OpGroup>& groups,
                         FusionScope& scope, std::vector<Type>& types) {
  for (const OpGroup& group : groups) {
    if (scope.skips(group.fusion->name)) continue;
    Refusal refusal = refuse_group(forward, group);
    if (!refusal) refusal = refuse_group(backward, group);
    if (!refusal && !takes_gradient(group, scope)) {
      GroupStep ahead = step_of_group(forward, group, scope, group.fusion->run, false);
      refusal = ahead.refusal;
      if (!refusal) refusal = replace_forward(forward, backward, std::move(ahead), scope);
    } else if (!refusal) {
      GroupStep ahead = step_of_group(forward, group, scope, group.fusion->run, false),
                back = step_of_group(backward, group, scope, group.fusion->backward, true);
      refusal = ahead.refusal ? ahead.refusal : back.refusal;
      if (!refusal)
        refusal = join(forward, backward, *group.fusion, {std::move(ahead.step), ahead.members},
                       {std::move(back.step), back.members}, scope, types);
    }
    scope.note(*group.fusion, group.fusion->name, place_of(group), refusal);
  }
}

}  // namespace

void fuse_jointly(const Description& description, const UserFusions& user, const UserGroups& groups,
                  FusionScope& scope, Draft& draft) {
  const auto fusions = fusions_of(Pass::joint, description, user);
  if (groups.joint.empty() && fusions.empty()) return;
  scope.is_demanded = ValueSet(draft.types.size(), {&draft.outputs, &draft.gradients});
  const auto forward_parts = parts_of(draft.forward), backward_parts = parts_of(draft.backward);
  StepList forward(std::move(draft.forward), draft.types.size()),
      backward(std::move(draft.backward), draft.types.size());
  fuse_groups_jointly(forward, backward, groups.joint, scope, draft.types);
  const Claims claims(forward, backward, user, groups, scope);
  fuse_patterns_jointly(forward, backward, fusions, claims, scope, draft.types);
  draft.forward = forward.take();
  draft.backward = backward.take();
  check_coverage(forward_parts, draft.forward, "joint");
  check_coverage(backward_parts, draft.backward, "joint");
}

}  // namespace tandem
