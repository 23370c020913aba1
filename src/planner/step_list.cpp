#include "planner/step_list.h"

#include <algorithm>

namespace tandem {

StepList::StepList(Steps steps, size_t value_count)
    : steps_(std::move(steps)), is_there_(steps_.size(), true) {
  readers_.resize(value_count);
  writers_.resize(value_count);
  for (size_t place = 0; place < steps_.size(); ++place) enter(place);
}

void StepList::note(Index& index, size_t key, size_t place) {
  if (key >= index.size()) index.resize(key + 1);
  index[key].push_back(static_cast<uint32_t>(place));
}

void StepList::enter(size_t place) {
  const Step& step = steps_[place];
  for (const Value value : step.reads)
    if (exists(value)) note(readers_, index_of(value), place);
  for (const Value value : step.writes)
    if (exists(value)) note(writers_, index_of(value), place);
  for (const Value value : step.mutates) mutators_[value].push_back(place);
  for (const Part& part : step.covers) note(of_op_, part.op, place);
}

template <typename Holds>
StepList::Places StepList::those(const Index& index, size_t key, Holds&& holds) const {
  Places places;
  if (key >= index.size()) return places;
  for (const size_t place : index[key])
    if (is_there_[place] && holds(steps_[place])) places.push_back(place);
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  return places;
}

StepList::Places StepList::readers(Value value) const {
  return those(readers_, index_of(value), [&](const Step& step) { return reads(step, value); });
}

StepList::Places StepList::writers(Value value) const {
  return those(writers_, index_of(value), [&](const Step& step) { return writes(step, value); });
}

StepList::Places StepList::mutators(Value value) const {
  Places places;
  if (const auto found = mutators_.find(value); found != mutators_.end())
    for (const size_t place : found->second)
      if (is_there_[place]) places.push_back(place);
  return places;
}

StepList::Places StepList::of_op(size_t op) const {
  return those(of_op_, op, [&](const Step& step) {
    return std::any_of(step.covers.begin(), step.covers.end(),
                       [&](const Part& part) { return part.op == op; });
  });
}

void StepList::replace(std::span<const size_t> members, size_t place, Step fused) {
  for (const size_t member : members) is_there_[member] = false;
  steps_[place] = std::move(fused);
  is_there_[place] = true;
  enter(place);
}

Steps StepList::take() {
  Steps taken;
  taken.reserve(steps_.size());
  for (size_t place = 0; place < steps_.size(); ++place)
    if (is_there_[place]) taken.push_back(std::move(steps_[place]));
  steps_.clear();
  is_there_.clear();
  readers_.clear();
  writers_.clear();
  of_op_.clear();
  mutators_.clear();
  return taken;
}

}  // namespace tandem
