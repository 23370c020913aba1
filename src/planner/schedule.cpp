#include "planner/schedule.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <functional>
#include <map>
#include <queue>
#include <set>
#include <span>
#include <unordered_map>

namespace tandem {

namespace {

/// By value: the first step that writes it.
std::unordered_map<Value, size_t> writers_of(const Steps& steps) {
  std::unordered_map<Value, size_t> writers;
  for (size_t s = 0; s < steps.size(); ++s)
    for (const Value value : steps[s].writes)
      if (exists(value)) writers.try_emplace(value, s);
  return writers;
}

/// The steps that read a value.
class Readers {
 public:
  explicit Readers(const Steps& steps) {
    for (size_t s = 0; s < steps.size(); ++s)
      for (const Value value : steps[s].reads)
        if (exists(value)) {
          if (index_of(value) >= readers_.size()) readers_.resize(index_of(value) + 1);
          auto& places = readers_[index_of(value)];
          if (places.empty() || places.back() != s) places.push_back(static_cast<uint32_t>(s));
        }
  }
  std::span<const uint32_t> of(Value value) const {
    if (!exists(value) || index_of(value) >= readers_.size()) return {};
    return {readers_[index_of(value)].data(), readers_[index_of(value)].size()};
  }

 private:
  std::vector<c10::SmallVector<uint32_t, 2>> readers_;
};

/// Finds out whether a step waits for others, by what it reads. Each search goes from readers to
/// their readers, and ends as soon as it finds its target: in a chain, at once.
class Waiting {
 public:
  Waiting(const Steps& steps, const Readers& readers)
      : steps_(steps), readers_(readers), seen_in_(steps.size()) {}

  /// Whether `last` depends on any of `first`, through what it and others read.
  bool waits(size_t last, std::span<const uint32_t> first) {
    ++search_;
    open_.clear();
    for (const size_t step : first)
      if (step != last) enter(step);
    while (!open_.empty()) {
      const size_t next = open_.back();
      open_.pop_back();
      for (const Value value : steps_[next].writes)
        for (const size_t reader : readers_.of(value)) {
          if (reader == last) return true;
          enter(reader);
        }
    }
    return false;
  }

 private:
  void enter(size_t step) {
    if (seen_in_[step] == search_) return;
    seen_in_[step] = search_;
    open_.push_back(step);
  }

