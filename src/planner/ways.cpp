#include "planner/ways.h"

#include <algorithm>

#include "planner/liveness.h"
#include "planner/schedule.h"

namespace tandem {

BackwardBase::BackwardBase(const Steps& whole, const Draft& draft, const ValueSet& never_again)
    : steps(whole) {
  for (size_t s = 0; s < steps.size(); ++s) {
    Step& step = steps[s];
    Values extra;
    for_each_read_to_reemit(step, draft.operands, [&](size_t read) {
      if (exists(step.reads[read])) extra.push_back(step.reads[read]);
      step.reads[read] = Value::none;
    });
    const bool is_apart = only_writes_again(step, draft.operands);
    if (is_apart) extra = step.reads;
    for (Value& value : step.writes) {
      if (!is_again(step, value, draft.types)) continue;
      if (!never_again(value) && writers.emplace(value, Writer{s, is_apart, extra}).second)
        candidates.push_back(value);
      value = Value::none;
    }
    step.asked_by = s;  // marks the copy with the index of its original
  }
  for (const Step& step : whole)  // keep what a gathering step reads, so that it can start at once
    if (only_writes_again(step, draft.operands))
      for (const Value value : step.reads) std::erase(candidates, value), writers.erase(value);
  ValueSet requested(draft.types.size(), {&draft.gradients});
  for (const Step& step : steps)  // recomputed forward steps may read joined parameters
    if (step.kind == StepKind::join) requested.add(step.writes);
  drop_dead_steps(steps, draft.types, requested, [](size_t) { return true; });
  for (const Step& step : steps) places.push_back(step.asked_by);
}

Ways::Ways(const BackwardBase& base, const Draft& draft, const PerRow& per_row,
           double flops_per_byte)
    : base_(base),
      draft_(draft),
      per_row_(per_row),
      flops_per_byte_(flops_per_byte),
      item_of_(draft.types.size(), npos),
      reruns_(draft.forward.size()),
      is_overwritten_(draft.types.size()),
      is_of_backward_(draft.types.size()) {
  for (const Step& step : base.steps) is_of_backward_.add(step.writes);
  for (const Step& step : draft.forward)
    if (step.kind != StepKind::refresh) is_overwritten_.add(step.mutates);
  writer_.assign(draft.types.size(), npos);
  for (size_t s = 0; s < draft.forward.size(); ++s)
    for (const Value value : draft.forward[s].writes)
      if (exists(value)) writer_[index_of(value)] = s;
  for (size_t b = 0; b < base.steps.size(); ++b)
    for (const Value value : base.steps[b].reads)
      if (const size_t item = item_for(value); item != npos) {
        items_[item].readers.push_back(b);
        needed_.push_back(item);
      }
  std::ranges::sort(needed_);
  needed_.erase(std::unique(needed_.begin(), needed_.end()), needed_.end());
  for (size_t i = 0; i < items_.size(); ++i) complete(i);  // complete() may add items
  for (const Value value : base.candidates)
    if (item_of_[index_of(value)] != npos) candidates_.push_back(item_of_[index_of(value)]);
  find_successors();
}

Outcome Ways::outcome(const std::vector<bool>& keep) const {
  std::vector<bool> never(items_.size());
  for (;;) {
    Outcome found;
    if (!spread(keep, never, found)) return found;
    if (is_in_order(found, never)) return weighed(std::move(found));
  }
}

/// The item of a value, created at the first look-up; npos if backward has the value anyway.
size_t Ways::item_for(Value value) {
  if (!exists(value)) return npos;
  size_t& known = item_of_[index_of(value)];
  if (known != npos || draft_.types[index_of(value)].origin != Origin::result ||
      is_of_backward_(value))
    return known;
  known = items_.size();
  Item& made = items_.emplace_back();
  made.value = value;
  made.bytes = per_row_.bytes[index_of(value)];
  return known;
}

bool Ways::can_run_again(const Step& step) const {
  switch (step.kind) {
    case StepKind::op:
    case StepKind::fused:
    case StepKind::cast:
    case StepKind::rename:
    case StepKind::quantize:
    case StepKind::watched_quantize:
    case StepKind::dequantize:
      break;
    case StepKind::refresh:
      return true;
    default:
      return false;
  }
  return !step.runs_user_code && step.mutates.empty() && step.phase == Phase::compute &&
         std::ranges::none_of(step.reads, [&](Value value) { return is_overwritten_(value); });
}

void Ways::complete(size_t index) {
  const Value value = items_[index].value;
  const size_t step = writer_[index_of(value)];
  const bool is_workspace =
      step != npos && draft_.forward[step].kind == StepKind::refresh;  // a workspace is never kept
  items_[index].can_be_kept = step != npos && !is_workspace;
  if (step != npos && can_run_again(draft_.forward[step])) add_rerun(index, step);
  if (const auto writer = base_.writers.find(value); writer != base_.writers.end()) {
    const auto place = std::ranges::find(base_.places, writer->second.step);
    items_[index].has_writer_apart = writer->second.is_apart;
    if (!writer->second.is_apart && place != base_.places.end())
      items_[index].writer = static_cast<size_t>(place - base_.places.begin());
    for (const Value read : writer->second.reads)
      if (const size_t of = item_for(read); of != npos) items_[index].writer_reads.push_back(of);
  }
  Item& done = items_[index];
  const bool has_choice = done.step != npos || done.writer != npos || done.has_writer_apart;
  done.is_fixed = is_workspace || !done.can_be_kept || !has_choice || done.bytes <= 0;
}

void Ways::add_rerun(size_t index, size_t step) {
  items_[index].step = step;
  Rerun& rerun = reruns_[step];
  rerun.writes.push_back(index);
  if (rerun.writes.size() > 1) return;
  const Step& forward = draft_.forward[step];
  rerun.is_view = std::ranges::all_of(forward.writes, [&](Value value) {
    return !exists(value) || exists(draft_.types[index_of(value)].view_of);
  });
  for (const Value value : forward.reads) {
    if (!exists(value)) continue;
    if (!rerun.is_view) rerun.bytes += per_row_.bytes[index_of(value)];
    if (const size_t read = item_for(value); read != npos) rerun.reads.push_back(read);
  }
  rerun.flops = per_row_.flops[step];
  rerun.cost = rerun.bytes + rerun.flops / flops_per_byte_;
}

void Ways::find_successors() {
  std::vector<std::vector<size_t>> readers(draft_.types.size());
  for (size_t b = 0; b < base_.steps.size(); ++b)
    for (const Value value : base_.steps[b].reads)
      if (exists(value)) readers[index_of(value)].push_back(b);
  for (const Step& step : base_.steps) {
    auto& behind = successors_.emplace_back();
    for (const Value value : step.writes)
      if (exists(value))
        behind.insert(behind.end(), readers[index_of(value)].begin(),
                      readers[index_of(value)].end());
  }
  writes_again_.resize(base_.steps.size());
  for (const size_t item : candidates_)
    if (items_[item].writer != npos) writes_again_[items_[item].writer].push_back(item);
  rerun_readers_.resize(items_.size());
  for (size_t step = 0; step < reruns_.size(); ++step)
    if (!reruns_[step].writes.empty())
      for (const size_t item : reruns_[step].reads) rerun_readers_[item].push_back(step);
}

/// Chooses a way for every needed item, starting from what backward reads.
bool Ways::spread(const std::vector<bool>& keep, const std::vector<bool>& never,
                  Outcome& found) const {
  found.ways.assign(items_.size(), Way::unneeded);
  is_run_.assign(reruns_.size(), false);
  std::vector<size_t> open = needed_;
  while (!open.empty()) {
    const size_t i = open.back();
    open.pop_back();
    const Item& item = items_[i];
    if (found.ways[i] != Way::unneeded) continue;
    Way& way = found.ways[i];
    const bool takes_nothing = item.bytes <= 0 && item.can_be_kept;
    if (takes_nothing || (!item.is_fixed && keep[i])) {
      way = Way::kept;
    } else if ((item.writer != npos || item.has_writer_apart) && !never[i]) {
      way = item.has_writer_apart ? Way::written_apart : Way::written_again;
      open.insert(open.end(), item.writer_reads.begin(), item.writer_reads.end());
    } else if (item.step != npos) {
      way = Way::run_again;
      if (!is_run_[item.step]) {
        is_run_[item.step] = true;
        open.insert(open.end(), reruns_[item.step].reads.begin(), reruns_[item.step].reads.end());
      }
    } else if (item.can_be_kept) {
      way = Way::kept;
    } else {
      return false;
    }
  }
  return true;
}

/// Whether every re-emitted value is written before it is read. Notes the first that is not in
/// `never`.
bool Ways::is_in_order(const Outcome& found, std::vector<bool>& never) const {
  is_accepted_.assign(items_.size(), false);
  for (const size_t i : candidates_) {
    if (found.ways[i] == Way::written_again && waits_for_reader(i, found)) {
      never[i] = true;
      return false;
    }
    is_accepted_[i] = found.ways[i] == Way::written_again;
  }
  for (const size_t i : candidates_) {
    if (found.ways[i] != Way::written_apart) continue;
    const auto& again = rerun_readers_[i];
    const bool is_alone =
        items_[i].readers.size() == 1 &&
        std::ranges::none_of(again, [&](size_t step) { return is_run_[step]; }) &&
        std::ranges::any_of(base_.steps[items_[i].readers[0]].reads, [&](Value value) {
          return exists(value) && draft_.types[index_of(value)].origin == Origin::gradient;
        });
    if (is_alone) continue;
    never[i] = true;
    return false;
  }
  return true;
}

/// Whether the step that would re-emit an item can run only after a reader of the item.
bool Ways::waits_for_reader(size_t index, const Outcome& found) const {
  const size_t writer = items_[index].writer, steps = base_.steps.size();
  std::vector<bool> seen(steps + reruns_.size());
  std::vector<size_t> open;
  const auto enter = [&](size_t node) {
    if (!seen[node]) open.push_back(node);
    seen[node] = true;
  };
  const auto enter_readers = [&](size_t item) {
    for (const size_t reader : items_[item].readers) enter(reader);
    for (const size_t step : rerun_readers_[item])
      if (is_run_[step]) enter(steps + step);
  };
  enter_readers(index);
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    if (node == writer) return true;
    if (node < steps) {
      for (const size_t next : successors_[node]) enter(next);
      for (const size_t item : writes_again_[node])
        if (is_accepted_[item]) enter_readers(item);
    } else {
      for (const size_t item : reruns_[node - steps].writes)
        if (found.ways[item] == Way::run_again) enter_readers(item);
    }
  }
  return false;
}

Outcome Ways::weighed(Outcome found) const {
  found.is_possible = true;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (found.ways[i] == Way::kept) found.bytes += std::max(items_[i].bytes, 0.0);
    const bool is_written = found.ways[i] == Way::written_again ||
                            found.ways[i] == Way::written_apart ||
                            (found.ways[i] == Way::run_again && !reruns_[items_[i].step].is_view);
    if (is_written) found.cost += items_[i].bytes;
  }
  for (size_t step = 0; step < reruns_.size(); ++step)
    if (is_run_[step]) found.cost += reruns_[step].cost;
  return found;
}

}  // namespace tandem
