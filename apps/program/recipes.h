// The recipes that --recipe and --runs accept.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tandem/recipe.h"

namespace tandem::apps {

struct NamedRecipe {
  const char* name;
  const char* meaning;
  Recipe recipe;
};

/// The only list of these recipes.
std::span<const NamedRecipe> named_recipes();
std::vector<std::string> recipe_names();
/// The recipe of that name; nullopt for "none", and for a run without a recipe.
std::optional<Recipe> recipe_named(const std::string& name);

}  // namespace tandem::apps
