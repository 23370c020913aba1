#include "planner/groups.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

namespace tandem {

std::vector<OpGroup> groups_of(Pass pass, const Description& description, const UserFusions& user) {
  if (!description.fuse || !user.groups) return {};
  std::vector<OpGroup> groups = user.groups(pass, description);
  size_t next = 0;
  for (const OpGroup& group : groups) {
    TORCH_CHECK_VALUE(
        group.first >= next && group.last >= group.first && group.last < description.ops.size(),
        group.fusion->name, ": expected fused ops that cover ops ", next, " to ",
        description.ops.size() - 1, " once and in order, got ops ", group.first, " to ", group.last,
        ". Return every op of the list, alone or in one fused op.");
    next = group.last + 1;
  }
  return groups;
}

std::string place_of(const OpGroup& group) {
  return "ops " + std::to_string(group.first) + " to " + std::to_string(group.last);
}

Refusal refuse_group(const StepList& steps, const OpGroup& group, const FusionScope& scope) {
  for (size_t op = group.first; op <= group.last; ++op) {
    const OpKind& kind = (*scope.operands)[op].kind();
    for (size_t operand = 0; operand < kind.first_buffer; ++operand)
      if (group.fusion->runs_user_code && is_list(kind.operands[operand]))
        return "op " + std::to_string(op) + " has a list of operands, \"" +
               std::string(kind.operands[operand]) + "\", which no fusion written in Python takes";
  }
  for (size_t op = group.first; op <= group.last; ++op)
    for (const size_t s : steps.of_op(op))
      if (steps[s].covers.front().op < group.first || steps[s].covers.back().op > group.last)
        return "fusion \"" + std::string(steps[s].name) + "\" covers one of these ops with others";
  return std::nullopt;
}

Members members_of(const StepList& steps, const OpGroup& group, const FusionScope& scope) {
  std::set<size_t> members;
  for (size_t op = group.first; op <= group.last; ++op)
    for (const size_t s : steps.of_op(op))
      if (steps[s].covers.front().op >= group.first && steps[s].covers.back().op <= group.last)
        members.insert(s);
  const auto is_inside = [&](const Step& own) {
    bool is_read = false;
    for (const Value value : own.writes) {
      if (!exists(value)) continue;
      if (scope.is_demanded(value)) return false;
      for (const size_t reader : steps.readers(value)) {
        if (members.count(reader) == 0) return false;
        is_read = true;
      }
    }
    return is_read;
  };
  for (bool grown = true; grown;) {
    grown = false;
    for (const size_t m : Members(members.begin(), members.end()))
      for (const Value value : steps[m].writes)
        for (const size_t s : exists(value) ? steps.readers(value) : Members())
          if (steps[s].covers.empty() && steps[s].mutates.empty() && members.count(s) == 0 &&
              is_inside(steps[s]))
            grown |= members.insert(s).second;
  }
  return {members.begin(), members.end()};
}

namespace {

Lookup lookup_of(const OpGroup& group, const FusionScope& scope, bool backward,
                 Values (OperandTable::*find)(std::string_view, bool) const) {
  return [&group, &scope, backward, find](const MemberOperand& operand) {
    return ((*scope.operands)[group.first + operand.member].*find)(operand.name, backward);
  };
}

}  // namespace

Lookup reads_of(const OpGroup& group, const FusionScope& scope, bool backward) {
  return lookup_of(group, scope, backward, &OperandTable::read);
}
Lookup writes_of(const OpGroup& group, const FusionScope& scope, bool backward) {
  return lookup_of(group, scope, backward, &OperandTable::written);
}

void fuse_groups(StepList& steps, const std::vector<OpGroup>& groups, FusionScope& scope) {
  for (const OpGroup& group : groups) {
    if (scope.skips(*group.fusion)) continue;
    if (const Refusal reason = refuse_group(steps, group, scope)) {
      scope.note(*group.fusion, place_of(group), reason);
      continue;
    }
    const Members members = members_of(steps, group, scope);
    if (members.empty()) {
      scope.note(*group.fusion, place_of(group), "none of these ops has a step here");
      continue;
    }
    const bool backward = scope.pass == Pass::backward;
    Step step = fused_step(*group.fusion, group.fusion->run, {group.options},
                           reads_of(group, scope, backward), writes_of(group, scope, backward),
                           steps, members);
    if (backward) {
      for (Values* list : {&step.reads, &step.writes})
        for (Value& value : *list) value = scope.resolved(value);
      for (Value& value : step.reads)  // of a context it gets what the plan keeps
        if (exists(value) && !scope.is_there(value) && steps.writers(value).empty())
          value = Value::none;
    }
    for (Value& value : step.writes)  // of a context: what comes from outside is there already
      if (exists(value) && reads(step, value)) value = Value::none;
    Replacement replacement(steps, members, scope, scope.is_demanded);
    const Refusal refusal = replacement.check(step);
    scope.note(*group.fusion, place_of(group), refusal);
    if (refusal) continue;
    replacement.drop_undemanded_writes(step);
    replacement.apply(steps, std::move(step));
  }
}

}  // namespace tandem
