#include "planner/fuse.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <sstream>

namespace tandem {

namespace {

using Members =
    std::vector<size_t>;  // positions in the list of steps, ascending unless said otherwise

bool matches(const Step& step, std::string_view pattern) {
  while (true) {
    const size_t bar = pattern.find('|');
    const std::string_view alternative = pattern.substr(0, bar);
    if (alternative == step.kind || (!step.family.empty() && alternative == step.family))
      return true;
    if (bar == std::string_view::npos) return false;
    pattern.remove_prefix(bar + 1);
  }
}

bool reads_result_of(const Step& reader, const Step& writer) {
  return std::any_of(writer.writes.begin(), writer.writes.end(),
                     [&](Value v) { return exists(v) && reads(reader, v); });
}

std::string place_of(const Steps& steps, const Members& members) {
  std::string place;
  for (const size_t m : members) {
    if (!place.empty()) place += " + ";
    place += steps[m].covers.empty() ? steps[m].kind
                                     : std::to_string(steps[m].covers[0].op) + "." + steps[m].kind;
  }
  return place;
}

/// One replacement under way: members of a list, and what the fused step reads and writes.
class Replacement {
 public:
  Replacement(const Steps& steps, Members members, const FusionScope& scope)
      : steps_(steps), members_(std::move(members)), scope_(scope) {
    std::sort(members_.begin(), members_.end());
  }

  /// Why the members cannot become one step that writes `writes`; sets the position of the fused step.
  Refusal check(const Values& writes, const Values& reads_of_fused) {
    if (auto refusal = check_writes(writes)) return refusal;
    for (const size_t m : members_)
      if (!steps_[m].mutates.empty())
        return "step " + steps_[m].kind + " mutates " + name(steps_[m].mutates[0]) +
               ", which a fused step would hide";
    for (const size_t position : {members_.front(), members_.back()})
      if (can_stand_at(position, reads_of_fused, writes)) {
        position_ = position;
        return std::nullopt;
      }
    return "no position is behind all that it reads and before all that reads it";
  }

  size_t position() const { return position_; }
  const Members& members() const { return members_; }

  bool is_demanded_outside(Value value) const {
    if (scope_.is_demanded(value)) return true;
    for (size_t s = 0; s < steps_.size(); ++s)
      if (!is_member(s) && reads(steps_[s], value)) return true;
    return false;
  }

  /// The fused step in place of the members.
  Steps with(Step fused) const {
    std::set<Part> covers;
    for (const size_t m : members_) covers.insert(steps_[m].covers.begin(), steps_[m].covers.end());
    fused.covers.assign(covers.begin(), covers.end());
    Steps replaced;
    for (size_t s = 0; s < steps_.size(); ++s) {
      if (s == position_) replaced.push_back(std::move(fused));
      if (!is_member(s)) replaced.push_back(steps_[s]);
    }
    return replaced;
  }

 private:
  bool is_member(size_t step) const {
    return std::binary_search(members_.begin(), members_.end(), step);
  }
  const std::string& name(Value value) const { return (*scope_.types)[index_of(value)].name; }

  Refusal check_writes(const Values& writes) const {
    for (const size_t m : members_)
      for (const Value value : steps_[m].writes)
        if (exists(value) && is_demanded_outside(value) &&
            std::find(writes.begin(), writes.end(), value) == writes.end())
          return name(value) + " is demanded outside and the fused step does not write it";
    return std::nullopt;
  }

  bool can_stand_at(size_t position, const Values& fused_reads, const Values& fused_writes) const {
    for (size_t s = 0; s < steps_.size(); ++s) {
      if (is_member(s)) continue;
      for (const Value value : s > position ? fused_reads : Values())
        if (exists(value) && writes(steps_[s], value)) return false;
      for (const Value value : s < position ? fused_writes : Values())
        if (exists(value) && reads(steps_[s], value)) return false;
    }
    return true;
  }

