#include "planner/replacement.h"

#include <algorithm>

#include "fusions/table.h"
#include "planner/liveness.h"

namespace tandem {

namespace {

bool contains(const Values& values, Value value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

bool is_of_op(const Step& step) {
  return step.kind == StepKind::op || step.kind == StepKind::fused;
}

}  // namespace

bool FusionScope::skips(const std::string& fusion) const {
  return std::find(skipped->begin(), skipped->end(), fusion) != skipped->end();
}

void FusionScope::note(const Fusion& fusion, const std::string& name, const std::string& place,
                       const Refusal& refusal) {
  const std::string reason = refusal.value_or("");
  if (noted.emplace(name, place, reason).second)
    decisions->push_back({name, place, reason, std::string(fusion.picture), !is_built_in(fusion)});
}

namespace {

/// The definition of the op step behind `step`.
const StepDef& definition_of(const Step& step, const FusionScope& scope) {
  const Part part = step.covers[0];
  const OpKind& op = (*scope.operands)[part.op].kind();
  return *(part.is_backward ? op.backward : op.forward)[part.nth].def;
}

/// Makes the fused step quantize an operand as one of the members' steps does by itself.
void add_quantizer(Step& fused, const MemberOperand& operand, const std::vector<const Step*>& steps,
                   const FusionScope& scope) {
  ByGroup& own = fused.quantizers.emplace_back();
  for (const Step* step : steps) {
    if (step->quantizers.empty() || !is_step_of(*step, operand.step, scope)) continue;
    const auto& contracts = definition_of(*step, scope).contracts;
    for (size_t i = 0; i < contracts.size(); ++i) {
      if (contracts[i].operand != operand.name || own.quantizer != nullptr) continue;
      const ByGroup& of_step = step->quantizers[i];
      own = {of_step.quantizer, of_step.is_multiplied};
      if (of_step.amaxes != npos) {
        own.amaxes = fused.writes.size();
        fused.write_names.push_back("amaxes");
        fused.writes.push_back(step->writes[of_step.amaxes]);
      }
      if (of_step.given == npos) continue;
      own.given = fused.reads.size();
      fused.read_names.push_back("given");
      fused.reads.push_back(step->reads[of_step.given]);
    }
  }
}

}  // namespace

bool is_step_of(const Step& step, std::string_view names, const FusionScope& scope) {
  if (names.empty()) return true;
  if (step.kind != StepKind::op) return false;
  const std::string_view own = definition_of(step, scope).name;
  while (!names.empty()) {
    const size_t end = std::min(names.find('|'), names.size());
    if (names.substr(0, end) == own) return true;
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return false;
}

Step fused_step(const Fusion& fusion, const FusedRun& run, std::vector<Options> options,
                const Lookup& lookup, const FusionScope& scope) {
  Step step;
  step.kind = StepKind::fused;
  step.name = fusion.name;
  step.run = run.run;
  step.runs_user_code = fusion.runs_user_code;
  step.options = std::move(options);
  const auto fill = [](const std::vector<MemberOperand>& operands, const auto& find, Names& names,
                       Values& values, std::vector<ListRange>& lists) {
    for (const auto& operand : operands) {
      const Values found = find(operand);
      if (is_list(operand.name))
        lists.push_back(
            {static_cast<uint32_t>(values.size()), static_cast<uint32_t>(found.size())});
      names.insert(names.end(), found.size(), operand.name);
      values.insert(values.end(), found.begin(), found.end());
    }
  };
  fill(run.reads, lookup.read, step.read_names, step.reads, step.read_lists);
  fill(run.writes, lookup.write, step.write_names, step.writes, step.write_lists);
  if (lookup.steps == nullptr) return step;
  const auto append = [](auto& all, const auto& more, ListRange& range) {
    all.insert(all.end(), more.begin(), more.end());
    range.count += static_cast<uint32_t>(more.size());
  };
  for (const uint32_t member : run.mutates) {
    Effect& effect = step.effects.emplace_back();
    effect.mutates.first = static_cast<uint32_t>(step.mutates.size());
    effect.absorbs.first = static_cast<uint32_t>(step.absorbs.size());
    for (const Step* mutator : lookup.steps(member)) {
      append(step.mutates, mutator->mutates, effect.mutates);
      append(step.absorbs, mutator->absorbs, effect.absorbs);
    }
  }
  for (const MemberOperand& operand : run.quantizes)
    add_quantizer(step, operand, lookup.steps(operand.member), scope);
  return step;
}

Replacement::Replacement(const StepList& steps, Members members, const FusionScope& scope,
                         const std::function<bool(Value)>& is_demanded, bool only_gradients)
    : steps_(steps),
      members_(std::move(members)),
      types_(*scope.types),
      is_demanded_(is_demanded),
      only_gradients_(only_gradients) {
  std::erase(members_, npos);
  std::sort(members_.begin(), members_.end());
}

Refusal Replacement::replace(StepList& steps, Step fused) {
  if (auto refusal = check(fused)) return refusal;
  drop_undemanded_writes(fused);
  apply(steps, std::move(fused));
  return std::nullopt;
}

Refusal Replacement::check(const Step& fused) {
  for (const auto& rule : {&Replacement::check_demanded, &Replacement::check_reads,
                           &Replacement::check_writes, &Replacement::check_mutations})
    if (auto refusal = (this->*rule)(fused)) return refusal;
  Members places{members_.front(), members_.back()};
  places.insert(places.end(), members_.begin() + 1, members_.end());
  for (const size_t place : places)
    if (can_stand_at(place, fused)) {
      place_ = place;
      return std::nullopt;
    }
  return "no position is behind all that it reads and before all that reads it";
}

void Replacement::drop_undemanded_writes(Step& fused) const {
  for (Value& value : fused.writes)
    if (exists(value) && !is_demanded_outside(value) && !is_in_place(fused, value, types_))
      value = Value::none;
}

void Replacement::apply(StepList& steps, Step fused) const {
  for (const size_t m : members_) {
    fused.covers.insert(fused.covers.end(), steps_[m].covers.begin(), steps_[m].covers.end());
    fused.broadcasts_input |= steps_[m].broadcasts_input;
  }
  std::sort(fused.covers.begin(), fused.covers.end());
  steps.replace(members_, place_, std::move(fused));
}

bool Replacement::is_member(size_t place) const {
  return std::binary_search(members_.begin(), members_.end(), place);
}

bool Replacement::counts(const Step& member, Value value) const {
  return exists(value) && !(only_gradients_ && is_of_op(member) &&
                            types_[index_of(value)].origin != Origin::gradient);
}

bool Replacement::is_written_by_member(Value value) const {
  return std::any_of(members_.begin(), members_.end(), [&](size_t m) {
    return writes(steps_[m], value) && counts(steps_[m], value);
  });
}

bool Replacement::is_demanded_outside(Value value) const {
  if (is_demanded_(value)) return true;
  const auto readers = steps_.readers(value);
  return std::any_of(readers.begin(), readers.end(), [&](size_t s) { return !is_member(s); });
}

Refusal Replacement::check_demanded(const Step& fused) const {
  for (const size_t m : members_)
    for (const Value value : steps_[m].writes)
      if (counts(steps_[m], value) && is_demanded_outside(value) && !contains(fused.writes, value))
        return name(value) + " is demanded outside and the fused step does not write it";
  return std::nullopt;
}

Refusal Replacement::check_reads(const Step& fused) const {
  for (const Value value : fused.reads)
    if (exists(value) && is_written_by_member(value))
      return name(value) + " is read by the fused step, and only the steps it replaces write it";
  return std::nullopt;
}

Refusal Replacement::check_writes(const Step& fused) const {
  for (const Value value : fused.writes)
    if (exists(value) && std::none_of(members_.begin(), members_.end(),
                                      [&](size_t m) { return writes(steps_[m], value); }))
      return name(value) + " is written by the fused step, and by none of those it replaces";
  return std::nullopt;
}

/// The fused step must mutate what its members mutate, and nothing in between may see a difference.
Refusal Replacement::check_mutations(const Step& fused) const {
  for (const size_t m : members_)
    for (const Value value : steps_[m].mutates)
      if (!contains(fused.mutates, value))
        return "step " + steps_[m].name + " mutates " + name(value) +
               ", which a fused step would hide";
  const auto in_between = [&](const StepList::Places& places) -> const Step* {
    for (const size_t s : places)
      if (s > members_.front() && s < members_.back() && !is_member(s)) return &steps_[s];
    return nullptr;
  };
  for (const Value value : fused.reads)
    if (exists(value))
      if (const Step* step = in_between(steps_.mutators(value)))
        return "step " + step->name + " mutates " + name(value) + " in between";
  for (const Value value : fused.mutates) {
    const Step* step = in_between(steps_.mutators(value));
    if (step == nullptr) step = in_between(steps_.readers(value));
    if (step != nullptr)
      return "step " + step->name + " looks at " + name(value) + " in between, which it mutates";
  }
  return std::nullopt;
}

bool Replacement::can_stand_at(size_t place, const Step& fused) const {
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

}  // namespace tandem