  const Steps& steps_;
  const Readers& readers_;
  std::vector<size_t> seen_in_;  // by step: the last search that visited it
  std::vector<size_t> open_;
  size_t search_ = 0;
};

/// Appends forward's quantize steps whose codes backward reads and that are not free to keep, and
/// forward's casts that write a value in `requested`. Returns the number of appended steps.
size_t quantize_again(const Steps& forward, Steps& backward,
                      const std::vector<bool>& is_free_to_keep, const Values& requested) {
  Steps again;
  {
    const Readers readers(backward);
    for (const Step& step : forward)
      if ((step.kind == StepKind::quantize && step.mutates.empty() &&
           std::ranges::any_of(step.writes,
                               [&](Value value) {
                                 return exists(value) && !is_free_to_keep[index_of(value)] &&
                                        !readers.of(value).empty();
                               })) ||
          (step.kind == StepKind::cast && std::ranges::count(requested, step.writes[0]) != 0))
        again.push_back(step);
  }
  backward.insert(backward.end(), again.begin(), again.end());
  return again.size();
}

/// Removes those of the last `count` steps whose source no other step reads or writes and that is
/// not in `requested`: the source would have to be kept for them alone.
void drop_needless(size_t count, const Values& requested, Steps& backward) {
  const auto first = backward.end() - static_cast<std::ptrdiff_t>(count);
  std::set<Value> used(requested.begin(), requested.end());
  if (count != 0)
    for (auto step = backward.begin(); step != first; ++step)
      for (const Values* list : {&step->reads, &step->writes})
        used.insert(list->begin(), list->end());
  backward.erase(std::remove_if(first, backward.end(),
                                [&](const Step& again) { return used.count(again.reads[0]) == 0; }),
                 backward.end());
}

}  // namespace

bool only_writes_again(const Step& step, const std::vector<OperandTable>& operands) {
  if (step.kind != StepKind::op || step.covers[0].op >= operands.size()) return false;
  const Part part = step.covers[0];
  return operands[part.op].kind().backward[part.nth].def->writes_again;
}

bool is_again(const Step& step, Value value, const std::vector<Type>& types) {
  if (!exists(value) || step.covers.empty()) return false;
  const Origin origin = types[index_of(value)].origin;
  return origin != Origin::gradient && origin != Origin::intermediate;
}

void choose_reemitted(const Steps& forward, Steps& backward, const std::vector<Type>& types,
                      const std::vector<bool>& is_free_to_keep,
                      const std::vector<OperandTable>& operands, const Values& requested) {
  const size_t quantized_again = quantize_again(forward, backward, is_free_to_keep, requested);
  // All candidates are taken out first, so that the remaining writes are certain to happen.
  struct Candidate {
    size_t step, write;
    Value value;
  };
  std::vector<Candidate> candidates;
  for (size_t s = 0; s < backward.size(); ++s)
    for (size_t w = 0; w < backward[s].writes.size(); ++w)
      if (is_again(backward[s], backward[s].writes[w], types)) {
        candidates.push_back({s, w, backward[s].writes[w]});
        backward[s].writes[w] = Value::none;
      }
  const Readers readers(backward);
  Waiting waiting(backward, readers);
  std::vector<bool> writes_again(backward.size());
  for (const Candidate& candidate : candidates) {
    if (only_writes_again(backward[candidate.step], operands)) continue;
    const auto read_by = readers.of(candidate.value);
    if (is_free_to_keep[index_of(candidate.value)] || read_by.empty() ||
        reads(backward[candidate.step], candidate.value) || waiting.waits(candidate.step, read_by))
      continue;
    // A value that a gathering collective reads is kept: the collective can then start early, and a
    // shard is small.
    if (std::ranges::any_of(
            read_by, [&](size_t reader) { return only_writes_again(backward[reader], operands); }))
      continue;
    backward[candidate.step].writes[candidate.write] = candidate.value;
    writes_again[candidate.step] = true;
  }
  // Steps that only re-emit: the last first, because an earlier one may write what it reads.
  std::map<Value, Value> behind;  // a re-emitted value, and a gradient that exists by then
  for (auto candidate = candidates.rbegin(); candidate != candidates.rend(); ++candidate) {
    Step& step = backward[candidate->step];
    const auto read_by = readers.of(candidate->value);
    if (!only_writes_again(step, operands) || is_free_to_keep[index_of(candidate->value)] ||
        read_by.size() !=
            1)  // of several readers, one may run without the reader whose gradient is known
      continue;
    const Step& reader = backward[read_by[0]];
    const auto known =
        std::ranges::find_if(reader.writes, [&](Value value) { return behind.count(value) != 0; });
    const auto gradient = std::ranges::find_if(reader.reads, [&](Value value) {
      return exists(value) && types[index_of(value)].origin == Origin::gradient;
    });
    if (known == reader.writes.end() && gradient == reader.reads.end()) continue;
    const Value token = known != reader.writes.end() ? behind.at(*known) : *gradient;
    behind[candidate->value] = token;
    step.writes[candidate->write] = candidate->value;
    step.read_names.push_back("behind");
    step.reads.push_back(token);
    writes_again[candidate->step] = true;
  }
  for (size_t s = 0; s < backward.size(); ++s) {
    if (!writes_again[s])
      for_each_read_to_reemit(backward[s], operands,
                              [&](size_t read) { backward[s].reads[read] = Value::none; });
  }
  drop_needless(quantized_again, requested, backward);
}

void schedule(Steps& steps) {
  const auto writers = writers_of(steps);
  std::vector<std::vector<uint32_t>> behind(steps.size());  // by step: the steps that wait for it
  std::vector<size_t> missing(steps.size());                // by step: how many it waits for
  const auto wait = [&](size_t later, size_t earlier) {
    if (earlier == npos || earlier == later) return;
    behind[earlier].push_back(static_cast<uint32_t>(later));
    ++missing[later];
  };
  struct Touched {
    size_t mutated = npos;
    std::vector<size_t> read_since;
  };
  std::map<Value, Touched> touched;  // of the values that any step mutates
  for (const Step& step : steps)
    for (const Value value : step.mutates) touched[value];
  for (size_t s = 0; s < steps.size(); ++s) {
    for (const Value value : steps[s].reads) {
      if (const auto writer = writers.find(value); writer != writers.end()) wait(s, writer->second);
      const auto found = touched.find(value);
      if (found == touched.end()) continue;
      wait(s, found->second.mutated);
      found->second.read_since.push_back(s);
    }
    for (const Value value : steps[s].mutates) {
      Touched& before = touched[value];
      wait(s, before.mutated);
      for (const size_t reader : before.read_since) wait(s, reader);
      before = {s, {}};
    }
  }
  // Steps that start come first, then those that compute, then those that wait; ties by position.
  using Turn = std::pair<Phase, size_t>;
  std::priority_queue<Turn, std::vector<Turn>, std::greater<>> ready;
  for (size_t s = 0; s < steps.size(); ++s)
    if (missing[s] == 0) ready.emplace(steps[s].phase, s);
  Steps ordered;
  ordered.reserve(steps.size());
  while (!ready.empty()) {
    const size_t next = ready.top().second;
    ready.pop();
    for (const size_t later : behind[next])
      if (--missing[later] == 0) ready.emplace(steps[later].phase, later);
    ordered.push_back(std::move(steps[next]));
  }
  TORCH_INTERNAL_ASSERT(ordered.size() == steps.size(),
                        "a plan's steps depend on each other in a circle");
  steps = std::move(ordered);
}

Values values_from_forward(const Steps& backward, const Values& output_gradients) {
  const auto writers = writers_of(backward);
  std::set<Value> known(output_gradients.begin(), output_gradients.end());
  Values values;
  for (const Step& step : backward)
    for (const Value value : step.reads)
      if (exists(value) && !writers.contains(value) && known.insert(value).second)
        values.push_back(value);
  return values;
}

}  // namespace tandem
