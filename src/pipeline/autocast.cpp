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
  if (!entry)
    entry = std::make_unique<ActiveRecipe>(ActiveRecipe{canonical, history_length(*recipe)});
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
  std::shared_ptr<RecipeRegion> outermost = outer ? outer->outermost : nullptr;
  if (outermost == nullptr && recipe != nullptr)
    outermost = std::make_shared<RecipeRegion>(kernel_ops::new_region());
  const bool is_recompute = outer && outer->is_recompute;
  if (outermost != nullptr && !is_recompute) outermost->enter();
  return RegionPtr(
      new Region{recipe, std::move(outermost), is_recompute, std::move(outer), std::move(owner)});
}

RegionPtr make_recompute_region(const RegionPtr& then, RegionPtr outer,
                                std::shared_ptr<void> owner) {
  if (then == nullptr)
    return RegionPtr(new Region{nullptr, nullptr, true, std::move(outer), std::move(owner)});
  return RegionPtr(
      new Region{then->recipe, then->outermost, true, std::move(outer), std::move(owner)});
}

void close_region(const RegionPtr& region) {
  if (region->outermost != nullptr && !region->is_recompute) region->outermost->leave();
}

int64_t number_of(const RegionPtr& region) {
  return region && region->outermost ? region->outermost->number() : 0;
}

RegionPtr innermost_open(RegionPtr region) {
  while (region && !region->is_open.load(std::memory_order_relaxed)) region = region->outer;
  return region;
}

RegionPtr thread_region() { return innermost_open(here()); }

RegionPtr exchange_thread_region(RegionPtr region) {
  kernel_ops::set_region(number_of(region));
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
