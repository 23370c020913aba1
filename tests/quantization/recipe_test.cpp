// Recipes as JSON, and what they ask for each role.
#include "quantization/recipe.h"

#include <nlohmann/json.hpp>

#include "support/throws.h"

namespace tandem::testing {
namespace {

TEST(Recipe, RoundTripThroughJson) {
  Float8CurrentScaling recipe;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), recipe);
  recipe.fp8_format = Float8CurrentScaling::Format::e4m3;
  recipe.use_power_2_scales = true;
  recipe.amax_epsilon[0] = 0.25;
  recipe.amax_epsilon[1] = 1e-12;
  recipe.amax_epsilon[2] = 3;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), recipe);
  EXPECT_EQ(recipe_from_json(nlohmann::json::parse(to_json(recipe).dump())), recipe);
}

TEST(Recipe, FieldsHaveDefaultsAndNullIsNone) {
  EXPECT_EQ(recipe_from_json(nlohmann::json{{"name", "Float8CurrentScaling"}}),
            Float8CurrentScaling());
  EXPECT_EQ(recipe_from_json(nlohmann::json()), std::nullopt);
}

TEST(Recipe, FormatAndEpsilonOfEachRole) {
  Float8CurrentScaling recipe;
  recipe.amax_epsilon[0] = 1;
  recipe.amax_epsilon[1] = 2;
  recipe.amax_epsilon[2] = 3;
  EXPECT_EQ(quantize_point(recipe, Role::input).format, Format::fp8_e4m3);
  EXPECT_EQ(quantize_point(recipe, Role::weight).format, Format::fp8_e4m3);
  EXPECT_EQ(quantize_point(recipe, Role::grad_output).format, Format::fp8_e5m2);
  EXPECT_EQ(quantize_point(recipe, Role::input).amax_epsilon, 1);
  EXPECT_EQ(quantize_point(recipe, Role::weight).amax_epsilon, 2);
  EXPECT_EQ(quantize_point(recipe, Role::grad_output).amax_epsilon, 3);
  recipe.fp8_format = Float8CurrentScaling::Format::e4m3;
  recipe.use_power_2_scales = true;
  EXPECT_EQ(quantize_point(recipe, Role::grad_output).format, Format::fp8_e4m3);
  EXPECT_TRUE(quantize_point(recipe, Role::grad_output).use_power_2_scales);
}

TEST(RecipeErrors, UnknownNameAndFormat) {
  EXPECT_THAT(
      [] {
        recipe_from_json({{"name", "DelayedScaling"}});
      },
      ThrowsText<c10::ValueError>("recipe: expected \"Float8CurrentScaling\", got \"",
                                  "got \"DelayedScaling\"",
                                  "It is the recipe that this version knows"));
  EXPECT_THAT(
      [] {
        recipe_from_json({{"name", "Float8CurrentScaling"}, {"fp8_format", "E5M2"}});
      },
      ThrowsText<c10::ValueError>("recipe: expected fp8_format HYBRID or E4M3, got ", "got E5M2",
                                  "too few bits"));
}

}  // namespace
}  // namespace tandem::testing
