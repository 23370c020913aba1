#include "core/plan.h"

namespace tandem {

const BackwardPlan& BackwardPlans::insert(std::unique_ptr<const BackwardPlan> plan) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const BackwardPlan* known = find(plan->mask)) return *known;
  entries_.push_back({std::move(plan), newest_.load(std::memory_order_relaxed)});
  newest_.store(&entries_.back(), std::memory_order_release);
  return *entries_.back().plan;
}

}  // namespace tandem
