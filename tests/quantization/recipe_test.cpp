// Recipes as JSON, and what they ask for each role.
#include "quantization/recipe.h"

#include <nlohmann/json.hpp>

#include "support/throws.h"

namespace tandem::testing::quantization_recipe {
namespace {

TEST(Recipe, RoundTripThroughJson) {
  Float8CurrentScaling recipe;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  recipe.fp8_format = RecipeFormat::e4m3;
  recipe.use_power_2_scales = true;
  recipe.amax_epsilon_input = 0.25;
  recipe.amax_epsilon_weight = 1e-12;
  recipe.amax_epsilon_grad_output = 3;
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
  recipe.amax_epsilon_input = 1;
  recipe.amax_epsilon_weight = 2;
  recipe.amax_epsilon_grad_output = 3;
  const auto text = [&](Role role) { return quantizer_of(recipe, {role})->text; };
  EXPECT_EQ(text(Role::input), "fp8_e4m3:current:eps=1:pow2=0");
  EXPECT_EQ(text(Role::weight), "fp8_e4m3:current:eps=2:pow2=0");
  EXPECT_EQ(text(Role::grad_output), "fp8_e5m2:current:eps=3:pow2=0");
  recipe.fp8_format = RecipeFormat::e4m3;
  recipe.use_power_2_scales = true;
  recipe.amax_epsilon_grad_output = 1e-12;
  EXPECT_EQ(text(Role::grad_output), "fp8_e4m3:current:eps=1e-12:pow2=1");
}

TEST(Recipe, MxBlocksOfEachRole) {
  MXFP8BlockScaling recipe;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  const auto text = [&](Role role) { return quantizer_of(recipe, {role})->text; };
  for (const Role role : {Role::input, Role::weight, Role::grad_output})
    EXPECT_EQ(text(role), "mxfp8_e4m3");
  recipe.fp8_format = RecipeFormat::hybrid;
  recipe.enable_2d_quantization = true;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  EXPECT_EQ(text(Role::input), "mxfp8_e4m3");
  EXPECT_EQ(text(Role::weight), "mxfp8_e4m3:2d=1");
  EXPECT_EQ(text(Role::grad_output), "mxfp8_e5m2");
}

TEST(Recipe, BackwardOverridesAreRead) {
  NVFP4BlockScaling recipe;
  EXPECT_EQ(backward_override(recipe), BackwardOverride::none);
  recipe.backward_override = BackwardOverride::dequantized;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  EXPECT_EQ(backward_override(recipe), BackwardOverride::dequantized);
  EXPECT_EQ(backward_override(DelayedScaling()), BackwardOverride::none);
}

TEST(Recipe, AFunctionIsAskedOnceForEachSlot) {
  int requested = 0;
  register_quantizer_choice("recipe_test.choice", [&](const QuantizeSlot& slot) {
    ++requested;
    return std::string(slot.role == Role::weight ? "" : "mxfp8_e4m3");
  });
  const CustomRecipe recipe{.quantizers = "recipe_test.choice"};
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(quantizer_of(recipe, {Role::weight, "basic_linear", "0.basic_linear"}), nullptr);
    EXPECT_EQ(quantizer_of(recipe, {Role::input, "basic_linear", "0.basic_linear"})->text,
              "mxfp8_e4m3");
  }
  EXPECT_EQ(requested, 2);
  EXPECT_ERROR(register_quantizer_choice("recipe_test.choice", nullptr), c10::ValueError,
               "register_quantizer_choice: expected a new name, got \"recipe_test.choice\"",
               "which is taken");
}

TEST(Recipe, NoFunctionRoundsWeightsByChance) {
  register_quantizer_choice("recipe_test.by_chance",
                            [](const QuantizeSlot&) { return std::string("nvfp4:sr=1"); });
  const CustomRecipe recipe{.quantizers = "recipe_test.by_chance"};
  EXPECT_EQ(quantizer_of(recipe, {Role::grad_output, "basic_linear", "0.basic_linear"})->text,
            "nvfp4:sr=1");
  EXPECT_ERROR(
      quantizer_of(recipe, {Role::weight, "basic_linear", "0.basic_linear"}), c10::ValueError,
      "CustomRecipe: expected a quantizer that rounds to nearest for the weight of 0.basic_linear",
      "got \"nvfp4:sr=1\"", "whose role is grad_output");
}

TEST(Recipe, BlocksOf128OfEachRole) {
  Float8BlockScaling recipe;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  const auto text = [&](Role role) { return quantizer_of(recipe, {role})->text; };
  EXPECT_EQ(text(Role::input), "fp8_1x128_e4m3:eps=0:pow2=1");
  EXPECT_EQ(text(Role::weight), "fp8_128x128_e4m3:eps=0:pow2=1");
  EXPECT_EQ(text(Role::grad_output), "fp8_1x128_e4m3:eps=0:pow2=1");
  recipe.use_f32_scales = true;
  recipe.fp8_format = RecipeFormat::hybrid;
  recipe.w_block_scaling_dim = 1;
  recipe.grad_block_scaling_dim = 2;
  recipe.amax_epsilon_input = 1;
  recipe.amax_epsilon_weight = 2;
  recipe.amax_epsilon_grad_output = 3;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  EXPECT_EQ(text(Role::input), "fp8_1x128_e4m3:eps=1:pow2=0");
  EXPECT_EQ(text(Role::weight), "fp8_1x128_e4m3:eps=2:pow2=0");
  EXPECT_EQ(text(Role::grad_output), "fp8_128x128_e5m2:eps=3:pow2=0");
  recipe.x_block_scaling_dim = 2;
  EXPECT_ERROR(text(Role::input), c10::ValueError,
               "Float8BlockScaling: expected squares for one operand at most, got 2 block ",
               "scaling dims of 2. No product takes two.");
}

TEST(Recipe, FourBitsOfEachRole) {
  NVFP4BlockScaling recipe;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  const auto text = [&](Role role) { return quantizer_of(recipe, {role})->text; };
  EXPECT_EQ(text(Role::input), "nvfp4:rht=1");
  EXPECT_EQ(text(Role::weight), "nvfp4:2d=1");
  EXPECT_EQ(text(Role::grad_output), "nvfp4:rht=1:sr=1");
  recipe.disable_rht = recipe.disable_2d_quantization = recipe.disable_stochastic_rounding = true;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  for (const Role role : {Role::input, Role::weight, Role::grad_output})
    EXPECT_EQ(text(role), "nvfp4");
}

TEST(Recipe, FourOverSixOfEachRole) {
  using Operands = NVFP4BlockScaling::Operands;
  NVFP4BlockScaling recipe;
  const auto text = [&](Role role) { return quantizer_of(recipe, {role})->text; };
  recipe.nvfp4_4over6 = Operands::all;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  EXPECT_EQ(text(Role::input), "nvfp4_256:rht=1:4over6=mae");
  EXPECT_EQ(text(Role::weight), "nvfp4_256:2d=1:4over6=mae");
  EXPECT_EQ(text(Role::grad_output), "nvfp4:rht=1:sr=1") << "never";
  recipe.disable_rht = true;
  recipe.nvfp4_4over6 = Operands::activations;
  recipe.nvfp4_4over6_e4m3_use_256 = Operands::weights;
  recipe.nvfp4_4over6_err_mode = NVFP4BlockScaling::ErrorMetric::mse;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  EXPECT_EQ(text(Role::input), "nvfp4:4over6=mse");
  EXPECT_EQ(text(Role::weight), "nvfp4:2d=1") << "256 is for those that choose";
  recipe.nvfp4_4over6 = Operands::weights;
  EXPECT_EQ(text(Role::input), "nvfp4");
  EXPECT_EQ(text(Role::weight), "nvfp4_256:2d=1:4over6=mse");
}

TEST(Recipe, DelayedScalingOfEachDirection) {
  DelayedScaling recipe;
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  EXPECT_EQ(history_length(recipe), 1024);
  EXPECT_EQ(history_length(MXFP8BlockScaling()), 0);
  EXPECT_EQ(quantizer_of(recipe, {Role::weight})->text, "fp8_e4m3:delayed");
  EXPECT_EQ(quantizer_of(recipe, {Role::grad_output})->text, "fp8_e5m2:delayed");
  EXPECT_EQ(update_of(recipe, false).text, "fp8_e4m3:margin=0:max");
  recipe.margin = -3;
  recipe.amax_history_len = 5;
  recipe.amax_compute_algo = DelayedScaling::AmaxAlgorithm::most_recent;
  recipe.amax_reduction_group = "0:1";
  recipe.scale_update = "mine";
  EXPECT_EQ(recipe_from_json(to_json(recipe)), Recipe(recipe));
  const std::string text = "fp8_e5m2:margin=-3:most_recent:function=mine:group=0:1";
  EXPECT_EQ(update_of(recipe, true).text, text);
  EXPECT_EQ(&scale_update(text), &update_of(recipe, true)) << "equal updates are one object";
  recipe.reduce_amax = false;
  recipe.fp8_format = RecipeFormat::e4m3;
  EXPECT_EQ(update_of(recipe, true).text, "fp8_e4m3:margin=-3:most_recent:function=mine");
}

TEST(RecipeErrors, DelayedScaling) {
  const auto parse = [](const char* field, const nlohmann::json& value) {
    recipe_from_json({{"name", "DelayedScaling"}, {field, value}});
  };
  EXPECT_ERROR(parse("margin", 65), c10::ValueError,
               "DelayedScaling: expected option margin to be a whole number from -64 to 64, got 65",
               "2^margin");
  EXPECT_ERROR(parse("amax_history_len", 0), c10::ValueError,
               "expected option amax_history_len to be a whole number from 1 to 65536");
  EXPECT_ERROR(
      parse("amax_compute_algo", "least"), c10::ValueError,
      "expected option amax_compute_algo to be one of \"max\", \"most_recent\", got \"least\"");
}

TEST(RecipeErrors, UnknownNameAndFormat) {
  EXPECT_ERROR(recipe_from_json({{"name", "MXFP4BlockScaling"}}), c10::ValueError,
               "recipe: expected \"Float8CurrentScaling\" or \"DelayedScaling\" or ",
               "got \"MXFP4BlockScaling\"", "the recipes that this version knows");
  EXPECT_ERROR(recipe_from_json({{"name", "Float8CurrentScaling"}, {"fp8_format", "E5M2"}}),
               c10::ValueError,
               "Float8CurrentScaling: expected option fp8_format to be one of \"HYBRID\", "
               "\"E4M3\", got \"E5M2\"",
               "too few bits");
}

}  // namespace
}  // namespace tandem::testing::quantization_recipe
