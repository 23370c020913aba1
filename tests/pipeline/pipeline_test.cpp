// Pipelines: states by recipe and mode, weight workspaces, what they tell.
#include "pipeline/pipeline.h"

#include <gmock/gmock.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "kernel_ops/weights/weights.h"
#include "planner/program.h"
#include "planner/registry.h"
#include "quantization/recipe.h"
#include "support/plans.h"
#include "support/throws.h"
#include "tandem/autocast.h"

namespace tandem::testing::pipeline_pipeline {
namespace {

using ::testing::HasSubstr;

const Ops kMlp = {"rms_norm", "basic_linear", "swiglu", "basic_linear"};
Tensors mlp_params() {
  return {leaf({8}), leaf({24, 8}, at::kFloat, 2), leaf({8, 12}, at::kFloat, 3)};
}

int64_t codes_made() { return kernel_ops::refresh_counts().made; }

TEST(PipelineErrors, NobodyKeepsTheStateOfTheRecipe) {
  Pipeline pipeline(ops_json({"basic_linear"}));
  const Autocast region(true, DelayedScaling{});
  EXPECT_ERROR(pipeline(Tensors{random({2, 4})}, Tensors{random({3, 4})}, true), c10::ValueError,
               "pipeline: expected a front that keeps state for a recipe with a history of amaxes, "
               "got none. Use a Sequential");
}

TEST(Pipeline, TrainingAndEvaluationHavePlansOfTheirOwn) {
  Pipeline pipeline(ops_json({"dropout"}));
  const Tensors inputs{random({4, 4})};
  EXPECT_TRUE(pipeline(inputs, {}, false)[0].is_same(inputs[0]));
  EXPECT_FALSE(pipeline(inputs, {}, true)[0].is_same(inputs[0]));
  EXPECT_THAT(pipeline.explain(ExplainFormat::text),
              ::testing::AllOf(HasSubstr("plan: evaluation, without gradients"),
                               HasSubstr("plan: training, without gradients")));
}

TEST(Pipeline, WeightsAreQuantizedOnceWhateverTheRegion) {
  Pipeline pipeline(ops_json(kMlp));
  const Tensors inputs{leaf({4, 8})}, params = mlp_params();
  const int64_t before = codes_made();
  {
    const Autocast outer;
    at::Tensor y = pipeline(inputs, params, true)[0];
    EXPECT_EQ(codes_made(), before + 2) << "two weights";
    {
      const Autocast inner;
      pipeline(inputs, params, true);
    }
    y.sum().backward();
    EXPECT_EQ(codes_made(), before + 2) << "backward finds them";
  }
  const Autocast next;
  pipeline(inputs, params, true);
  EXPECT_EQ(codes_made(), before + 2) << "their bytes are the same";
}

TEST(Pipeline, BackwardOutsideTheRegionFindsTheCodes) {
  Pipeline pipeline(ops_json({"basic_linear"}));
  const Tensors inputs{leaf({4, 8})}, params{leaf({8, 8})};
  at::Tensor y;
  {
    const Autocast region;
    y = pipeline(inputs, params, true)[0];
  }
  const int64_t made = codes_made();
  y.sum().backward();
  EXPECT_EQ(codes_made(), made);
}

TEST(Pipeline, AnOptimizerStepInsideARegionMakesCodesAgain) {
  Pipeline pipeline(ops_json({"basic_linear"}));
  const Tensors inputs{leaf({4, 8})}, params{leaf({8, 8})};
  const Autocast region;
  const at::Tensor before = pipeline(inputs, params, true)[0];
  params[0].detach().add_(1);
  const at::Tensor after = pipeline(inputs, params, true)[0];
  EXPECT_FALSE(near(after, before));
  params[0].mutable_data_ptr<float>()[0] = 1000;
  EXPECT_FALSE(near(pipeline(inputs, params, true)[0], after));
}

TEST(Pipeline, AWeightOfAnotherShapeGetsAnotherWorkspace) {
  Pipeline pipeline(ops_json({"basic_linear"}));
  const Tensors inputs{leaf({4, 8})};
  const Autocast region;
  for (const int64_t features : {3, 5, 3}) {
    const Tensors params{leaf({features, 8})};
    EXPECT_EQ(pipeline(inputs, params, true)[0].size(1), features);
  }
}

TEST(Pipeline, CachedCodesGiveTheNumbersOfFreshOnes) {
  const Tensors inputs{leaf({4, 8})}, params = mlp_params();
  const RunResult fresh =
      run(kMlp, inputs, params, R"({"recipe": {"name": "Float8CurrentScaling"}})");
  Pipeline pipeline(ops_json(kMlp));
  const Autocast region;
  const Outputs outputs = pipeline(inputs, params, true);
  EXPECT_TRUE(same(outputs[0], fresh.outputs[0]));
  Tensors requested = inputs;
  requested.insert(requested.end(), params.begin(), params.end());
  const Tensors grad{random({4, 8}, at::kFloat, 51)};
  const auto gradients = gradients_of(outputs, requested, grad);
  for (size_t i = 0; i < gradients.size(); ++i)
    EXPECT_TRUE(same(gradients[i], fresh.gradients[i])) << i;
}

TEST(Pipeline, RecipesDoNotShareCodes) {
  Pipeline pipeline(ops_json({"basic_linear"}));
  const Tensors inputs{random({4, 8})}, params{random({8, 8})};
  const Autocast any;
  const at::Tensor y = pipeline(inputs, params, true)[0];
  Float8CurrentScaling power_of_two;
  power_of_two.use_power_2_scales = true;
  {
    const Autocast inner(true, power_of_two);
    EXPECT_FALSE(same(pipeline(inputs, params, true)[0], y));
  }
  EXPECT_TRUE(same(pipeline(inputs, params, true)[0], y));
}

TEST(Pipeline, RequiredFusions) {
  const Tensors inputs{random({2, 8})}, params{random({4, 8})};
  Pipeline pipeline(ops_json({"basic_linear"}), {"linear_bias"});
  EXPECT_ERROR(pipeline(inputs, params, true), c10::ValueError,
               "require_fusion: expected fusion \"linear_bias\"");
}

TEST(Pipeline, TellsTheFusionsItMade) {
  Pipeline pipeline(ops_json({"basic_linear", "bias", "gelu"}));
  const Tensors inputs{leaf({2, 8})}, params{leaf({4, 8}), leaf({4})};
  pipeline(inputs, params, true);
  EXPECT_THAT(pipeline.fusions_made(),
              ::testing::ElementsAre("activation_backward_bias", "linear_bias_activation"));
}

TEST(Pipeline, ARegisteredFusionIsPlannedAtTheNextCall) {
  Pipeline pipeline(ops_json({"gelu", "silu"}));
  const Tensors inputs{random({2, 8})};
  const at::Tensor y = pipeline(inputs, {}, true)[0];
  {
    const FusionHandle handle =
        register_fusion({.name = "test_constant",
                         .pattern = {"gelu", "silu"},
                         .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = [](Call& call) {
                                   call.out(0, call.in(0).clone().fill_(7));
                                 }}});
    EXPECT_EQ(pipeline(inputs, {}, true)[0].max().item<float>(), 7);
  }
  EXPECT_TRUE(same(pipeline(inputs, {}, true)[0], y));
}

TEST(Pipeline, WhatRemovedFusionsWerePartOfDies) {
  Pipeline pipeline(ops_json({"gelu", "silu"}));
  const Tensors inputs{leaf({3})};
  pipeline(inputs, {}, true);
  const int64_t before = Program::alive();
  for (int i = 0; i < 40; ++i) {
    const at::Tensor y = pipeline(inputs, {}, true)[0];
    bump_fusions_version();
    y.sum().backward();
  }
  EXPECT_LE(Program::alive(), before + 1);
}

TEST(Pipeline, OfManyRecipesTheLastOnesStay) {
  Pipeline pipeline(ops_json(kMlp));
  const Tensors inputs{leaf({4, 8})}, params = mlp_params();
  for (int i = 0; i < 40; ++i) {
    const Autocast region(true, Float8CurrentScaling{.amax_epsilon_input = i / 100.0});
    pipeline(inputs, params, true);
  }
  const auto report = nlohmann::json::parse(pipeline.explain(ExplainFormat::json));
  EXPECT_EQ(report["plans"].size(), 16u);
}

TEST(PipelineDescription, HoldsStateAndBuild) {
  const Pipeline pipeline(ops_json({"gelu"}));
  const auto description = nlohmann::json::parse(pipeline.description(true));
  EXPECT_TRUE(description.at("training").get<bool>());
  EXPECT_TRUE(description.at("recipe").is_null());
  EXPECT_FALSE(description.at("build").get<std::string>().empty());
  EXPECT_NE(pipeline.description(true), pipeline.description(false));
  EXPECT_NE(pipeline.description(true), pipeline.description(true, /*fuse=*/false));
  EXPECT_NE(pipeline.description(true), pipeline.description(true, true, {"linear_bias"}));
  const Autocast region;
  EXPECT_EQ(nlohmann::json::parse(pipeline.description(true)).at("recipe"),
            to_json(Float8CurrentScaling()));
}

TEST(AutocastRegions, NestAndSwitchOff) {
  EXPECT_EQ(active_recipe(), nullptr);
  {
    const Autocast outer;
    const ActiveRecipe* recipe = active_recipe();
    ASSERT_NE(recipe, nullptr);
    {
      const Autocast off(false);
      EXPECT_EQ(active_recipe(), nullptr);
    }
    EXPECT_EQ(active_recipe(), recipe);
    const Autocast equal;
    EXPECT_EQ(active_recipe(), recipe) << "equal recipes are one object";
  }
  EXPECT_EQ(active_recipe(), nullptr);
}

TEST(AutocastRegions, ARecipeLivesAsLongAsARegionOrAPipelineUsesIt) {
  const std::string gone = "one that nothing has used for long";
  const auto use_others = [] {
    for (int i = 1; i <= 65; ++i)
      Autocast(true, Float8CurrentScaling{.amax_epsilon_input = static_cast<double>(i)});
  };
  const Float8CurrentScaling recipe{.amax_epsilon_input = 0.123};
  int64_t number = 0;
  {
    const Autocast region(true, recipe);
    number = active_recipe()->number;
    EXPECT_EQ(recipe_text(number), to_json(recipe).dump());
  }
  EXPECT_EQ(recipe_text(number), to_json(recipe).dump()) << "errors may still show it";
  use_others();
  EXPECT_EQ(recipe_text(number), gone);
  {
    Pipeline pipeline(ops_json(kMlp));
    {
      const Autocast region(true, recipe);
      EXPECT_EQ(active_recipe()->number, number) << "an equal one made later is the same";
      pipeline({leaf({4, 8})}, mlp_params(), true);
    }
    use_others();
    EXPECT_EQ(recipe_text(number), to_json(recipe).dump());
    const Autocast again(true, recipe);
    EXPECT_EQ(active_recipe()->number, number);
  }
  use_others();
  EXPECT_EQ(recipe_text(number), gone);
}

TEST(AutocastRegions, OneWeightCodeRegionPerOutermost) {
  int64_t first = 0;
  {
    const Autocast outer;
    first = kernel_ops::current_region();
    const Autocast inner;
    EXPECT_EQ(kernel_ops::current_region(), first);
  }
  const Autocast second;
  EXPECT_GT(kernel_ops::current_region(), first);
}

TEST(AutocastRegions, EndingOutOfOrderOrElsewhereLeavesTheOthersAndNoneForGood) {
  auto outer = std::make_unique<Autocast>();
  auto inner = std::make_unique<Autocast>(true, Float8CurrentScaling{.use_power_2_scales = true});
  const ActiveRecipe* recipe = active_recipe();
  outer.reset();
  EXPECT_EQ(active_recipe(), recipe);
  inner.reset();
  EXPECT_EQ(active_recipe(), nullptr);
  EXPECT_EQ(kernel_ops::current_region(), 0);
  auto given_away = std::make_unique<Autocast>();
  std::thread([&] {
    EXPECT_EQ(active_recipe(), nullptr) << "a region belongs to its thread";
    const Autocast own;
    given_away.reset();
    EXPECT_NE(active_recipe(), nullptr);
  }).join();
  EXPECT_EQ(active_recipe(), nullptr);
}

TEST(AutocastRegions, AnUnknownRecipeLeavesNoRegionBehind) {
  const int64_t before = kernel_ops::current_region();
  EXPECT_ERROR(enter_autocast(R"({"name": "MXFP4"})"), c10::ValueError,
               "recipe: expected \"Float8CurrentScaling\"");
  EXPECT_EQ(active_recipe(), nullptr);
  EXPECT_EQ(kernel_ops::current_region(), before);
}

}  // namespace
}  // namespace tandem::testing::pipeline_pipeline
