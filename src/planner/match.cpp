#include "planner/match.h"

#include <algorithm>

namespace tandem {

namespace {

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

std::string place_of(const StepList& steps, const Members& members) {
  std::string place;
  for (const size_t m : members) {
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
      if (!has(operand, operands == &run.reads))
        return "step " + match.steps[operand.member]->name +
               (operand.name == kOtherRead
                    ? " has not one read that is left"
                    : " has no operand called \"" + std::string(operand.name) + "\"");
  return std::nullopt;
}

}  // namespace

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

Candidate::Candidate(const StepList& list, const Members& members)
    : place(place_of(list, members)) {
  for (const size_t m : members) {
    steps.push_back(&list[m]);
    options.insert(options.end(), list[m].options.begin(), list[m].options.end());
  }
}

Refusal check_names(const Fusion& fusion, const Match& match, const FusionScope& scope) {
  const auto of_step = [&](const MemberOperand& operand, bool) { return match.has(operand); };
  if (auto refusal = check_run(fusion.run, match, of_step)) return refusal;
  return check_run(fusion.backward, match, [&](const MemberOperand& operand, bool is_read) {
    const Step& step = *match.steps[operand.member];
    if (step.covers.empty()) return true;
    const OpKind& op = (*scope.operands)[step.covers[0].op].kind();
    return (is_read ? op.read(operand.name, true) : op.write(operand.name, true)).has_value();
  });
}

}  // namespace tandem
