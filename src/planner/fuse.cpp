#include "planner/fuse.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tandem {

namespace {

using Members = StepList::Places;  // in pattern order, or ascending

bool contains(const Values& values, Value value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

bool is_of_op(const Step& step) {
  return step.kind == StepKind::op || step.kind == StepKind::fused;
}

bool matches(const Step& step, const PatternStep& pattern) {
  if (step.kind != pattern.kind) return false;
  if (step.kind != StepKind::op) return true;
  if (pattern.is_family) return step.family == pattern.name;
  for (std::string_view rest = pattern.name;;) {
    const size_t bar = rest.find('|');
    if (rest.substr(0, bar) == step.name) return true;
    if (bar == std::string_view::npos) return false;
    rest.remove_prefix(bar + 1);
  }
}

/// The value through which a chain leaves a step on the way to `next`.
Value link_from(const Step& step, const PatternStep& next) {
  const size_t write =
      next.result.empty() ? step.main_write : position(step.write_names, next.result);
  return write < step.writes.size() ? step.writes[write] : Value::none;
}

/// Whether a step takes the chain up where `pattern` says: a sum by either of its terms.
bool takes_up(const Step& step, Value link, const PatternStep& pattern) {
  if (pattern.operand == kAnyRead || (step.kind == StepKind::add && pattern.operand.empty()))
    return reads(step, link);
  const size_t read =
      pattern.operand.empty() ? step.main_read : position(step.read_names, pattern.operand);
  return read < step.reads.size() && step.reads[read] == link;
}

/// Finds the members of a pattern that starts at `start`; empty where it does not match.
Members find_pattern(const StepList& steps, size_t start, const Fusion& fusion) {
  if (!steps.has(start) || !matches(steps[start], fusion.pattern[0])) return {};
  Members members{start};
  for (size_t p = 1; p < fusion.pattern.size(); ++p) {
    const PatternStep& pattern = fusion.pattern[p];
    const Value link = link_from(steps[members.back()], pattern);
    if (!exists(link)) return {};
    const auto readers = steps.readers(link);
    const auto next = std::find_if(readers.begin(), readers.end(), [&](size_t reader) {
      return matches(steps[reader], pattern) && takes_up(steps[reader], link, pattern) &&
             std::find(members.begin(), members.end(), reader) == members.end();
    });
    if (next == readers.end()) return {};
    members.push_back(*next);
  }
  return members;
}

std::string place_of(const StepList& steps, const Members& members) {
  std::string place;
  for (const size_t m : members) {
    if (!place.empty()) place += " + ";
    place += steps[m].covers.empty() ? steps[m].name
                                     : std::to_string(steps[m].covers[0].op) + "." + steps[m].name;
  }
  return place;
}
std::string place_of(const OpGroup& group) {
  return "ops " + std::to_string(group.first) + " to " + std::to_string(group.last);
}

/// One replacement under way: members of a list, and what the fused step reads and writes.
class Replacement {
 public:
  /// `only_gradients`: what members write again of forward does not count; a joint fusion's forward writes it.
  Replacement(const StepList& steps, Members members, const FusionScope& scope,
              const std::function<bool(Value)>& is_demanded, bool only_gradients = false)
      : steps_(steps),
        members_(std::move(members)),
        types_(*scope.types),
        is_demanded_(is_demanded),
        only_gradients_(only_gradients) {
    std::sort(members_.begin(), members_.end());
  }

  /// Why the members cannot become `fused`; finds the place of the fused step.
  Refusal check(const Step& fused) {
    for (const auto& rule : {&Replacement::check_demanded, &Replacement::check_reads,
                             &Replacement::check_writes, &Replacement::check_mutations})
      if (auto refusal = (this->*rule)(fused)) return refusal;
    for (const size_t place : {members_.front(), members_.back()})
      if (can_stand_at(place, fused)) {
        place_ = place;
        return std::nullopt;
      }
    return "no position is behind all that it reads and before all that reads it";
  }

  void drop_undemanded_writes(Step& fused) const {
    for (Value& value : fused.writes)
      if (exists(value) && !is_demanded_outside(value)) value = Value::none;
  }

  /// Puts the fused step in place of the members.
  void apply(StepList& steps, Step fused) const {
    for (const size_t m : members_)
      fused.covers.insert(fused.covers.end(), steps_[m].covers.begin(), steps_[m].covers.end());
    std::sort(fused.covers.begin(), fused.covers.end());
    steps.replace(members_, place_, std::move(fused));
  }

 private:
  bool is_member(size_t place) const {
    return std::binary_search(members_.begin(), members_.end(), place);
  }
  const std::string& name(Value value) const { return types_[index_of(value)].name; }

  bool counts(const Step& member, Value value) const {
    return exists(value) && !(only_gradients_ && is_of_op(member) &&
                              types_[index_of(value)].origin != Origin::gradient);
  }
  bool is_written_by_member(Value value) const {
    return std::any_of(members_.begin(), members_.end(), [&](size_t m) {
      return writes(steps_[m], value) && counts(steps_[m], value);
    });
  }
  bool is_demanded_outside(Value value) const {
    if (is_demanded_(value)) return true;
    const auto readers = steps_.readers(value);
    return std::any_of(readers.begin(), readers.end(), [&](size_t s) { return !is_member(s); });
  }

  Refusal check_demanded(const Step& fused) const {
    for (const size_t m : members_)
      for (const Value value : steps_[m].writes)
        if (counts(steps_[m], value) && is_demanded_outside(value) &&
            !contains(fused.writes, value))
          return name(value) + " is demanded outside and the fused step does not write it";
    return std::nullopt;
  }

  Refusal check_reads(const Step& fused) const {
    for (const Value value : fused.reads)
      if (exists(value) && is_written_by_member(value))
        return name(value) + " is read by the fused step, and only the steps it replaces write it";
    return std::nullopt;
  }

  Refusal check_writes(const Step& fused) const {
    for (const Value value : fused.writes)
      if (exists(value) && std::none_of(members_.begin(), members_.end(),
                                        [&](size_t m) { return writes(steps_[m], value); }))
        return name(value) + " is written by the fused step, and by none of those it replaces";
    return std::nullopt;
  }

  Refusal check_mutations(const Step& fused) const {
    for (const size_t m : members_)
      if (!steps_[m].mutates.empty())
        return "step " + steps_[m].name + " mutates " + name(steps_[m].mutates[0]) +
               ", which a fused step would hide";
    for (const Value value : fused.reads)
      if (exists(value))
        for (const size_t s : steps_.mutators(value))
          if (s > members_.front() && s < members_.back())
            return "step " + steps_[s].name + " mutates " + name(value) + " in between";
    return std::nullopt;
  }

  bool can_stand_at(size_t place, const Step& fused) const {
    for (const Value value : fused.reads)
      if (exists(value))
        for (const size_t writer : steps_.writers(value))
          if (writer > place && !is_member(writer)) return false;
    for (const Value value : fused.writes)
      if (exists(value))
        for (const size_t reader : steps_.readers(value))
          if (reader < place && !is_member(reader)) return false;
    return true;
  }

  const StepList& steps_;
  Members members_;
  const std::vector<Type>& types_;
  const std::function<bool(Value)>& is_demanded_;
  bool only_gradients_;
  size_t place_ = 0;
};

using Lookup = std::function<Value(const MemberOperand&)>;

Step fused_step(const Fusion& fusion, const FusedRun& run, std::vector<Options> options,
                const Lookup& read, const Lookup& write) {
  Step step;
  step.kind = StepKind::fused;
  step.name = fusion.name;
  step.run = run.run;
  step.runs_user_code = fusion.runs_user_code;
  step.options = std::move(options);
  for (const auto& operand : run.reads) {
    step.read_names.push_back(operand.name);
    step.reads.push_back(read(operand));
  }
  for (const auto& operand : run.writes) {
    step.write_names.push_back(operand.name);
    step.writes.push_back(write(operand));
  }
  return step;
}

bool is_skipped(const Fusion& fusion, const FusionScope& scope) {
  return std::find(scope.skipped->begin(), scope.skipped->end(), fusion.name) !=
         scope.skipped->end();
}

void note(FusionScope& scope, const Fusion& fusion, const std::string& place,
          const Refusal& refusal) {
  const std::string reason = refusal.value_or("");
  if (scope.noted.emplace(fusion.name, place, reason).second)
    scope.decisions->push_back({fusion.name, place, reason});
}

/// A pattern that matched.
struct Candidate {
  std::vector<const Step*> steps;
  std::string place;
  std::vector<Options> options;  ///< of the ops that it covers, in member order

  Candidate(const StepList& list, const Members& members) : place(place_of(list, members)) {
    for (const size_t m : members) {
      steps.push_back(&list[m]);
      options.insert(options.end(), list[m].options.begin(), list[m].options.end());
    }
  }
};

/// A fused run may name only what the members have.
template <typename Has>
Refusal check_names(const FusedRun& run, const Match& match, Has&& has) {
  for (const auto* operands : {&run.reads, &run.writes})
    for (const MemberOperand& operand : *operands)
      if (!has(operand, operands == &run.reads))
        return "step " + match.steps[operand.member]->name +
               (operand.name == kOtherRead
                    ? " has not one read that is left"
                    : " has no operand called \"" + std::string(operand.name) + "\"");
  return std::nullopt;
}
Refusal check_names(const Fusion& fusion, const Match& match, const FusionScope& scope) {
  const auto of_step = [&](const MemberOperand& operand, bool) { return match.has(operand); };
  if (auto refusal = check_names(fusion.run, match, of_step)) return refusal;
  return check_names(fusion.backward, match, [&](const MemberOperand& operand, bool is_read) {
    const Step& step = *match.steps[operand.member];
    if (step.covers.empty()) return true;
    const OpDef& def = (*scope.operands)[step.covers[0].op].definition();
    return (is_read ? backward_read(def, operand.name) : backward_write(def, operand.name))
        .has_value();
  });
}

/// Whether a step covers ops of the group and others: then a fusion of this group could not have the ops as a whole.
Refusal refuse_overlap(const StepList& steps, const OpGroup& group) {
  for (size_t op = group.first; op <= group.last; ++op)
    for (const size_t s : steps.of_op(op))
      if (steps[s].covers.front().op < group.first || steps[s].covers.back().op > group.last)
        return "fusion \"" + std::string(steps[s].name) + "\" covers one of these ops with others";
  return std::nullopt;
}

/// Steps that belong to ops [first, last], with the planner's own steps whose results only they read.
Members members_of_ops(const StepList& steps, const OpGroup& group, const FusionScope& scope) {
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

/// What a group calls an operand in one direction.
Lookup group_lookup(const OpGroup& group, const FusionScope& scope,
                    Value (OperandTable::*find)(std::string_view) const) {
  return [&group, &scope, find](const MemberOperand& operand) {
    return ((*scope.operands)[group.first + operand.member].*find)(operand.name);
  };
}

}  // namespace

void fuse(StepList& steps, const std::vector<const Fusion*>& fusions, FusionScope& scope) {
  for (const Fusion* fusion : fusions) {
    if (fusion->pass != scope.pass || is_skipped(*fusion, scope)) continue;
    for (size_t start = 0; start < steps.size(); ++start) {
      const Members members = find_pattern(steps, start, *fusion);
      if (members.empty()) continue;
      const Candidate candidate(steps, members);
      const Match match{candidate.steps, *scope.types};
      Step step = fused_step(
          *fusion, fusion->run, candidate.options,
          [&](const MemberOperand& operand) { return match[operand]; },
          [&](const MemberOperand& operand) { return match.written(operand); });
      Replacement replacement(steps, members, scope, scope.is_demanded);
      Refusal refusal = fusion->refuse != nullptr ? fusion->refuse(match) : std::nullopt;
      if (!refusal) refusal = check_names(*fusion, match, scope);
      if (!refusal) refusal = replacement.check(step);
      note(scope, *fusion, candidate.place, refusal);
      if (refusal) continue;
      replacement.drop_undemanded_writes(step);
      replacement.apply(steps, std::move(step));
    }
  }
}

void fuse_groups(StepList& steps, const std::vector<OpGroup>& groups, FusionScope& scope) {
  for (const OpGroup& group : groups) {
    if (is_skipped(*group.fusion, scope)) continue;
    if (const Refusal overlap = refuse_overlap(steps, group)) {
      note(scope, *group.fusion, place_of(group), overlap);
      continue;
    }
    const Members members = members_of_ops(steps, group, scope);
    if (members.empty()) {
      note(scope, *group.fusion, place_of(group), "none of these ops has a step here");
      continue;
    }
    const bool backward = scope.pass == Pass::backward;
    Step step = fused_step(
        *group.fusion, group.fusion->run, {group.options},
        group_lookup(group, scope, backward ? &OperandTable::backward_read : &OperandTable::value),
        group_lookup(group, scope,
                     backward ? &OperandTable::backward_write : &OperandTable::value));
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
    note(scope, *group.fusion, place_of(group), refusal);
    if (refusal) continue;
    replacement.drop_undemanded_writes(step);
    replacement.apply(steps, std::move(step));
  }
}

namespace {

/// Replaces forward and backward members by the two halves of a joint fusion, private values added, or says why not.
Refusal join(StepList& forward, StepList& backward, const Fusion& fusion, Step ahead, Step back,
             const Members& forward_members, const Members& backward_members,
             const FusionScope& scope, std::vector<Type>& types) {
  if (backward_members.empty()) return "these ops have no backward here";
  // What the replaced backward read need not be written any more; what others and the fused backward read must be.
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

/// What the backward half calls an operand of a matched op.
Lookup joint_lookup(const Match& match, const FusionScope& scope,
                    Value (OperandTable::*find)(std::string_view) const) {
  return [&match, &scope, find](const MemberOperand& operand) {
    const Step& step = *match.steps[operand.member];
    if (step.covers.empty()) return Value::none;
    return ((*scope.operands)[step.covers[0].op].*find)(operand.name);
  };
}

}  // namespace

void fuse_jointly(StepList& forward, StepList& backward, const std::vector<const Fusion*>& fusions,
                  FusionScope& scope, std::vector<Type>& types) {
  for (const Fusion* fusion : fusions) {
    if (fusion->pass != Pass::joint || is_skipped(*fusion, scope)) continue;
    for (size_t start = 0; start < forward.size(); ++start) {
      const Members members = find_pattern(forward, start, *fusion);
      if (members.empty()) continue;
      const Candidate candidate(forward, members);
      const Match match{candidate.steps, *scope.types};
      Members backward_members;
      for (const Step* step : candidate.steps)
        if (!step->covers.empty())
          for (const size_t s : backward.of_op(step->covers[0].op)) backward_members.push_back(s);
      Refusal refusal = fusion->refuse != nullptr ? fusion->refuse(match) : std::nullopt;
      if (!refusal) refusal = check_names(*fusion, match, scope);
      if (!refusal) {
        Step ahead = fused_step(
            *fusion, fusion->run, candidate.options,
            [&](const MemberOperand& operand) { return match[operand]; },
            [&](const MemberOperand& operand) { return match.written(operand); });
        Step back = fused_step(*fusion, fusion->backward, candidate.options,
                               joint_lookup(match, scope, &OperandTable::backward_read),
                               joint_lookup(match, scope, &OperandTable::backward_write));
        refusal = join(forward, backward, *fusion, std::move(ahead), std::move(back), members,
                       backward_members, scope, types);
      }
      note(scope, *fusion, candidate.place, refusal);
    }
  }
}

void fuse_groups_jointly(StepList& forward, StepList& backward, const std::vector<OpGroup>& groups,
                         FusionScope& scope, std::vector<Type>& types) {
  for (const OpGroup& group : groups) {
    if (is_skipped(*group.fusion, scope)) continue;
    const Members members = members_of_ops(forward, group, scope);
    Refusal refusal = refuse_overlap(forward, group);
    if (!refusal) refusal = refuse_overlap(backward, group);
    if (!refusal && members.empty()) refusal = "none of these ops has a step here";
    if (!refusal) {
      const Lookup value = group_lookup(group, scope, &OperandTable::value);
      Step ahead = fused_step(*group.fusion, group.fusion->run, {group.options}, value, value);
      Step back = fused_step(*group.fusion, group.fusion->backward, {group.options},
                             group_lookup(group, scope, &OperandTable::backward_read),
                             group_lookup(group, scope, &OperandTable::backward_write));
      refusal = join(forward, backward, *group.fusion, std::move(ahead), std::move(back), members,
                     members_of_ops(backward, group, scope), scope, types);
    }
    note(scope, *group.fusion, place_of(group), refusal);
  }
}

}  // namespace tandem
