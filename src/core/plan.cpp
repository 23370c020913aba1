#include "core/plan.h"

namespace tandem {

const BackwardPlan& BackwardPlans::insert(std::unique_ptr<const BackwardPlan> plan) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const BackwardPlan* known = find(plan->mask)) return *known;
  auto table = std::make_unique<Table>();
  if (const Table* old = table_.load(std::memory_order_acquire)) *table = *old;
  table->push_back(plan.get());
  plans_.push_back(std::move(plan));
  table_.store(table.get(), std::memory_order_release);
  tables_.push_back(std::move(table));
  return *plans_.back();
}

}  // namespace tandem
