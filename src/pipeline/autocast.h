// The recipe in force: chains of regions. Each thread has one chain, and so has each async context
// of Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "quantization/region.h"
#include "tandem/export.h"

namespace tandem {

/// A recipe in force, identified by its canonical JSON. Equal recipes are one object as long as a
/// region, or what a pipeline keeps for calls under the recipe, holds it.
struct ActiveRecipe {
  std::string json;
  /// The number of rows of the amax history that modules keep for the recipe; 0: it has no state.
  int64_t history_length = 0;
  /// At least 1; equal recipes have equal numbers, also after an object was destroyed.
  int64_t number = 0;
};
using ActiveRecipePtr = std::shared_ptr<const ActiveRecipe>;

/// One entry into an autocast region, or into a memory budget, which keeps the outer recipe. Only
/// `is_open` ever changes, so threads may share chains.
struct Region {
  /// nullptr: quantization is off inside.
  ActiveRecipePtr recipe;
  /// The outermost region with a recipe. Within it weight codes are made once, and amaxes belong to
  /// one step.
  std::shared_ptr<RecipeRegion> outermost;
  /// Whether backward recomputes a forward of `outermost`, which has been left.
  bool is_recompute;
  /// The region that is in force after this one is left.
  std::shared_ptr<Region> outer;
  /// The object that entered it; null for a tandem::Autocast.
  std::shared_ptr<void> owner;
  /// The budget, in bytes per row, of pipelines that have none of their own.
  std::optional<double> memory_budget = std::nullopt;
  std::atomic<bool> is_open{true};
};
using RegionPtr = std::shared_ptr<Region>;

/// The recipe of this thread's innermost region, or nullptr.
TANDEM_API const ActiveRecipe* active_recipe();
/// active_recipe() as an owning pointer.
TANDEM_API ActiveRecipePtr kept_active_recipe();
/// The memory budget of this thread's innermost region.
TANDEM_API std::optional<double> active_memory_budget();
/// The JSON of the recipe with this number, for error messages.
TANDEM_API std::string recipe_text(int64_t number);

/// The number of rows of the amax history of a recipe, given as JSON; 0: it has no state. Throws
/// c10::ValueError for an unknown recipe.
TANDEM_API int64_t recipe_history_length(const std::string& json);

/// A region inside `outer` that is not in force yet. `json`: a recipe, or "null" to switch
/// quantization off. Throws c10::ValueError for an unknown recipe.
TANDEM_API RegionPtr make_region(const std::string& json, RegionPtr outer,
                                 std::shared_ptr<void> owner = {});
/// A region inside `outer` with the recipe of `outer` and another memory budget (nullopt: none).
/// Throws c10::ValueError if the budget is negative or not finite.
TANDEM_API RegionPtr make_budget_region(std::optional<double> bytes_per_row, RegionPtr outer,
                                        std::shared_ptr<void> owner = {});
/// A region inside `outer` in which backward recomputes what forward did in `then`; nullptr:
/// outside any region.
TANDEM_API RegionPtr make_recompute_region(const RegionPtr& then, RegionPtr outer,
                                           std::shared_ptr<void> owner);
/// The first region of a chain that has not been left, or nullptr.
TANDEM_API RegionPtr innermost_open(RegionPtr region);

/// The number of the region's outermost region with a recipe; 0: none.
TANDEM_API int64_t number_of(const RegionPtr& region);
/// This thread's innermost region, or nullptr.
TANDEM_API RegionPtr thread_region();
/// Puts a chain in force in this thread and returns the previous one.
TANDEM_API RegionPtr exchange_thread_region(RegionPtr region);

/// Enters a region in this thread. Throws what make_region throws.
TANDEM_API RegionPtr enter_autocast(const std::string& json);
TANDEM_API RegionPtr enter_memory_budget(std::optional<double> bytes_per_row);
/// Leaves a region. Returns false if it is not this thread's innermost one: regions entered later
/// stay in force, and after them the region around this one.
TANDEM_API bool exit_autocast(const RegionPtr& region);
/// Ends a region that is not in force anywhere. The last region of an outermost one updates the
/// recipe's state. The caller must not hold the GIL. Throws what RecipeRegion::leave throws.
TANDEM_API void close_region(const RegionPtr& region);

}  // namespace tandem
