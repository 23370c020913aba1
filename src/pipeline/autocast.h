// Which recipe is in force: chains of regions. A thread has one, and so has each async context of
// Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "quantization/region.h"
#include "tandem/export.h"

namespace tandem {

/// A recipe in force, known by its canonical JSON. Equal recipes are one object as long as a region
/// or what a pipeline keeps for calls under it lives.
struct ActiveRecipe {
  std::string json;
  /// Of the amaxes that modules keep for it; 0: it has no state.
  int64_t history_length = 0;
  /// At least 1; the same for an equal recipe, even after this one has died.
  int64_t number = 0;
};
using ActiveRecipePtr = std::shared_ptr<const ActiveRecipe>;

/// One entry into an autocast region, or into one of a memory budget, which leaves the recipe as it
/// is. Only `is_open` ever changes, so threads may share chains.
struct Region {
  /// Null: quantization is off inside.
  ActiveRecipePtr recipe;
  /// The outermost one with a recipe, in which weight codes are made once and amaxes belong to one
  /// step.
  std::shared_ptr<RecipeRegion> outermost;
  /// Of a forward of `outermost`, which has been left.
  bool is_recompute;
  /// In force again once this is left.
  std::shared_ptr<Region> outer;
  /// What entered it; null for a tandem::Autocast.
  std::shared_ptr<void> owner;
  /// Of pipelines inside that have none of their own, in bytes per row.
  std::optional<double> memory_budget = std::nullopt;
  std::atomic<bool> is_open{true};
};
using RegionPtr = std::shared_ptr<Region>;

/// The recipe of the innermost region of this thread, or null.
TANDEM_API const ActiveRecipe* active_recipe();
/// The same, to be kept.
TANDEM_API ActiveRecipePtr kept_active_recipe();
/// The memory budget of that region.
TANDEM_API std::optional<double> active_memory_budget();
/// The JSON of the recipe of a number, as an error shows it.
TANDEM_API std::string recipe_text(int64_t number);

/// Rows of the amax history of the recipe that this JSON is; 0: it has no state. Throws
/// c10::ValueError on an unknown recipe.
TANDEM_API int64_t recipe_history_length(const std::string& json);

/// A region inside `outer`: `json` is a recipe, or "null" to switch quantization off. It is in
/// force nowhere yet. Throws c10::ValueError on an unknown recipe.
TANDEM_API RegionPtr make_region(const std::string& json, RegionPtr outer,
                                 std::shared_ptr<void> owner = {});
/// A region inside `outer` with its recipe, and another memory budget (nullopt: none). Throws
/// c10::ValueError where that is negative or not finite.
TANDEM_API RegionPtr make_budget_region(std::optional<double> bytes_per_row, RegionPtr outer,
                                        std::shared_ptr<void> owner = {});
/// A region inside `outer` in which backward recomputes what forward did in `then`; null: outside
/// any.
TANDEM_API RegionPtr make_recompute_region(const RegionPtr& then, RegionPtr outer,
                                           std::shared_ptr<void> owner);
/// The first region of a chain that has not been left, or null.
TANDEM_API RegionPtr innermost_open(RegionPtr region);

/// The number of its outermost region with a recipe; 0: none.
TANDEM_API int64_t number_of(const RegionPtr& region);
/// The innermost region of this thread, or null.
TANDEM_API RegionPtr thread_region();
/// Puts a chain in force in this thread; returns the one before.
TANDEM_API RegionPtr exchange_thread_region(RegionPtr region);

/// Enters a region in this thread. Throws as make_region does.
TANDEM_API RegionPtr enter_autocast(const std::string& json);
TANDEM_API RegionPtr enter_memory_budget(std::optional<double> bytes_per_row);
/// Leaves a region. False where it is not the innermost one of this thread: those entered since
/// stay in force, and once they are left what surrounds this one is.
TANDEM_API bool exit_autocast(const RegionPtr& region);
/// Ends a region that is in force nowhere any more: the last one of an outermost region updates the
/// recipe's state. The GIL must not be held. Throws as RecipeRegion::leave.
TANDEM_API void close_region(const RegionPtr& region);

}  // namespace tandem
