#include "planner/liveness.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "planner/value_set.h"

namespace tandem {

namespace {

std::string list_of(const std::vector<Part>& parts) {
  std::ostringstream text;
  for (const Part& part : parts)
    text << (text.tellp() > 0 ? ", " : "") << "op " << part.op
         << (part.is_backward ? " backward " : " forward ") << part.nth;
  return text.str();
}

}  // namespace

std::vector<Part> parts_of(const Steps& steps) {
  std::vector<Part> parts;
  for (const Step& step : steps) parts.insert(parts.end(), step.covers.begin(), step.covers.end());
  std::sort(parts.begin(), parts.end());
  return parts;
}

void check_coverage(const std::vector<Part>& before, const Steps& after, const char* pass) {
  const std::vector<Part> covered = parts_of(after);
  TORCH_INTERNAL_ASSERT(covered == before, "the ", pass, " pass was to cover ", list_of(before),
                        " and covers ", list_of(covered));
}

bool is_in_place(const Step& step, Value value, const std::vector<Type>& types) {
  const Value owner = types[index_of(value)].view_of;
  return exists(owner) && std::ranges::find(step.mutates, owner) != step.mutates.end();
}

namespace {

/// Drops the effects of a fused step for which no absorbed gradient is requested.
void drop_unasked_effects(Step& step, const std::function<bool(size_t)>& is_requested) {
  uint32_t dropped = 0;
  for (Effect& effect : step.effects) {
    effect.mutates.first -= dropped;
    const auto absorbed = step.absorbs.begin() + effect.absorbs.first;
    if (effect.absorbs.count == 0 ||
        std::any_of(absorbed, absorbed + effect.absorbs.count, is_requested))
      continue;
    const auto first = step.mutates.begin() + effect.mutates.first;
    step.mutates.erase(first, first + effect.mutates.count);
    dropped += std::exchange(effect.mutates.count, 0);
  }
}

}  // namespace

void drop_dead_steps(Steps& steps, const std::vector<Type>& types,
                     const std::function<bool(Value)>& is_demanded_outside,
                     const std::function<bool(size_t)>& is_requested) {
  const auto is_of_the_caller = [&](Value value) {
    const Origin origin = types[index_of(value)].origin;
    return origin != Origin::workspace && origin != Origin::state;
  };
  ValueSet read(types.size()), recorded(types.size()), live_records(types.size());
  std::multimap<Value, Value> casts;
  for (const Step& step : steps) {
    if (step.kind == StepKind::record_amax) recorded.add(step.reads[0]);
    if (step.kind == StepKind::cast) casts.emplace(step.reads[0], step.writes[0]);
  }
  const auto is_read = [&](Value value) {
    const auto [first, last] = casts.equal_range(value);
    return read(value) ||
           std::any_of(first, last, [&](const auto& cast) { return read(cast.second); });
  };
  Steps live;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (step->kind == StepKind::record_amax) {  // it lives if the step that writes its amax does
      live.push_back(std::move(*step));
      continue;
    }
    drop_unasked_effects(*step, is_requested);
    bool needed = std::ranges::any_of(step->mutates, is_of_the_caller);
    // While calibrating, a step writes an amax and no codes. It is needed if a product reads its
    // source, unchanged or cast.
    const auto is_amax = [&](Value value) { return !exists(value) || recorded(value); };
    if (step->kind != StepKind::op && std::ranges::any_of(step->writes, exists) &&
        std::ranges::all_of(step->writes, is_amax))
      needed |= is_read(step->reads[0]);
    if (!step->absorbs.empty()) needed = std::ranges::any_of(step->absorbs, is_requested);
    for (Value& value : step->writes) {
      if (!exists(value) || recorded(value)) continue;
      if (!read(value) && !is_demanded_outside(value) && !is_in_place(*step, value, types))
        value = Value::none;
      needed |= exists(value);
    }
    if (!needed) continue;
    for (const Value value : step->writes)
      if (exists(value) && recorded(value)) live_records.add(value);
    read.add(step->reads);
    live.push_back(std::move(*step));
  }
  std::erase_if(live, [&](const Step& step) {
    return step.kind == StepKind::record_amax && !live_records(step.reads[0]);
  });
  std::reverse(live.begin(), live.end());
  steps = std::move(live);
}

void check_reads(const Steps& steps, std::vector<bool> is_there, const std::vector<Type>& types) {
  is_there.resize(types.size());
  for (const Step& step : steps) {
    for (const Values* list : {&step.reads, &step.mutates})
      for (const Value value : *list)
        TORCH_INTERNAL_ASSERT(!exists(value) || is_there[index_of(value)], "step ", step.name,
                              " reads ", types[index_of(value)].name,
                              ", which nothing has written");
    for (const Value value : step.writes)
      if (exists(value)) is_there[index_of(value)] = true;
    for (const Value value : step.dead) is_there[index_of(value)] = false;
  }
}

void find_dead(Steps& steps, const std::vector<bool>& stays) {
  std::vector<bool> seen(stays.size());
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    step->dead.clear();
    for (const Values* list : {&step->reads, &step->writes})
      for (const Value value : *list)
        if (exists(value) && !stays[index_of(value)] && !seen[index_of(value)]) {
          seen[index_of(value)] = true;
          step->dead.push_back(value);
        }
  }
}

}  // namespace tandem
