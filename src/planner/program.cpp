#include "planner/program.h"

#include <c10/util/Exception.h>

#include <map>

#include "planner/planner.h"
#include "planner/registry.h"

namespace tandem {

namespace {
std::atomic<int64_t> made{0};

/// Says which thread plans while it lives.
struct Planner {
  explicit Planner(std::atomic<std::thread::id>& planner) : planner(planner) {
    planner = std::this_thread::get_id();
  }
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;
  ~Planner() { planner = std::thread::id(); }
  std::atomic<std::thread::id>& planner;
};
}  // namespace

Program::Program(std::string text)
    : text_(std::move(text)), description_(parse_description(text_)) {}

const std::shared_ptr<const Plan>& Program::make(const PlanKey& key) {
  TORCH_CHECK_VALUE(planner_.load() != std::this_thread::get_id(),
                    "pipeline: expected fusion functions that do not call the pipeline that is "
                    "being planned, got a call of it. Call another pipeline, or none.");
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : entries_)
    if (entry->key == key) return entry->plan;
  const Planner planner(planner_);
  std::shared_ptr<const Plan> plan = make_plan(*description_, key, user_fusions());
  ++made;
  entries_.push_back(std::make_unique<const Entry>(
      Entry{key, std::move(plan), newest_.load(std::memory_order_relaxed)}));
  newest_.store(entries_.back().get(), std::memory_order_release);
  return entries_.back()->plan;
}

std::vector<std::shared_ptr<const Plan>> Program::plans() const {
  std::vector<std::shared_ptr<const Plan>> plans;
  for (const Entry* entry = newest_.load(std::memory_order_acquire); entry != nullptr;
       entry = entry->older)
    plans.insert(plans.begin(), entry->plan);
  return plans;
}

int64_t Program::plans_made() { return made.load(); }

std::shared_ptr<Program> program_of(std::string_view description) {
  static auto& mutex = *new std::mutex;
  static auto& programs = *new std::map<std::string, std::shared_ptr<Program>, std::less<>>;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = programs.find(description); found != programs.end())
      return found->second;
  }
  auto program = std::make_shared<Program>(std::string(description));
  const std::lock_guard<std::mutex> lock(mutex);
  return programs.emplace(program->text(), program).first->second;
}

}  // namespace tandem
