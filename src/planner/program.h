// Programs: a description and the plans that have been made for it. The plan cache.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/plan.h"
#include "planner/description.h"
#include "planner/key.h"
#include "tandem/export.h"

namespace tandem {

class TANDEM_API Program {
 public:
  explicit Program(std::string text);

  const std::string& text() const { return text_; }
  const Description& description() const { return *description_; }

  /// The plan for a key: found without a lock or an allocation, or made. Plans never move or change.
  const std::shared_ptr<const Plan>& plan_for(const PlanKey& key) {
    for (const Entry* entry = newest_.load(std::memory_order_acquire); entry != nullptr;
         entry = entry->older)
      if (entry->key == key) return entry->plan;
    return make(key);
  }

  /// Plans in the order in which they were made.
  std::vector<std::shared_ptr<const Plan>> plans() const;
  /// How many plans have been made since the process started, by all programs.
  static int64_t plans_made();

 private:
  struct Entry {
    PlanKey key;
    std::shared_ptr<const Plan> plan;
    const Entry* older;
  };
  const std::shared_ptr<const Plan>& make(const PlanKey& key);

  std::string text_;
  std::shared_ptr<const Description> description_;
  std::atomic<const Entry*> newest_{nullptr};
  std::mutex mutex_;
  std::atomic<std::thread::id>
      planner_{};  ///< the thread that makes a plan, and runs a user's fusion functions in it
  std::vector<std::unique_ptr<const Entry>> entries_;
};

/// The program of a description, one per text in the process.
TANDEM_API std::shared_ptr<Program> program_of(std::string_view description);

}  // namespace tandem
