// Lowering: renames, casts, sums, seeds and quantize points; what each op becomes.
#include "planner/lower.h"

#include <gmock/gmock.h>

#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const std::string kUnfused = R"({"fuse": false})";
const std::string kRecipe = R"({"fuse": false, "recipe": {"name": "Float8CurrentScaling"}})";

TEST(Lowering, RenamesAreNoSteps) {
  const Planned planned(
      {"identity", R"(make_extra_output {"extra_outputs": [{"channel": "r", "to_caller": false}]})",
       "identity", R"(add_extra_input {"extra_inputs": [{"channel": "r"}]})", "make_extra_output"},
      {leaf({2, 4})}, {});
  EXPECT_EQ(planned.forward(), "add_extra_input: x, x -> 3.add_extra_input.y\n");
  EXPECT_EQ(planned.backward(),
            "add: grad of 3.add_extra_input.y, grad of 3.add_extra_input.y -> grad of "
            "3.add_extra_input.y\n"
            "add: grad of 3.add_extra_input.y, grad of 3.add_extra_input.y -> grad of x\n");
  EXPECT_THAT(planned.kept(), IsEmpty());
  EXPECT_THAT(planned.outputs(), ElementsAre("3.add_extra_input.y", "3.add_extra_input.y"));
}

TEST(Lowering, APipelineOfRenamesReturnsItsInput) {
  const Planned planned({"identity", "make_extra_output"}, {leaf({2, 4})}, {});
  EXPECT_EQ(planned.forward(), "");
  EXPECT_THAT(planned.outputs(), ElementsAre("x", "x"));
  EXPECT_EQ(planned.backward(), "add: grad of x, grad of x -> grad of x\n");
}

TEST(Lowering, AddExtraInputGivesItsGradientToBoth) {
  const Planned planned({"add_extra_input"}, {leaf({2, 4}), leaf({2, 4})}, {});
  EXPECT_EQ(planned.forward(), "add_extra_input: x, extra 0 -> 0.add_extra_input.y\n");
  EXPECT_EQ(planned.backward(), "");
  EXPECT_TRUE(planned.plan().needs_backward);
  EXPECT_EQ(planned.plan().gradients[0], planned.plan().output_gradients[0]);
  EXPECT_EQ(planned.plan().gradients[1], planned.plan().output_gradients[0]);
}

TEST(Lowering, BiasSumsRowsAndPassesTheGradientOn) {
  const Planned planned({"bias"}, {leaf({2, 4})}, {leaf({4})}, kUnfused);
  EXPECT_EQ(planned.forward(), "bias: x, 0.bias.bias -> 0.bias.y\n");
  EXPECT_EQ(planned.backward(), "bias.grad_bias: grad of 0.bias.y -> grad of 0.bias.bias\n");
  EXPECT_THAT(planned.kept(), IsEmpty());
}

TEST(Lowering, ReshapeKeepsASizeOnly) {
  const Planned planned({R"(reshape {"options": {"shape": [-1]}})"}, {leaf({2, 4})}, {});
  EXPECT_EQ(planned.forward(), "reshape: x -> 0.reshape.y, 0.reshape.x_shape\n");
  EXPECT_EQ(planned.backward(),
            "reshape.backward: grad of 0.reshape.y, 0.reshape.x_shape -> grad of x\n");
  EXPECT_THAT(planned.kept(), ElementsAre("0.reshape.x_shape"));
  const Planned without({R"(reshape {"options": {"shape": [-1]}})"}, {random({2, 4})}, {});
  EXPECT_EQ(without.forward(), "reshape: x -> 0.reshape.y\n");
}

TEST(Lowering, DropoutDrawsASeedAndKeepsOnlyThat) {
  const Planned planned({"dropout", "dropout"}, {leaf({2, 4})}, {});
  EXPECT_EQ(planned.forward(),
            "draw_seed: x -> 0.dropout.seed\n"
            "dropout: x, 0.dropout.seed -> 0.dropout.y\n"
            "draw_seed: x -> 1.dropout.seed\n"
            "dropout: 0.dropout.y, 1.dropout.seed -> 1.dropout.y\n");
  EXPECT_EQ(planned.backward(),
            "dropout.backward: grad of 1.dropout.y, 1.dropout.seed -> grad of 0.dropout.y\n"
            "dropout.backward: grad of 0.dropout.y, 0.dropout.seed -> grad of x\n");
  EXPECT_THAT(planned.kept(), ElementsAre("1.dropout.seed", "0.dropout.seed"));
}

