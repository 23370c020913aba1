#include "planner/schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>

#include "planner/glue.h"

namespace tandem {

namespace {

/// Position of the step that writes a value, by value; values that no step writes have none.
std::map<Value, size_t> writers_of(const Steps& steps) {
  std::map<Value, size_t> writers;
  for (size_t s = 0; s < steps.size(); ++s)
    for (const Value value : steps[s].writes)
      if (exists(value)) writers.emplace(value, s);
  return writers;
}

/// Steps that must run before `step`, by what it and they read.
std::set<size_t> ancestors_of(size_t step, const Steps& steps,
                              const std::map<Value, size_t>& writers) {
  std::set<size_t> found;
  std::vector<size_t> open{step};
  while (!open.empty()) {
    const size_t next = open.back();
    open.pop_back();
    for (const Value value : steps[next].reads) {
      const auto writer = writers.find(value);
      if (writer != writers.end() && writer->second != next && found.insert(writer->second).second)
        open.push_back(writer->second);
    }
  }
  return found;
}

/// Appends the quantize steps of forward whose codes backward reads; returns how many.
size_t quantize_again(const Steps& forward, Steps& backward) {
  Steps again;
  for (const Step& step : forward)
    if (step.kind == kQuantizeKind && step.mutates.empty() &&
        std::any_of(backward.begin(), backward.end(),
                    [&](const Step& reader) { return reads(reader, step.writes[0]); }))
      again.push_back(step);
  backward.insert(backward.end(), again.begin(), again.end());
  return again.size();
}

/// Removes those of the last `count` steps whose source no other step writes or reads: for them alone it would have to be kept.
void drop_needless(size_t count, Steps& backward) {
  const auto first = backward.end() - static_cast<std::ptrdiff_t>(count);
  backward.erase(std::remove_if(first, backward.end(),
                                [&](const Step& again) {
                                  const Value source = again.reads[0];
                                  return std::none_of(
                                      backward.begin(), first, [&](const Step& step) {
                                        return writes(step, source) || reads(step, source);
                                      });
                                }),
                 backward.end());
}

}  // namespace

void choose_reemitted(const Steps& forward, Steps& backward,
                      const std::vector<bool>& is_free_to_keep,
                      const std::vector<Names>& reemit_reads) {
  const size_t quantized_again = quantize_again(forward, backward);
  // A candidate is a write that is no gradient. All are taken out first, so that `writers` holds only what is sure to be written.
  struct Candidate {
    size_t step, write;
    Value value;
  };
  std::vector<Candidate> candidates;
  for (size_t s = 0; s < backward.size(); ++s)
    for (size_t w = 0; w < backward[s].writes.size(); ++w)
      if (exists(backward[s].writes[w]) && !backward[s].write_names[w].starts_with("grad_") &&
          !backward[s].covers.empty()) {
        candidates.push_back({s, w, backward[s].writes[w]});
        backward[s].writes[w] = Value::none;
      }
  std::set<size_t> writes_again;
  for (const Candidate& candidate : candidates) {
    if (is_free_to_keep[index_of(candidate.value)]) continue;
    const auto ancestors = ancestors_of(candidate.step, backward, writers_of(backward));
    bool is_read = false, is_needed_before = false;
    for (size_t s = 0; s < backward.size(); ++s) {
      if (s == candidate.step || !reads(backward[s], candidate.value)) continue;
      is_read = true;
      is_needed_before |= ancestors.count(s) != 0;
    }
    if (!is_read || is_needed_before || reads(backward[candidate.step], candidate.value)) continue;
    backward[candidate.step].writes[candidate.write] = candidate.value;
    writes_again.insert(candidate.step);
  }
  for (size_t s = 0; s < backward.size(); ++s) {
    if (writes_again.count(s) != 0 || backward[s].covers.size() != 1) continue;
    for (const auto& name : reemit_reads[backward[s].covers[0].op])
      if (const size_t read = position(backward[s].read_names, name); read != npos)
        backward[s].reads[read] = Value::none;
  }
  drop_needless(quantized_again, backward);
}

void schedule(Steps& steps) {
  const auto writers = writers_of(steps);
  std::vector<bool> done(steps.size());
  Steps ordered;
  ordered.reserve(steps.size());
  const auto is_ready = [&](size_t s) {
    for (const Value value : steps[s].reads)
      if (const auto writer = writers.find(value);
          exists(value) && writer != writers.end() && writer->second != s && !done[writer->second])
        return false;
    for (size_t earlier = 0; earlier < s; ++earlier)
      if (!done[earlier])
        for (const Value value : steps[s].mutates)
          if (std::find(steps[earlier].mutates.begin(), steps[earlier].mutates.end(), value) !=
              steps[earlier].mutates.end())
            return false;
    return true;
  };
  while (ordered.size() < steps.size()) {
    size_t next = 0;
    while (next < steps.size() && (done[next] || !is_ready(next))) ++next;
    TORCH_INTERNAL_ASSERT(next < steps.size(), "a plan's steps depend on each other in a circle");
    done[next] = true;
    ordered.push_back(steps[next]);
  }
  steps = std::move(ordered);
}

Values values_from_forward(const Steps& backward, const Values& output_gradients) {
  const auto writers = writers_of(backward);
  Values values;
  for (const Step& step : backward)
    for (const Value value : step.reads) {
      const bool is_given = std::find(output_gradients.begin(), output_gradients.end(), value) !=
                            output_gradients.end();
      if (exists(value) && !is_given && writers.count(value) == 0 &&
          std::find(values.begin(), values.end(), value) == values.end())
        values.push_back(value);
    }
  return values;
}

void find_dead(Steps& steps, const std::vector<bool>& stays) {
  std::set<Value> seen;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    step->dead.clear();
    for (const Values* list : {&step->reads, &step->writes})
      for (const Value value : *list)
        if (exists(value) && !stays[index_of(value)] && seen.insert(value).second)
          step->dead.push_back(value);
  }
}

}  // namespace tandem
