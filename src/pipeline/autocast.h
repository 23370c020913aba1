// Which recipe is in force: a thread-local stack of regions.
#pragma once

#include <string>

#include "tandem/export.h"

namespace tandem {

/// A recipe in force, known by its canonical JSON; equal recipes are one object, which lives as long as the process.
struct ActiveRecipe {
  std::string json;
};

/// The recipe of the innermost enabled region of this thread, or null.
TANDEM_API const ActiveRecipe* active_recipe();

/// Enters a region: `json` is a recipe, or "null" to switch quantization off inside. The outermost region is one weight-code region.
/// Throws c10::ValueError on an unknown recipe.
TANDEM_API void enter_autocast(const std::string& json);
TANDEM_API void exit_autocast();

}  // namespace tandem
