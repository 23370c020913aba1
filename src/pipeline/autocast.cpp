#include "pipeline/autocast.h"

#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/json_fields.h"
#include "kernel_ops/weights.h"
#include "quantization/recipe.h"

namespace tandem {

namespace {

RegionPtr& here() {
  thread_local RegionPtr region;
  return region;
}

const ActiveRecipe* interned(const std::string& json) {
  const auto recipe = recipe_from_json(parse_json(json, "recipe"));
  if (!recipe) return nullptr;
  static auto& mutex = *new std::mutex;
  static auto& recipes = *new std::map<std::string, std::unique_ptr<ActiveRecipe>>;
  const std::string canonical = to_json(*recipe).dump();
  const std::lock_guard<std::mutex> lock(mutex);
  auto& entry = recipes[canonical];
  if (!entry) entry = std::make_unique<ActiveRecipe>(ActiveRecipe{canonical});
  return entry.get();
}

}  // namespace

const ActiveRecipe* active_recipe() {
  const Region* region = here().get();
  while (region != nullptr && !region->is_open.load(std::memory_order_relaxed))
    region = region->outer.get();  // left by another thread or context
  return region == nullptr ? nullptr : region->recipe;
}

RegionPtr make_region(const std::string& json, RegionPtr outer, std::shared_ptr<void> owner) {
  const ActiveRecipe* recipe = interned(json);
  const int64_t number = outer ? outer->number : kernel_ops::new_region();
  return RegionPtr(new Region{recipe, number, std::move(outer), std::move(owner)});
}

RegionPtr innermost_open(RegionPtr region) {
  while (region && !region->is_open.load(std::memory_order_relaxed)) region = region->outer;
  return region;
}

RegionPtr thread_region() { return innermost_open(here()); }

RegionPtr exchange_thread_region(RegionPtr region) {
  kernel_ops::set_region(region ? region->number : 0);
  std::swap(here(), region);
  return region;
}

RegionPtr enter_autocast(const std::string& json) {
  RegionPtr region = make_region(json, thread_region());
  exchange_thread_region(region);
  return region;
}

bool exit_autocast(const RegionPtr& region) {
  const bool in_order = thread_region() == region;
  region->is_open.store(false, std::memory_order_relaxed);
  exchange_thread_region(thread_region());
  return in_order;
}

}  // namespace tandem
