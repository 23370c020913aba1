// Programs: a description with its cache of plans.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/cache.h"
#include "core/plan.h"
#include "planner/description.h"
#include "planner/key.h"
#include "tandem/export.h"

namespace tandem {

class TANDEM_API Program {
 public:
  explicit Program(std::string text);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const std::string& text() const { return text_; }
  const Description& description() const { return *description_; }

  /// The plan for a key, from the cache or newly planned. Plans never change.
  std::shared_ptr<const Plan> plan_for(const PlanKey& key) {
    if (auto plan = plans_.find(key)) return plan;
    return make(key);
  }

  /// All plans, in the order in which they were made.
  std::vector<std::shared_ptr<const Plan>> plans() const { return plans_.all(); }
  /// How many plans all programs have made since the process started.
  static int64_t plans_made();
  /// How many programs exist.
  static int64_t alive();

 private:
  std::shared_ptr<const Plan> make(const PlanKey& key);

  std::string text_;
  std::shared_ptr<const Description> description_;
  Cache<PlanKey, Plan> plans_;
  std::mutex mutex_;
  /// The thread that is planning; a user's fusion functions run in it.
  std::atomic<std::thread::id> planner_{};
};

/// The program of a description, at most one per text at a time. It is destroyed with its last
/// holder. A cache holds the most recently used programs: at most `kRecentPrograms`, and fewer
/// if their texts exceed `kRecentProgramBytes`.
TANDEM_API std::shared_ptr<Program> program_of(std::string_view description);
inline constexpr size_t kRecentPrograms = 256, kRecentProgramBytes = 1 << 20;

/// Stops holding recent programs that were made with other user fusions than `fusions_version`: no
/// later call can look them up.
void drop_outdated_programs(uint64_t fusions_version);

}  // namespace tandem
