#include "planner/groups.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

namespace tandem {

std::vector<OpGroup> groups_of(Pass pass, const Description& description, const UserFusions& user,
                               FusionScope& scope, const std::vector<OpGroup>& joint) {
  // Lowering needs the joint groups in any case, so that an unfused plan has equal values.
  if ((!description.fuse && pass != Pass::joint) || !user.groups) return {};
  std::vector<OpGroup> groups = user.groups(pass, description, joint);
  std::erase_if(groups, [&](const OpGroup& group) {
    if (group.refusal && description.fuse)
      scope.note(*group.fusion, group.fusion->name, place_of(group), group.refusal);
    return group.refusal.has_value();
  });
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

Refusal refuse_group(const StepList& steps, const OpGroup& group) {
  for (size_t op = group.first; op <= group.last; ++op)
    for (const size_t s : steps.of_op(op))
      if (steps[s].covers.front().op < group.first || steps[s].covers.back().op > group.last)
        return "fusion \"" + std::string(steps[s].name) + "\" covers one of these ops with others";
  return std::nullopt;
}

namespace {

bool is_in(const OpGroup& group, size_t op) { return op >= group.first && op <= group.last; }

/// Whether another op of the group produces the extra input as an extra output.
bool is_inside(const OpGroup& group, const FusionScope& scope, size_t op, size_t operand) {
  const OpKind& kind = (*scope.operands)[op].kind();
  if (operand == 0 || operand >= kind.first_param) return false;
  const size_t edge = (*scope.operands)[op].flow(operand).edge;
  for (size_t before = group.first; edge != npos && before < op; ++before) {
    const OperandTable& table = (*scope.operands)[before];
    for (const size_t output : table.kind().extra_outputs)
      if (table.flow(output).edge == edge) return true;
  }
  return false;
}

/// What readers outside of the group contribute to the gradient of an extra output.
Values given_from_outside(const OpGroup& group, const OperandTable& table, size_t result) {
  const auto* contributions = table.contributions(result);
  if (contributions == nullptr) return {};
  Values outside;
  for (const OperandTable::Contribution& each : *contributions)
    if (!is_in(group, each.op)) outside.push_back(each.gradient);
  if (outside.size() == contributions->size()) return {table.given(result)};
  return outside;
}

/// The values of a name that the fused step reads.
Values read_of_group(const OpGroup& group, const FusionScope& scope, bool backward,
                     const MemberOperand& operand, Refusal& refusal) {
  const size_t op = group.first + operand.member;
  const OperandTable& table = (*scope.operands)[op];
  const std::optional<OperandRef> ref = table.kind().read(operand.name, backward);
  if (ref && !ref->is_gradient && is_inside(group, scope, op, ref->operand)) return {Value::none};
  const bool is_extra_gradient = ref && ref->is_gradient &&
                                 std::ranges::find(table.kind().extra_outputs, ref->operand) !=
                                     table.kind().extra_outputs.end();
  if (!is_extra_gradient) return table.read(operand.name, backward);
  const Values outside = given_from_outside(group, table, ref->operand);
  if (outside.size() > 1)
    refusal = "several readers outside of these ops contribute to " + std::string(operand.name) +
              " of op " + std::to_string(op) + ", and one of these ops too";
  return {outside.empty() ? Value::none : outside[0]};
}

/// The steps of the group's ops.
std::set<size_t> steps_of_ops(const StepList& steps, const OpGroup& group) {
  std::set<size_t> members;
  for (size_t op = group.first; op <= group.last; ++op)
    for (const size_t s : steps.of_op(op))
      if (steps[s].covers.front().op >= group.first && steps[s].covers.back().op <= group.last)
        members.insert(s);
  return members;
}

/// Refuses a fusion of backward if a joint fusion covers its ops, because their own forwards then
/// save nothing, or if its steps take part in a recipe's history: they read codes with a scale of
/// the past, or record amaxes.
Refusal refuse_contexts(const StepList& steps, const std::set<size_t>& members,
                        const FusionScope& scope) {
  for (const size_t m : members) {
    const Step& step = steps[m];
    if (step.kind == StepKind::fused)
      return "fusion \"" + step.name + "\" of both directions covers these ops";
    for (const Value value : step.reads) {
      if (!exists(value)) continue;
      const Type& type = (*scope.types)[index_of(value)];
      if (type.format == Format::codes && given_to(*type.quantizer) == Given::scale)
        return "step " + step.name + " reads " + type.name +
               ", whose scale comes of the amaxes that steps of the library record: use a recipe "
               "without a history, or register the fusion for both directions";
    }
    const auto keeps_amaxes = [](const ByGroup& own) {
      return own.quantizer != nullptr &&
             (own.amaxes != npos || given_to(*own.quantizer) == Given::scale);
    };
    if (std::ranges::any_of(step.quantizers, keeps_amaxes))
      return "step " + step.name +
             " records the amaxes of each group, of which the next step's scales come: use a "
             "recipe without a history";
  }
  return std::nullopt;
}

/// The value that the steps of an op read under a name, if it is not the one that forward has for
/// the name: codes, or their dequantized values.
Value read_by_steps(const StepList& steps, size_t op, std::string_view name, Value known) {
  for (const size_t s : steps.of_op(op)) {
    const Step& step = steps[s];
    for (size_t i = 0; i < step.reads.size(); ++i)
      if (step.kind == StepKind::op && step.read_names[i] == name && exists(step.reads[i]))
        return step.reads[i];
  }
  return known;
}

/// Adds the planner's own steps that belong to the members.
class OwnSteps {
 public:
  OwnSteps(const StepList& steps, const FusionScope& scope, const Step& fused,
           std::set<size_t>& members)
      : steps_(steps), scope_(scope), fused_(fused), members_(members) {}

  void add() {
    for (const Value value : fused_.writes)
      if (exists(value))
        for (const size_t s : steps_.writers(value))
          if (is_own(s) && makes_what_is_written(steps_[s].kind)) members_.insert(s);
    for (bool grown = true; grown;) {
      grown = false;
      for (const size_t m : Members(members_.begin(), members_.end())) {
        for (const Value value : steps_[m].writes)
          for (const size_t s : exists(value) ? steps_.readers(value) : Members())
            if (is_own(s) && is_read_inside(steps_[s])) grown |= members_.insert(s).second;
        for (const Value value : steps_[m].reads)
          for (const size_t s : exists(value) ? steps_.writers(value) : Members())
            if (is_own(s) && steps_[s].kind == StepKind::add && !reads(fused_, value) &&
                is_read_inside(steps_[s]))
              grown |= members_.insert(s).second;
      }
    }
  }

 private:
  static bool makes_what_is_written(StepKind kind) {
    return kind == StepKind::add || kind == StepKind::seed || kind == StepKind::rename;
  }

  bool is_own(size_t s) const { return steps_[s].covers.empty() && steps_[s].mutates.empty(); }

  bool is_read_inside(const Step& own) const {
    bool is_read = false;
    for (const Value value : own.writes) {
      if (!exists(value)) continue;
      if (scope_.is_demanded(value)) return false;
      for (const size_t reader : steps_.readers(value)) {
        if (members_.count(reader) == 0) return false;
        is_read = true;
      }
    }
    return is_read;
  }

  const StepList& steps_;
  const FusionScope& scope_;
  const Step& fused_;
  std::set<size_t>& members_;
};

}  // namespace

GroupStep step_of_group(const StepList& steps, const OpGroup& group, const FusionScope& scope,
                        const FusedRun& run, bool backward) {
  GroupStep found;
  const auto read = [&](const MemberOperand& operand) {
    Values values = read_of_group(group, scope, backward, operand, found.refusal);
    if (operand.step == kAnyStep && values.size() == 1)
      values[0] = read_by_steps(steps, group.first + operand.member, operand.name, values[0]);
    return values;
  };
  const auto write = [&](const MemberOperand& operand) {
    return (*scope.operands)[group.first + operand.member].written(operand.name, backward);
  };
  found.step = fused_step(*group.fusion, run, {group.options}, {read, write}, scope);
  if (found.refusal) return found;
  if (scope.resolved)
    for (Values* list : {&found.step.reads, &found.step.writes})
      for (Value& value : *list) value = scope.resolved(value);
  std::set<size_t> members = steps_of_ops(steps, group);
  if (backward && group.fusion->runs_user_code && scope.pass == Pass::backward) {
    found.refusal = refuse_contexts(steps, members, scope);
    if (found.refusal) return found;
  }
  OwnSteps(steps, scope, found.step, members).add();
  if (members.empty()) {
    found.refusal = "none of these ops has a step here";
    return found;
  }
  found.members.assign(members.begin(), members.end());
  if (scope.is_there)
    for (Value& value : found.step.reads)  // the context holds only what the plan keeps
      if (exists(value) && !scope.is_there(value) && steps.writers(value).empty())
        value = Value::none;
  for (Value& value : found.step.writes)
    if (exists(value) &&
        std::ranges::none_of(found.members, [&](size_t m) { return writes(steps[m], value); }))
      value = Value::none;
  return found;
}

void fuse_groups(StepList& steps, const std::vector<OpGroup>& groups, FusionScope& scope) {
  for (const OpGroup& group : groups) {
    if (scope.skips(group.fusion->name)) continue;
    Refusal refusal = refuse_group(steps, group);
    if (!refusal) {
      GroupStep made =
          step_of_group(steps, group, scope, group.fusion->run, scope.pass == Pass::backward);
      refusal = made.refusal;
      if (!refusal)
        refusal = Replacement(steps, made.members, scope, scope.is_demanded)
                      .replace(steps, std::move(made.step));
    }
    scope.note(*group.fusion, group.fusion->name, place_of(group), refusal);
  }
}

}  // namespace tandem