TEST(Lowering, InEvaluationDropoutIsARename) {
  const Planned planned({"dropout"}, {leaf({2, 4})}, {}, R"({"training": false})");
  EXPECT_EQ(planned.forward(), "");
  EXPECT_THAT(planned.outputs(), ElementsAre("x"));
}

TEST(Lowering, ConstantScaleKeepsNothing) {
  const Planned planned({R"(constant_scale {"options": {"factor": 2}})"}, {leaf({2, 4})}, {});
  EXPECT_EQ(planned.forward(), "constant_scale: x -> 0.constant_scale.y\n");
  EXPECT_THAT(planned.kept(), IsEmpty());
}

TEST(Lowering, MixedDtypesBecomeCasts) {
  const Planned planned({"basic_linear", "bias"}, {leaf({2, 4}, at::kBFloat16)},
                        {leaf({3, 4}), leaf({3}, at::kBFloat16)}, kUnfused);
  EXPECT_EQ(planned.forward(),
            "cast: x -> x as Float\n"
            "basic_linear: x as Float, 0.basic_linear.weight -> 0.basic_linear.y\n"
            "bias: 0.basic_linear.y, 1.bias.bias -> 1.bias.y\n");
  EXPECT_EQ(planned.backward(),
            "bias.grad_bias: grad of 1.bias.y -> grad of 1.bias.bias\n"
            "basic_linear.grad_x: grad of 1.bias.y, 0.basic_linear.weight -> grad of x as Float\n"
            "basic_linear.grad_weight: grad of 1.bias.y, x as Float -> grad of "
            "0.basic_linear.weight\n"
            "cast: grad of x as Float -> grad of x\n");
}

TEST(Lowering, AutocastDecidesTheDtypeAndIsPartOfTheKey) {
  const Tensors inputs{leaf({2, 4})}, params{leaf({3, 4}), leaf({3})};
  const Ops ops = {"basic_linear", "bias"};
  const Planned planned(ops, inputs, params, kUnfused,
                        {.grad_mode = true, .autocast_dtype = at::kBFloat16});
  EXPECT_EQ(planned.forward(),
            "cast: x -> x as BFloat16\n"
            "cast: 0.basic_linear.weight -> 0.basic_linear.weight as BFloat16\n"
            "basic_linear: x as BFloat16, 0.basic_linear.weight as BFloat16 -> 0.basic_linear.y\n"
            "cast: 1.bias.bias -> 1.bias.bias as BFloat16\n"
            "bias: 0.basic_linear.y, 1.bias.bias as BFloat16 -> 1.bias.y\n");
  PlanKey with({.grad_mode = true, .autocast_dtype = at::kBFloat16}), without({.grad_mode = true});
  EXPECT_FALSE(with == without);
  EXPECT_EQ(with.call().autocast_dtype, at::kBFloat16);
}

TEST(Lowering, Float64IsNotTouchedByAutocast) {
  const Planned planned({"gelu"}, {leaf({2, 4}, at::kDouble)}, {}, "{}",
                        {.grad_mode = true, .autocast_dtype = at::kBFloat16});
  EXPECT_EQ(planned.forward(), "gelu: x -> 0.gelu.y\n");
}

TEST(Lowering, ASharedCastIsMadeOnce) {
  const Planned planned({"basic_linear", R"(basic_linear {"params": [0]})"},
                        {random({2, 4}, at::kBFloat16)}, {leaf({4, 4})}, kUnfused,
                        {.grad_mode = true, .autocast_dtype = at::kHalf});
  EXPECT_EQ(planned.forward(),
            "cast: x -> x as Half\n"
            "cast: 1.basic_linear.weight -> 1.basic_linear.weight as Half\n"
            "basic_linear: x as Half, 1.basic_linear.weight as Half -> 0.basic_linear.y\n"
            "basic_linear: 0.basic_linear.y, 1.basic_linear.weight as Half -> 1.basic_linear.y\n");
}

TEST(Lowering, GradientsOfSeveralReadersAreAdded) {
  const Planned planned({"gelu", "make_extra_output", "silu"}, {leaf({2, 4})}, {}, kUnfused);
  EXPECT_EQ(planned.backward(),
            "silu.backward: grad of 2.silu.y, 0.gelu.y -> grad of 0.gelu.y\n"
            "add: grad of 0.gelu.y, grad of 0.gelu.y -> grad of 0.gelu.y\n"
            "gelu.backward: grad of 0.gelu.y, x -> grad of x\n");
}

