// Recipes as JSON, and what they ask for each role.
#include "quantization/recipe.h"

#include <nlohmann/json.hpp>

#include "support/throws.h"

namespace tandem::testing {
namespace {

TEST(Recipe, RoundTripThroughJson) {
  Float8CurrentScaling recipe;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  recipe.fp8_format = Float8CurrentScaling::Format::e4m3;
  recipe.use_power_2_scales = true;
  recipe.amax_epsilon[0] = 0.25;
  recipe.amax_epsilon[1] = 1e-12;
  recipe.amax_epsilon[2] = 3;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  EXPECT_EQ(recipe_from_json(nlohmann::json::parse(to_json(recipe).dump())), Recipe(recipe));
}

TEST(Recipe, FieldsHaveDefaultsAndNullIsNone) {
  EXPECT_EQ(recipe_from_json(nlohmann::json{{"name", "Float8CurrentScaling"}}),
            Recipe(Float8CurrentScaling()));
  EXPECT_EQ(recipe_from_json(nlohmann::json()), std::nullopt);
}

TEST(Recipe, FormatAndEpsilonOfEachRole) {
  Float8CurrentScaling recipe;
  recipe.amax_epsilon[0] = 1;
  recipe.amax_epsilon[1] = 2;
  recipe.amax_epsilon[2] = 3;
  const auto text = [&](Role role) { return quantizer_of(recipe, {role, 3, 0}).text; };
  EXPECT_EQ(text(Role::input), "fp8_e4m3:current:eps=1:pow2=0");
  EXPECT_EQ(text(Role::weight), "fp8_e4m3:current:eps=2:pow2=0");
  EXPECT_EQ(text(Role::grad_output), "fp8_e5m2:current:eps=3:pow2=0");
  recipe.fp8_format = Float8CurrentScaling::Format::e4m3;
  recipe.use_power_2_scales = true;
  recipe.amax_epsilon[2] = 1e-12;
  EXPECT_EQ(text(Role::grad_output), "fp8_e4m3:current:eps=1e-12:pow2=1");
}

TEST(Recipe, MxBlocksOfEachRole) {
  MXFP8BlockScaling recipe;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  const auto text = [&](Role role) { return quantizer_of(recipe, {role}).text; };
  for (const Role role : {Role::input, Role::weight, Role::grad_output})
    EXPECT_EQ(text(role), "mxfp8_e4m3");
  recipe.fp8_format = MXFP8BlockScaling::Format::hybrid;
  recipe.enable_2d_quantization = true;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  EXPECT_EQ(text(Role::input), "mxfp8_e4m3");
  EXPECT_EQ(text(Role::weight), "mxfp8_e4m3:2d=1");
  EXPECT_EQ(text(Role::grad_output), "mxfp8_e5m2");
}

TEST(RecipeErrors, UnknownNameAndFormat) {
  EXPECT_THAT(
      [] {
        recipe_from_json({{"name", "DelayedScaling"}});
      },
      ThrowsText<c10::ValueError>(
          "recipe: expected \"Float8CurrentScaling\" or \"MXFP8BlockScaling\", got \"",
          "got \"DelayedScaling\"", "the recipes that this version knows"));
  EXPECT_THAT(
      [] {
        recipe_from_json({{"name", "Float8CurrentScaling"}, {"fp8_format", "E5M2"}});
      },
      ThrowsText<c10::ValueError>("recipe: expected fp8_format HYBRID or E4M3, got ", "got E5M2",
                                  "too few bits"));
}

}  // namespace
}  // namespace tandem::testing