  const Steps& steps_;
  Members members_;
  const FusionScope& scope_;
  size_t position_ = 0;
};

/// Finds the members of a pattern that starts at `start`; empty where it does not match.
Members find_pattern(const Steps& steps, size_t start, const Fusion& fusion) {
  Members members;
  if (!matches(steps[start], fusion.pattern[0])) return members;
  members.push_back(start);
  for (size_t p = 1; p < fusion.pattern.size(); ++p) {
    size_t next = start + 1;
    while (next < steps.size() &&
           !(matches(steps[next], fusion.pattern[p]) &&
             reads_result_of(steps[next], steps[members.back()]) &&
             std::find(members.begin(), members.end(), next) == members.end()))
      ++next;
    if (next == steps.size()) return {};
    members.push_back(next);
  }
  return members;
}

Match match_of(const Steps& steps, const Members& members, std::vector<const Step*>& storage,
               const std::vector<Type>& types) {
  storage.clear();
  for (const size_t m : members) storage.push_back(&steps[m]);
  return {storage, types};
}

using Lookup = std::function<Value(const MemberOperand&)>;

Step fused_step(const Fusion& fusion, const FusedRun& run, const Lookup& lookup) {
  Step step;
  step.kind = fusion.name;
  step.run = run.run;
  step.runs_user_code = fusion.runs_user_code;
  for (const auto& read : run.reads) {
    step.read_names.push_back(read.name);
    step.reads.push_back(lookup(read));
  }
  for (const auto& write : run.writes) {
    step.write_names.push_back(write.name);
    step.writes.push_back(lookup(write));
  }
  return step;
}

void drop_undemanded_writes(Step& step, const Replacement& replacement) {
  for (Value& value : step.writes)
    if (exists(value) && !replacement.is_demanded_outside(value)) value = Value::none;
}

bool is_skipped(const Fusion& fusion, const FusionScope& scope) {
  return std::find(scope.skipped->begin(), scope.skipped->end(), fusion.name) !=
         scope.skipped->end();
}

void note(const FusionScope& scope, const Fusion& fusion, const std::string& place,
          const Refusal& refusal) {
  Decision decision{fusion.name, place, refusal.value_or("")};
  for (const Decision& known : *scope.decisions)
    if (known.fusion == decision.fusion && known.place == decision.place &&
        known.reason == decision.reason)
      return;
  scope.decisions->push_back(std::move(decision));
}

/// Options of the ops that a match covers, in member order.
std::vector<Options> options_of(const Steps& steps, const Members& members) {
  std::vector<Options> options;
  for (const size_t m : members)
    options.insert(options.end(), steps[m].options.begin(), steps[m].options.end());
  return options;
}

/// Steps that belong to ops [first, last], with the planner's own steps whose results only they read.
Members members_of_ops(const Steps& steps, size_t first, size_t last, const FusionScope& scope) {
  std::set<size_t> members;
  for (size_t s = 0; s < steps.size(); ++s)
    if (!steps[s].covers.empty() && steps[s].covers.front().op >= first &&
        steps[s].covers.back().op <= last)
      members.insert(s);
  for (bool grown = true; grown;) {
    grown = false;
    for (size_t s = 0; s < steps.size(); ++s) {
      if (!steps[s].covers.empty() || members.count(s) != 0 || !steps[s].mutates.empty()) continue;
      bool inside = false, outside = false;
      for (size_t reader = 0; reader < steps.size(); ++reader)
        if (reads_result_of(steps[reader], steps[s]))
          (members.count(reader) != 0 ? inside : outside) = true;
      for (const Value value : steps[s].writes)
        outside |= exists(value) && scope.is_demanded(value);
      bool from_member = false;
      for (const size_t m : members) from_member |= reads_result_of(steps[s], steps[m]);
      if (inside && !outside && from_member) grown |= members.insert(s).second;
    }
  }
  return {members.begin(), members.end()};
}

Lookup group_lookup(const OpGroup& group, const FusionScope& scope) {
  return [&group, &scope](const MemberOperand& operand) {
    return (*scope.operands)[group.first + operand.member].find(operand.name);
  };
}

}  // namespace

Value Match::operator[](const MemberOperand& operand) const {
  const Step& step = *steps[operand.member];
  if (operand.name == kOtherRead) {
    for (const Value value : step.reads)
      if (exists(value) && std::none_of(steps.begin(), steps.end(),
                                        [&](const Step* other) { return writes(*other, value); }))
        return value;
    return Value::none;
  }
  if (const size_t read = position(step.read_names, operand.name); read != npos)
    return step.reads[read];
  if (const size_t write = position(step.write_names, operand.name); write != npos)
    return step.writes[write];
  return Value::none;
}

void fuse(Steps& steps, Pass pass, const std::vector<const Fusion*>& fusions,
          const FusionScope& scope) {
  for (const Fusion* fusion : fusions) {
    if (fusion->pass != pass || is_skipped(*fusion, scope)) continue;
    for (size_t start = 0; start < steps.size(); ++start) {
      const Members members = find_pattern(steps, start, *fusion);
      if (members.empty()) continue;
      std::vector<const Step*> storage;
      const Match match = match_of(steps, members, storage, *scope.types);
      const std::string place = place_of(steps, members);
      Step step = fused_step(*fusion, fusion->run,
                             [&](const MemberOperand& operand) { return match[operand]; });
      step.options = options_of(steps, members);
      Replacement replacement(steps, members, scope);
      Refusal refusal = fusion->refuse != nullptr ? fusion->refuse(match) : std::nullopt;
      if (!refusal) refusal = replacement.check(step.writes, step.reads);
      note(scope, *fusion, place, refusal);
      if (refusal) continue;
      drop_undemanded_writes(step, replacement);
      steps = replacement.with(std::move(step));
    }
  }
}

void fuse_groups(Steps& steps, Pass, const std::vector<OpGroup>& groups, const FusionScope& scope) {
  for (const OpGroup& group : groups) {
    if (is_skipped(*group.fusion, scope)) continue;
    const Members members = members_of_ops(steps, group.first, group.last, scope);
    const std::string place =
        "ops " + std::to_string(group.first) + " to " + std::to_string(group.last);
    if (members.empty()) {
      note(scope, *group.fusion, place, "none of these ops has a step here");
      continue;
    }
    Step step = fused_step(*group.fusion, group.fusion->run, group_lookup(group, scope));
    step.options = {group.options};
    for (Value& value : step.writes)  // of a context: what comes from outside is there already
      if (exists(value) && reads(step, value)) value = Value::none;
    Replacement replacement(steps, members, scope);
    const Refusal refusal = replacement.check(step.writes, step.reads);
    note(scope, *group.fusion, place, refusal);
    if (refusal) continue;
    drop_undemanded_writes(step, replacement);
    steps = replacement.with(std::move(step));
  }
}

namespace {

/// Replaces forward and backward members by the two halves of a joint fusion, private values added, or says why not.
Refusal join(Steps& forward, Steps& backward, const Fusion& fusion, const Members& forward_members,
             const Members& backward_members, const Lookup& forward_lookup,
             const Lookup& backward_lookup, const std::vector<Options>& options,
             const FusionScope& scope) {
  if (backward_members.empty()) return "these ops have no backward here";
  Step ahead = fused_step(fusion, fusion.run, forward_lookup),
       back = fused_step(fusion, fusion.backward, backward_lookup);
  ahead.options = back.options = options;
  // What the replaced backward read need not be written any more; what others read must be.
  FusionScope forward_scope = scope;
  forward_scope.is_demanded = [&](Value value) {
    if (scope.is_demanded(value)) return true;
    for (size_t s = 0; s < backward.size(); ++s)
      if (std::find(backward_members.begin(), backward_members.end(), s) ==
              backward_members.end() &&
          reads(backward[s], value))
        return true;
    return false;
  };
  // What a backward step could write again, forward writes anyway.
  Steps gradients_only = backward;
  for (const size_t m : backward_members)
    for (size_t w = 0; w < gradients_only[m].writes.size(); ++w)
      if (!gradients_only[m].write_names[w].starts_with("grad_") &&
          !gradients_only[m].covers.empty())
        gradients_only[m].writes[w] = Value::none;
  Replacement forward_half(forward, forward_members, forward_scope),
      backward_half(gradients_only, backward_members, scope);
  if (auto refusal = forward_half.check(ahead.writes, ahead.reads)) return "forward: " + *refusal;
  if (auto refusal = backward_half.check(back.writes, back.reads)) return "backward: " + *refusal;
  drop_undemanded_writes(ahead, forward_half);
  drop_undemanded_writes(back, backward_half);
  const at::ScalarType dtype = (*scope.types)[index_of(forward[forward_members[0]].reads[0])].dtype;
  for (const auto& name : fusion.keeps) {
    const Format format = fusion.runs_user_code ? Format::opaque : Format::plain;
    scope.types->push_back(
        {dtype, format, Origin::result, Value::none, fusion.name + "." + std::string(name)});
    const Value value = static_cast<Value>(scope.types->size() - 1);
    ahead.write_names.push_back(name);
    ahead.writes.push_back(value);
    back.read_names.push_back(name);
    back.reads.push_back(value);
  }
  forward = forward_half.with(std::move(ahead));
  backward = backward_half.with(std::move(back));
  return std::nullopt;
}

}  // namespace

void fuse_jointly(Steps& forward, Steps& backward, const std::vector<const Fusion*>& fusions,
                  const FusionScope& scope) {
  for (const Fusion* fusion : fusions) {
    if (fusion->pass != Pass::joint || is_skipped(*fusion, scope)) continue;
    for (size_t start = 0; start < forward.size(); ++start) {
      const Members members = find_pattern(forward, start, *fusion);
      if (members.empty()) continue;
      std::vector<const Step*> storage;
      const Match match = match_of(forward, members, storage, *scope.types);
      const std::string place = place_of(forward, members);
      Members backward_members;
      std::vector<size_t> ops;
      for (const size_t m : members)
        if (!forward[m].covers.empty()) ops.push_back(forward[m].covers[0].op);
      for (size_t s = 0; s < backward.size(); ++s)
        if (!backward[s].covers.empty() &&
            std::find(ops.begin(), ops.end(), backward[s].covers[0].op) != ops.end())
          backward_members.push_back(s);
      const auto backward_lookup = [&](const MemberOperand& operand) {
        if (forward[members[operand.member]].covers.empty()) return Value::none;
        const Value value =
            (*scope.operands)[forward[members[operand.member]].covers[0].op].find(operand.name);
        return exists(value) ? value : match[operand];
      };
      Refusal refusal = fusion->refuse != nullptr ? fusion->refuse(match) : std::nullopt;
      if (!refusal)
        refusal = join(
            forward, backward, *fusion, members, backward_members,
            [&](const MemberOperand& operand) { return match[operand]; }, backward_lookup,
            options_of(forward, members), scope);
      note(scope, *fusion, place, refusal);
    }
  }
}

void fuse_groups_jointly(Steps& forward, Steps& backward, const std::vector<OpGroup>& groups,
                         const FusionScope& scope) {
  for (const OpGroup& group : groups) {
    if (is_skipped(*group.fusion, scope)) continue;
    const std::string place =
        "ops " + std::to_string(group.first) + " to " + std::to_string(group.last);
    const Members ahead = members_of_ops(forward, group.first, group.last, scope);
    const Members back = members_of_ops(backward, group.first, group.last, scope);
    const Lookup lookup = group_lookup(group, scope);
    const Refusal refusal = ahead.empty() ? Refusal("none of these ops has a step here")
                                          : join(forward, backward, *group.fusion, ahead, back,
                                                 lookup, lookup, {group.options}, scope);
    note(scope, *group.fusion, place, refusal);
  }
}

}  // namespace tandem