TEST(Lowering, CodesOfOneTensorAreMadeOnce) {
  const Planned planned(
      {R"(make_extra_output {"extra_outputs": [{"channel": "r", "to_caller": false}]})",
       "basic_linear", "identity"},
      {leaf({2, 4})}, {leaf({4, 4})}, kRecipe);
  EXPECT_EQ(planned.forward(),
            "quantize: x -> x in e4m3\n"
            "quantize: 1.basic_linear.weight -> 1.basic_linear.weight in e4m3\n"
            "basic_linear: x in e4m3, 1.basic_linear.weight in e4m3 -> 1.basic_linear.y\n");
  EXPECT_EQ(planned.backward(),
            "quantize: grad of 1.basic_linear.y -> grad of 1.basic_linear.y in e5m2\n"
            "basic_linear.grad_x: grad of 1.basic_linear.y in e5m2, 1.basic_linear.weight in e4m3 "
            "-> grad of x\n"
            "basic_linear.grad_weight: grad of 1.basic_linear.y in e5m2, x in e4m3 -> grad of "
            "1.basic_linear.weight\n");
}

TEST(Lowering, CachedWeightsComeFromTheirWorkspaceInBothDirections) {
  const Planned planned({"basic_linear"}, {leaf({2, 4})}, {leaf({4, 4})},
                        R"({"fuse": false, "cache_weights": true,
                            "recipe": {"name": "Float8CurrentScaling"}})");
  EXPECT_THAT(
      planned.forward(),
      ::testing::HasSubstr("refresh_weight: 0.basic_linear.weight, 0.basic_linear.weight.codes, "
                           "0.basic_linear.weight.dequant_scale, 0.basic_linear.weight.amax, "
                           "0.basic_linear.weight.stamp -> 0.basic_linear.weight in e4m3\n"));
  EXPECT_THAT(planned.backward(), ::testing::HasSubstr("refresh_weight: "));
  EXPECT_EQ(planned.plan().workspaces.size(), 4u);
  EXPECT_THAT(planned.kept(), ::testing::UnorderedElementsAre("0.basic_linear.weight", "x in e4m3"))
      << "the weight itself, never its codes, which the next forward may overwrite";
}

TEST(Lowering, TheOpQuantizeFeedsTheProductBehindIt) {
  const Planned planned(
      {R"(quantize {"options": {"forward": true, "backward": true}})", "basic_linear"},
      {leaf({2, 4})}, {leaf({4, 4})}, kRecipe);
  EXPECT_THAT(planned.forward(), ::testing::StartsWith("quantize: x -> x in e4m3\n"));
  EXPECT_THAT(planned.forward(), ::testing::HasSubstr("basic_linear: x in e4m3, "));
  EXPECT_THAT(planned.backward(), ::testing::HasSubstr("dequantize: "));
  const Planned without({"quantize"}, {leaf({2, 4})}, {});
  EXPECT_EQ(without.forward(), "") << "a rename without a recipe";
}

TEST(LoweringErrors, NumberOfTensors) {
  EXPECT_THAT(
      [] {
        Planned({"basic_linear"}, {random({2, 4})}, {});
      },
      ThrowsText<c10::ValueError>(
          "pipeline: expected 1 inputs and 1 parameters, got 1 tensors",
          " tensors. Pass the main input and one tensor per unbound extra input."));
  EXPECT_THAT(
      [] {
        Planned({"add_extra_input"}, {random({2, 4})}, {});
      },
      ThrowsText<c10::ValueError>("pipeline: expected 2 inputs and 0 parameters"));
}

TEST(LoweringErrors, UndefinedTensors) {
  EXPECT_THAT([] { Planned({"gelu"}, {at::Tensor()}, {}); },
              ThrowsText<c10::ValueError>("pipeline: expected a tensor for input 0",
                                          "pipeline: expected a tensor for ",
                                          ", got an undefined one. Pass a tensor."));
  EXPECT_THAT(
      [] {
        Planned({"bias"}, {random({2, 4})}, {at::Tensor()});
      },
      ThrowsText<c10::ValueError>("expected a tensor for parameter 0"));
}

TEST(LoweringErrors, Float64UnderARecipe) {
  EXPECT_THAT(
      [] {
        Planned({"basic_linear"}, {random({2, 4}, at::kDouble)}, {random({4, 4}, at::kDouble)},
                kRecipe);
      },
      ThrowsText<c10::NotImplementedError>(
          "0.basic_linear: expected float32, bfloat16 or float16 under a recipe, got float64",
          ": expected float32, bfloat16 or float16 under a recipe, got ", "Leave the autocast"));
}

}  // namespace
}  // namespace tandem::testing
