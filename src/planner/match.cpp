#include "planner/match.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/json_fields.h"
#include "planner/draft.h"

namespace tandem {

namespace {

/// Whether `is` holds for one of the alternative names of a pattern's step.
template <typename Is>
bool any_name(const PatternStep& pattern, Is&& is) {
  for (std::string_view rest = pattern.name;;) {
    const size_t bar = rest.find('|');
    if (is(rest.substr(0, bar))) return true;
    if (bar == std::string_view::npos) return false;
    rest.remove_prefix(bar + 1);
  }
}

bool matches(const Step& step, const PatternStep& pattern) {
  if (step.kind != pattern.kind) return false;
  if (step.kind != StepKind::op) return true;
  const std::string& name = pattern.is_family ? step.family : step.name;
  return any_name(pattern, [&](std::string_view each) { return each == name; });
}

/// The steps of registered ops that may stand in the lists of a pass, keyed by their own names or
/// by those of their families.
using KnownSteps = std::multimap<std::string, const StepDef*, std::less<>>;
KnownSteps known_steps(Pass pass, bool of_families) {
  KnownSteps steps;
  for (const std::string& name : op_names()) {
    const OpDef& def = op_def(name);
    const std::string_view called = of_families ? def.family : def.name;
    const auto add = [&](const StepDef& step) { steps.emplace(step_name(called, step), &step); };
    if (called.empty()) continue;
    std::ranges::for_each(def.forward, add);
    if (def.in_place) add(*def.in_place);
    if (pass == Pass::backward) std::ranges::for_each(def.backward, add);
  }
  return steps;
}

/// Positions of the steps that may precede the one at `place` in the chain.
std::vector<size_t> sources_of(const Fusion& fusion, size_t place) {
  if (place == 0) return {};
  if (const size_t named = fusion.pattern[place].source; named != npos) return {named};
  std::vector<size_t> sources{place - 1};
  while (sources.back() > 0 && fusion.pattern[sources.back()].is_optional)
    sources.push_back(sources.back() - 1);
  return sources;
}

/// Throws if the pattern has an optional step where none may stand: first, in the joint pass, or
/// before a step that is `behind` it.
void check_optional(const Fusion& fusion, size_t place) {
  const PatternStep& pattern = fusion.pattern[place];
  TORCH_CHECK_VALUE(!pattern.is_optional || fusion.pass != Pass::joint, "fusion \"", fusion.name,
                    "\": expected optional steps in a pass of one direction, got one at ", place,
                    " in the joint pass. Register a fusion without it.");
  TORCH_CHECK_VALUE(
      place == 0 ? !pattern.is_optional
                 : pattern.source == npos || !fusion.pattern[pattern.source].is_optional,
      "fusion \"", fusion.name, "\": expected step ", place,
      " of its pattern to be behind one that is always there, got ",
      place == 0 ? "none before it" : "an optional one", ". Name another with behind(place).");
  TORCH_CHECK_VALUE(pattern.needs == npos || pattern.needs < fusion.pattern.size(), "fusion \"",
                    fusion.name, "\": expected step ", place, " to need one of the ",
                    fusion.pattern.size(), " of its pattern, got step ", pattern.needs,
                    ". Count from 0.");
}

void check_named(const Fusion& fusion, size_t place, std::string_view name,
                 const KnownSteps& known) {
  std::set<std::string> steps, of_this_op;
  const std::string_view op = name.substr(0, name.find('.'));
  for (const auto& [step, def] : known) {
    steps.insert(step);
    if (step.substr(0, step.find('.')) == op) of_this_op.insert(step);
  }
  TORCH_CHECK_VALUE(steps.contains(std::string(name)), "fusion \"", fusion.name,
                    "\": expected step ", place, " of its pattern to be one of ",
                    c10::Join(", ", of_this_op.empty() ? steps : of_this_op), " in the ",
                    pass_name(fusion.pass), " pass, got \"", shown(name),
                    "\". Register the op before the fusion, or name another step.");
}

/// `names`: what the steps at this position write or read; empty if only the planner knows.
void check_link(const Fusion& fusion, size_t place, std::string_view whose,
                const std::set<std::string_view>& names, std::string_view link) {
  TORCH_CHECK_VALUE(link.empty() || link == kAnyRead || names.empty() || names.contains(link),
                    "fusion \"", fusion.name, "\": expected step ", place,
                    " of its pattern to be reached through one of ", c10::Join(", ", names), " of ",
                    whose, ", got \"", shown(link), "\". Name one of them.");
}

/// The value through which a chain leaves a step towards `next`: what the step writes under the
/// name, else what it reads.
Value link_from(const Step& step, const PatternStep& next) {
  const size_t write =
      next.result.empty() ? step.main_write : position(step.write_names, next.result);
  if (write < step.writes.size()) return step.writes[write];
  const size_t read = position(step.read_names, next.result);
  return read < step.reads.size() ? step.reads[read] : Value::none;
}

/// Whether a step reads the chain's value as `pattern` says. A sum may read it as either term.
bool takes_up(const Step& step, Value link, const PatternStep& pattern) {
  if (pattern.operand == kAnyRead || (step.kind == StepKind::add && pattern.operand.empty()))
    return reads(step, link);
  const size_t read =
      pattern.operand.empty() ? step.main_read : position(step.read_names, pattern.operand);
  return read < step.reads.size() && step.reads[read] == link;
}

std::string place_of(const StepList& steps, const Members& members) {
  std::string place;
  for (const size_t m : members) {
    if (m == npos) continue;
    if (!place.empty()) place += " + ";
    place += steps[m].covers.empty() ? steps[m].name
                                     : std::to_string(steps[m].covers[0].op) + "." + steps[m].name;
  }
  return place;
}

template <typename Has>
Refusal check_run(const FusedRun& run, const Match& match, Has&& has) {
  for (const auto* operands : {&run.reads, &run.writes})
    for (const MemberOperand& operand : *operands)
      if (match.has(operand.member) && !has(operand, operands == &run.reads))
        return "step " + match.steps[operand.member]->name +
               (operand.name == kOtherRead
                    ? " has not one read that is left"
                    : " has no operand called \"" + std::string(operand.name) + "\"");
  return std::nullopt;
}

}  // namespace

void check_pattern(const Fusion& fusion) {
  constexpr std::ptrdiff_t kMostOptional = 8;  // each doubles the number of forms
  const auto optional = std::ranges::count(fusion.pattern, true, &PatternStep::is_optional);
  TORCH_CHECK_VALUE(optional <= kMostOptional, "fusion \"", fusion.name, "\": expected at most ",
                    kMostOptional, " optional steps, got ", optional,
                    ". Register several fusions.");
  std::vector<std::set<std::string_view>> linked;  // what the steps so far write and read
  for (size_t place = 0; place < fusion.pattern.size(); ++place) {
    const PatternStep& pattern = fusion.pattern[place];
    TORCH_CHECK_VALUE(pattern.source == npos || pattern.source < place, "fusion \"", fusion.name,
                      "\": expected step ", place,
                      " of its pattern to be behind an earlier one, got step ", pattern.source,
                      ". Count from 0, in the order of the pattern.");
    check_optional(fusion, place);
    std::set<std::string_view> reads, writes;
    if (pattern.kind == StepKind::op) {
      const KnownSteps known = known_steps(fusion.pass, pattern.is_family);
      any_name(pattern, [&](std::string_view name) {
        check_named(fusion, place, name, known);
        const auto [first, last] = known.equal_range(name);
        for (auto step = first; step != last; ++step) {
          reads.insert(step->second->reads.begin(), step->second->reads.end());
          writes.insert(step->second->writes.begin(), step->second->writes.end());
        }
        return false;
      });
    }
    for (const size_t source : sources_of(fusion, place))
      check_link(fusion, place, "the step before", linked[source], pattern.result);
    check_link(fusion, place, "its own", reads, pattern.operand);
    linked.push_back(std::move(writes));
    if (!linked.back().empty()) linked.back().insert(reads.begin(), reads.end());
  }
}

std::vector<Form> forms_of(const Fusion& fusion) {
  std::vector<Form> forms{{}};
  for (const PatternStep& step : fusion.pattern)
    for (size_t i = 0, count = forms.size(); i < count; ++i) {
      if (step.is_optional) (forms.emplace_back(forms[i])).push_back(false);
      forms[i].push_back(true);
    }
  std::erase_if(forms, [&](const Form& form) {
    for (size_t p = 0; p < form.size(); ++p)
      if (const size_t needed = fusion.pattern[p].needs; form[p] && needed != npos && !form[needed])
        return true;
    return form.size() > 1 && std::ranges::count(form, true) == 1;
  });
  std::ranges::sort(forms, std::greater(), [](const Form& form) {
    return std::pair(std::ranges::count(form, true), form);  // ties: earlier members first
  });
  return forms;
}

Members find_pattern(const StepList& steps, size_t start, const Fusion& fusion, const Form& form) {
  if (!steps.has(start) || !matches(steps[start], fusion.pattern[0])) return {};
  Members members{start};
  for (size_t p = 1, before = start; p < form.size(); ++p) {
    const PatternStep& pattern = fusion.pattern[p];
    members.push_back(npos);
    if (!form[p]) continue;
    const Value link =
        link_from(steps[pattern.source == npos ? before : members[pattern.source]], pattern);
    if (!exists(link)) return {};
    const auto readers = steps.readers(link);
    const auto found = std::find_if(readers.begin(), readers.end(), [&](size_t reader) {
      return matches(steps[reader], pattern) && takes_up(steps[reader], link, pattern) &&
             std::find(members.begin(), members.end(), reader) == members.end();
    });
    if (found == readers.end()) return {};
    members[p] = before = *found;
  }
  return members;
}

Candidate::Candidate(const StepList& list, const Members& members, const Fusion& fusion)
    : name(fusion.name), place(place_of(list, members)) {
  for (size_t p = 0; p < members.size(); ++p) {
    const Step* step = members[p] == npos ? nullptr : &list[members[p]];
    steps.push_back(step);
    options.push_back(step == nullptr || step->options.empty() ? nullptr : step->options[0]);
    if (step != nullptr) name += fusion.pattern[p].suffix;
  }
}

Refusal check_names(const Fusion& fusion, const Match& match, const FusionScope& scope) {
  const auto of_step = [&](const MemberOperand& operand, bool is_read) {
    const Step& step = *match.steps[operand.member];
    if (match.has(operand) || !is_list(operand.name) || step.covers.empty())
      return match.has(operand);
    const OpKind& op = (*scope.operands)[step.covers[0].op].kind();  // a list without elements
    return (is_read ? op.read(operand.name, false) : op.write(operand.name, false)).has_value();
  };
  if (auto refusal = check_run(fusion.run, match, of_step)) return refusal;
  return check_run(fusion.backward, match, [&](const MemberOperand& operand, bool is_read) {
    const Step& step = *match.steps[operand.member];
    if (step.covers.empty()) return true;
    const OpKind& op = (*scope.operands)[step.covers[0].op].kind();
    return (is_read ? op.read(operand.name, true) : op.write(operand.name, true)).has_value();
  });
}

}  // namespace tandem
