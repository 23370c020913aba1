#include "planner/registry.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "planner/match.h"
#include "planner/program.h"

namespace tandem {

namespace {

struct FusionRegistry {
  struct Entry {
    uint64_t id;
    std::shared_ptr<const Fusion> fusion;
  };
  std::mutex mutex;
  std::vector<Entry> order;
  uint64_t next_id = 1;
  std::atomic<uint64_t> version{0};
  decltype(UserFusions::groups) groups;
};
FusionRegistry& fusion_registry() {
  static FusionRegistry& registry = *new FusionRegistry;  // never destroyed: handles may be static
  return registry;
}

}  // namespace

FusionHandle register_fusion(Fusion fusion, bool prepend) {
  TORCH_CHECK_VALUE(!fusion.pattern.empty() && fusion.run.run != nullptr, "fusion \"", fusion.name,
                    "\": expected a pattern and an implementation, got ",
                    fusion.pattern.empty() ? "no pattern" : "no implementation",
                    ". Name the steps that it replaces, and a function.");
  TORCH_CHECK_VALUE((fusion.pass == Pass::joint) == (fusion.backward.run != nullptr), "fusion \"",
                    fusion.name, "\": expected a backward half exactly for the joint pass, got ",
                    fusion.pass == Pass::joint ? "none" : "one for another pass",
                    ". Choose the pass accordingly.");
  for (const auto* operands :
       {&fusion.run.reads, &fusion.run.writes, &fusion.backward.reads, &fusion.backward.writes})
    for (const MemberOperand& operand : *operands)
      TORCH_CHECK_VALUE(operand.member < fusion.pattern.size(), "fusion \"", fusion.name,
                        "\": expected operands of the ", fusion.pattern.size(),
                        " steps of its pattern, got ", operand.name, " of step ", operand.member,
                        ". Count the steps from 0.");
  check_pattern(fusion);
  FusionRegistry& all = fusion_registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& entry : all.order)
    TORCH_CHECK_VALUE(entry.fusion->name != fusion.name, "fusion: expected a new name, got \"",
                      fusion.name, "\", which is registered. Remove the other one first.");
  const uint64_t id = all.next_id++;
  all.order.insert(prepend ? all.order.begin() : all.order.end(),
                   {id, std::make_shared<const Fusion>(std::move(fusion))});
  ++all.version;
  return FusionHandle(id);
}

void FusionHandle::remove() {
  if (id_ == 0) return;
  FusionRegistry& all = fusion_registry();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::erase_if(all.order, [&](const FusionRegistry::Entry& entry) { return entry.id == id_; });
    ++all.version;
  }
  id_ = 0;
  drop_outdated_programs(fusions_version());
}

uint64_t fusions_version() { return fusion_registry().version.load(std::memory_order_relaxed); }

void bump_fusions_version() {
  ++fusion_registry().version;
  drop_outdated_programs(fusions_version());
}

UserFusions user_fusions() {
  FusionRegistry& all = fusion_registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  UserFusions fusions;
  for (const auto& entry : all.order) fusions.patterns.push_back(entry.fusion);
  fusions.groups = all.groups;
  return fusions;
}

void set_group_fusions(decltype(UserFusions::groups) groups) {
  FusionRegistry& all = fusion_registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.groups = std::move(groups);
}

}  // namespace tandem
