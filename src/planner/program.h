// Programs: a description and the plans that have been made for it. The plan cache.
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

  /// The plan for a key: found or made. Plans never change.
  std::shared_ptr<const Plan> plan_for(const PlanKey& key) {
    if (auto plan = plans_.find(key)) return plan;
    return make(key);
  }

  /// The plans that there are, in the order in which they were made.
  std::vector<std::shared_ptr<const Plan>> plans() const { return plans_.all(); }
  /// How many plans have been made since the process started, by all programs.
  static int64_t plans_made();
  /// How many programs there are.
  static int64_t alive();

 private:
  std::shared_ptr<const Plan> make(const PlanKey& key);

  std::string text_;
  std::shared_ptr<const Description> description_;
  Cache<PlanKey, Plan> plans_;
  std::mutex mutex_;
  /// The thread that makes a plan, and runs a user's fusion functions in it.
  std::atomic<std::thread::id> planner_{};
};

/// The program of a description, at most one per text at a time. It dies with the last that holds
/// it, but the ones asked for last stay: at most `kRecentPrograms`, and of long texts fewer.
TANDEM_API std::shared_ptr<Program> program_of(std::string_view description);
inline constexpr size_t kRecentPrograms = 256, kRecentProgramBytes = 1 << 20;

/// Lets go of recent programs that other user fusions than those of now were part of: nobody will
/// ask for them.
void drop_outdated_programs(uint64_t fusions_version);

}  // namespace tandem
