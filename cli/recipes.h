// The recipes that --recipe accepts.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "tandem/recipe.h"

namespace tandem::cli {

struct NamedRecipe {
  const char* name;
  const char* meaning;
  Recipe recipe;
};

/// The only list of these recipes.
std::span<const NamedRecipe> named_recipes();
/// The recipe of that name; nullopt for "none".
std::optional<Recipe> recipe_named(const std::string& name);

}  // namespace tandem::cli
