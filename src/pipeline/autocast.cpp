#include "pipeline/autocast.h"

#include <deque>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/json_fields.h"
#include "kernel_ops/weights/weights.h"
#include "planner/description.h"
#include "quantization/recipe.h"

namespace tandem {

namespace {

RegionPtr& here() {
  thread_local RegionPtr region;
  return region;
}

/// Two different recipes have equal numbers with a probability of 2^-62.
int64_t number_of(const std::string& json) {
  return static_cast<int64_t>(std::hash<std::string>()(json) >> 1) | 1;
}

/// The recipes that exist, keyed by their JSON.
class Recipes {
 public:
  ActiveRecipePtr of(const std::string& json) {
    if (ActiveRecipePtr known = find(json)) return known;
    const auto recipe = recipe_from_json(parse_json(json, "recipe"));
    if (!recipe) return nullptr;
    std::string canonical = to_json(*recipe).dump();
    if (ActiveRecipePtr known = find(canonical)) return known;
    const ActiveRecipePtr made(
        new ActiveRecipe{canonical, history_length(*recipe), number_of(canonical)},
        [this](const ActiveRecipe* dead) {
          forget(*dead);
          delete dead;
        });
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& entry = living_[made->json];
    if (ActiveRecipePtr known = entry.lock()) return known;  // made by another thread meanwhile
    entry = made;
    return made;
  }

  std::string text_of(int64_t number) {
    std::vector<ActiveRecipePtr> held;  // destroyed without the lock, which forget() takes
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [json, entry] : living_) {
      held.push_back(entry.lock());
      if (held.back() && held.back()->number == number) return json;
    }
    for (const auto& [dead, json] : dead_)
      if (dead == number) return json;
    return "one that nothing has used for long";
  }

 private:
  ActiveRecipePtr find(const std::string& json) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = living_.find(json);
    return entry == living_.end() ? nullptr : entry->second.lock();
  }

  void forget(const ActiveRecipe& dead) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = living_.find(dead.json);
    if (entry == living_.end() || !entry->second.expired()) return;
    living_.erase(entry);
    dead_.emplace_back(dead.number, dead.json);
    if (dead_.size() > kMostDead) dead_.pop_front();
  }

  /// How many destroyed recipes keep their text, which an error may still show.
  static constexpr size_t kMostDead = 64;

  std::mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<const ActiveRecipe>> living_;
  std::deque<std::pair<int64_t, std::string>> dead_;
};

Recipes& recipes() {
  static auto& recipes = *new Recipes;  // never destroyed: static objects may hold recipes
  return recipes;
}

/// A region inside `outer`. The first one with a recipe is the outermost one of all inside it.
RegionPtr region_within(RegionPtr outer, std::shared_ptr<void> owner, ActiveRecipePtr recipe,
                        std::optional<double> memory_budget) {
  std::shared_ptr<RecipeRegion> outermost = outer ? outer->outermost : nullptr;
  if (outermost == nullptr && recipe != nullptr)
    outermost = std::make_shared<RecipeRegion>(kernel_ops::new_region());
  const bool is_recompute = outer && outer->is_recompute;
  if (outermost != nullptr && !is_recompute) outermost->enter();
  return RegionPtr(new Region{std::move(recipe), std::move(outermost), is_recompute,
                              std::move(outer), std::move(owner), memory_budget});
}

/// The innermost region of this thread that has not been left by another thread or context.
const Region* open_region() {
  const Region* region = here().get();
  while (region != nullptr && !region->is_open.load(std::memory_order_relaxed))
    region = region->outer.get();
  return region;
}

}  // namespace

const ActiveRecipe* active_recipe() {
  const Region* region = open_region();
  return region == nullptr ? nullptr : region->recipe.get();
}

std::optional<double> active_memory_budget() {
  const Region* region = open_region();
  return region == nullptr ? std::nullopt : region->memory_budget;
}

ActiveRecipePtr kept_active_recipe() {
  const Region* region = open_region();
  return region == nullptr ? nullptr : region->recipe;
}

int64_t recipe_history_length(const std::string& json) {
  const ActiveRecipePtr recipe = recipes().of(json);
  return recipe ? recipe->history_length : 0;
}

std::string recipe_text(int64_t number) { return recipes().text_of(number); }

RegionPtr make_region(const std::string& json, RegionPtr outer, std::shared_ptr<void> owner) {
  const auto memory_budget = outer ? outer->memory_budget : std::nullopt;
  return region_within(std::move(outer), std::move(owner), recipes().of(json), memory_budget);
}

RegionPtr make_budget_region(std::optional<double> bytes_per_row, RegionPtr outer,
                             std::shared_ptr<void> owner) {
  if (bytes_per_row) check_memory_budget(*bytes_per_row);
  ActiveRecipePtr recipe = outer ? outer->recipe : nullptr;
  return region_within(std::move(outer), std::move(owner), std::move(recipe), bytes_per_row);
}

RegionPtr make_recompute_region(const RegionPtr& then, RegionPtr outer,
                                std::shared_ptr<void> owner) {
  if (then == nullptr)
    return RegionPtr(
        new Region{nullptr, nullptr, true, std::move(outer), std::move(owner), std::nullopt});
  return RegionPtr(new Region{then->recipe, then->outermost, true, std::move(outer),
                              std::move(owner), then->memory_budget});
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

RegionPtr enter_memory_budget(std::optional<double> bytes_per_row) {
  RegionPtr region = make_budget_region(bytes_per_row, thread_region());
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
