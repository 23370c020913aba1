#include "recipes.h"

namespace tandem::cli {

std::span<const NamedRecipe> named_recipes() {
  static const NamedRecipe recipes[] = {
      {"fp8", "current scaling", Float8CurrentScaling{}},
      {"delayed", "scales from the amaxes of past steps", DelayedScaling{}},
      {"block", "blocks of 128, of weights 128 by 128, with a scale each", Float8BlockScaling{}},
      {"mxfp8", "blocks of 32 with a scale each", MXFP8BlockScaling{}},
      {"nvfp4", "four bits, blocks of 16 with a scale each", NVFP4BlockScaling{}},
  };
  return recipes;
}

std::optional<Recipe> recipe_named(const std::string& name) {
  for (const NamedRecipe& each : named_recipes())
    if (name == each.name) return each.recipe;
  return std::nullopt;
}

}  // namespace tandem::cli
