// Lowering: renames, casts, sums, seeds and quantize points; what each op becomes.
#include "planner/lower.h"

#include <ATen/ops/complex.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/view_as_real.h>
#include <gmock/gmock.h>

#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::planner_lower {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const std::string kUnfused = R"({"fuse": false})";
const std::string kRecipe = R"({"fuse": false, "recipe": {"name": "Float8CurrentScaling"}})";

TEST(Lowering, RenamesAreNoSteps) {
  const Planned planned({"identity", to_channel(), "identity", from_channel(), "make_extra_output"},
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

TEST(Lowering, DropoutOfNothingIsARename) {
  const Planned planned({R"(dropout {"options": {"p": 0}})"}, {leaf({2, 4})}, {});
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

TEST(Lowering, AnOpMayKeepItsDtypeUnderAutocast) {
  const Planned planned({R"(gelu {"keeps_dtype": true})", "basic_linear"}, {leaf({2, 4})},
                        {random({3, 4}, at::kBFloat16)}, kUnfused,
                        {.grad_mode = true, .autocast_dtype = at::kBFloat16});
  EXPECT_EQ(planned.forward(),
            "gelu: x -> 0.gelu.y\n"
            "cast: 0.gelu.y -> 0.gelu.y as BFloat16\n"
            "basic_linear: 0.gelu.y as BFloat16, 1.basic_linear.weight -> 1.basic_linear.y\n");
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
  const Planned planned({to_channel(), "basic_linear", "identity"}, {leaf({2, 4})}, {leaf({4, 4})},
                        kRecipe);
  EXPECT_EQ(planned.forward(),
            "quantize: x -> x in fp8_e4m3\n"
            "quantize: 1.basic_linear.weight -> 1.basic_linear.weight in fp8_e4m3\n"
            "basic_linear: x in fp8_e4m3, 1.basic_linear.weight in fp8_e4m3 -> 1.basic_linear.y\n");
  EXPECT_EQ(
      planned.backward(),
      "quantize: grad of 1.basic_linear.y -> grad of 1.basic_linear.y in fp8_e5m2\n"
      "basic_linear.grad_x: grad of 1.basic_linear.y in fp8_e5m2, 1.basic_linear.weight in "
      "fp8_e4m3 "
      "-> grad of x\n"
      "basic_linear.grad_weight: grad of 1.basic_linear.y in fp8_e5m2, x in fp8_e4m3 -> grad of "
      "1.basic_linear.weight\n");
}

TEST(Lowering, CachedWeightsComeFromTheirWorkspaceInBothDirections) {
  const Planned planned({"basic_linear"}, {leaf({2, 4})}, {leaf({4, 4})},
                        R"({"fuse": false, "cache_weights": true,
                            "recipe": {"name": "Float8CurrentScaling"}})");
  EXPECT_THAT(planned.forward(),
              ::testing::HasSubstr(
                  "refresh_weight: 0.basic_linear.weight, 0.basic_linear.weight.row_codes, "
                  "0.basic_linear.weight.row_scale, 0.basic_linear.weight.amax, "
                  "0.basic_linear.weight.stamp -> 0.basic_linear.weight in fp8_e4m3\n"));
  EXPECT_THAT(planned.backward(), ::testing::HasSubstr("refresh_weight: "));
  EXPECT_EQ(planned.plan().workspaces.size(), 4u);
  EXPECT_THAT(planned.kept(),
              ::testing::UnorderedElementsAre("0.basic_linear.weight", "x in fp8_e4m3"))
      << "the weight itself, never its codes, which the next forward may overwrite";
}

TEST(Lowering, EachProductReadsCodesAlongTheDimensionThatItSums) {
  const std::string recipe = R"({"fuse": false, "recipe": {"name": "MXFP8BlockScaling"}})";
  const Planned planned({"basic_linear"}, {leaf({2, 4})}, {leaf({4, 4})}, recipe);
  const std::string x = "x in mxfp8_e4m3 by ", weight = "0.basic_linear.weight in mxfp8_e4m3 by ",
                    grad = "grad of 0.basic_linear.y in mxfp8_e4m3 by ";
  EXPECT_EQ(planned.forward(), "quantize: x -> " + x + "rows, " + x + "columns\n" +
                                   "quantize: 0.basic_linear.weight -> " + weight + "rows, " +
                                   weight + "columns\n" + "basic_linear: " + x + "rows, " + weight +
                                   "rows -> 0.basic_linear.y\n");
  EXPECT_EQ(planned.backward(), "quantize: grad of 0.basic_linear.y -> " + grad + "rows, " + grad +
                                    "columns\n" + "basic_linear.grad_x: " + grad + "rows, " +
                                    weight + "columns -> grad of x\n" +
                                    "basic_linear.grad_weight: " + grad + "columns, " + x +
                                    "columns -> grad of 0.basic_linear.weight\n");
  EXPECT_THAT(planned.kept(), ::testing::UnorderedElementsAre(x + "columns", weight + "columns"));

  const Planned frozen({"basic_linear"}, {leaf({2, 4})}, {random({4, 4})}, recipe);
  EXPECT_THAT(frozen.forward(), ::testing::StartsWith("quantize: x -> " + x + "rows\n"));
  EXPECT_THAT(frozen.backward(),
              ::testing::StartsWith("quantize: grad of 0.basic_linear.y -> " + grad + "rows\n"));
  EXPECT_THAT(frozen.kept(), ::testing::UnorderedElementsAre(weight + "columns"));
}

TEST(Lowering, CodesMadeAgainInBackwardAreThoseThatItReads) {
  const Planned planned({"rms_norm", "basic_linear"}, {leaf({2, 4})}, {leaf({4}), leaf({4, 4})},
                        R"({"fuse": false, "recipe": {"name": "MXFP8BlockScaling"}})");
  EXPECT_THAT(
      planned.forward(),
      ::testing::HasSubstr("quantize: 0.rms_norm.y -> 0.rms_norm.y in mxfp8_e4m3 by rows\n"));
  EXPECT_THAT(planned.backward(), ::testing::HasSubstr("quantize: 0.rms_norm.y -> 0.rms_norm.y in "
                                                       "mxfp8_e4m3 by columns\n"));
}

TEST(Lowering, SeedsOfGradientsAreDrawnInForwardInTheOrderOfTheOps) {
  const std::string recipe = R"({"fuse": false, "recipe": {"name": "NVFP4BlockScaling"}})";
  const Planned planned({"basic_linear", "basic_linear"}, {leaf({2, 4})},
                        {leaf({4, 4}), leaf({4, 4})}, recipe);
  EXPECT_THAT(planned.forward(),
              ::testing::StartsWith("draw_seed: x -> grad of 0.basic_linear.y.seed\n"
                                    "draw_seed: x -> grad of 1.basic_linear.y.seed\n"));
  EXPECT_THAT(planned.backward(),
              ::testing::StartsWith("quantize: grad of 1.basic_linear.y, grad of 1.basic_linear.y."
                                    "seed -> grad of 1.basic_linear.y in nvfp4 by rows, "));
  EXPECT_THAT(planned.kept(), ::testing::Contains("grad of 0.basic_linear.y.seed"));
  const Planned inference({"basic_linear"}, {random({2, 4})}, {random({4, 4})}, recipe);
  EXPECT_THAT(inference.forward(), ::testing::Not(::testing::HasSubstr("seed")));
}

TEST(Lowering, AWorkspaceHoldsTheDirectionsThatAreRead) {
  const std::string recipe = R"({"fuse": false, "cache_weights": true,
                                 "recipe": {"name": "MXFP8BlockScaling"}})";
  const Planned both({"basic_linear"}, {leaf({2, 4})}, {leaf({4, 4})}, recipe);
  EXPECT_EQ(both.plan().workspaces.size(), 6u);
  const Planned rows({"basic_linear"}, {random({2, 4})}, {leaf({4, 4})}, recipe);
  EXPECT_EQ(rows.plan().workspaces.size(), 4u) << "nobody asks for the gradient of x";
  const Planned four({"basic_linear"}, {leaf({2, 4})}, {leaf({4, 4})},
                     R"({"cache_weights": true, "recipe": {"name": "NVFP4BlockScaling"}})");
  EXPECT_EQ(four.plan().workspaces.size(), 8u) << "with an amax behind the scales";
}

TEST(Lowering, TheOpQuantizeFeedsTheProductBehindIt) {
  const Planned planned(
      {R"(quantize {"options": {"forward": true, "backward": true}})", "basic_linear"},
      {leaf({2, 4})}, {leaf({4, 4})}, kRecipe);
  EXPECT_THAT(planned.forward(), ::testing::StartsWith("quantize: x -> x in fp8_e4m3\n"));
  EXPECT_THAT(planned.forward(), ::testing::HasSubstr("basic_linear: x in fp8_e4m3, "));
  EXPECT_THAT(planned.backward(), ::testing::HasSubstr("dequantize: "));
  const Planned without({"quantize"}, {leaf({2, 4})}, {});
  EXPECT_EQ(without.forward(), "") << "a rename without a recipe";
}

TEST(Lowering, ASumInTheCallersTensorHasItsDtypeOnEveryPath) {
  const Ops ops = {kAddInPlace, "basic_linear"};
  for (const bool traced : {false, true})
    for (const auto& [x, extra] :
         {std::pair(at::kFloat, at::kBFloat16), std::pair(at::kBFloat16, at::kFloat)}) {
      const Planned planned(ops, {leaf({2, 4}, x), random({2, 4}, extra)}, {leaf({4, 4})}, "{}",
                            {.grad_mode = true, .traced = traced});
      const Plan& plan = planned.plan();
      const Step& sum = plan.forward[0];
      EXPECT_EQ(sum.name, traced ? "add_extra_input" : "add_extra_input.in_place");
      Value y = sum.writes[0];
      if (traced && x != extra && extra == at::kBFloat16) y = plan.forward[1].writes[0];
      EXPECT_EQ(plan.types[index_of(y)].dtype, extra) << traced;
    }
  const at::Tensor x = leaf({2, 4}), weight = leaf({4, 4}, at::kFloat, 2),
                   extra = random({2, 4}, at::kBFloat16, 3), before = extra.clone();
  for (const Path path : {Path::dispatch, Path::direct}) {
    const RunResult result = run(ops, {x, extra}, {weight}, "{}", path);
    at::Tensor sum = before.clone();
    sum.add_(x.detach());
    EXPECT_TRUE(near(result.outputs[0], sum.to(at::kFloat).matmul(weight.detach().t())));
    EXPECT_EQ(result.gradients[0].scalar_type(), at::kFloat);
    if (path == Path::direct) {
      EXPECT_TRUE(same(extra, sum));
    }
  }
}

TEST(LoweringErrors, ASumThatTheCallersTensorCannotHold) {
  EXPECT_ERROR(Planned({kAddInPlace}, {random({2}), at::ones({2}, at::kLong)}, {}), c10::TypeError,
               "0.add_extra_input: expected an extra input that holds Float, as in_place=True "
               "asks, got Long. Use in_place=False, or convert it.");
}

at::Tensor complex(at::IntArrayRef sizes, bool requires_grad, uint64_t seed = 1) {
  return at::complex(random(sizes, at::kFloat, seed), random(sizes, at::kFloat, seed + 100))
      .set_requires_grad(requires_grad);
}

TEST(Lowering, ComplexNumbersWithoutGradients) {
  const at::Tensor x = complex({2, 4}, false), weight = complex({3, 4}, false, 2);
  EXPECT_TRUE(near(at::view_as_real(run({"basic_linear"}, {x}, {weight}).outputs[0]),
                   at::view_as_real(at::mm(x, weight.t()))));
  const RunResult renamed = run({"identity", "make_extra_output"}, {complex({2}, true)}, {});
  EXPECT_EQ(renamed.gradients[0].scalar_type(), at::kComplexFloat) << "x itself";
}

TEST(LoweringErrors, GradientsOfWhatIsNotReal) {
  const auto refused = [](const Ops& ops, const Tensors& inputs, const Tensors& params,
                          const char* text) {
    EXPECT_ERROR(Planned(ops, inputs, params), c10::NotImplementedError, text,
                 ": expected floating-point operands where gradients are needed, got ",
                 ". Convert them, call under torch.no_grad(), or use torch.nn modules.");
  };
  refused({"basic_linear"}, {complex({2, 4}, false)}, {complex({3, 4}, true)},
          "0.basic_linear: expected floating-point operands where gradients are needed, got "
          "complex64");
  refused({"gelu"}, {complex({2}, true)}, {}, "0.gelu: expected");
  refused({"add_extra_input"}, {leaf({2}), complex({2}, false)}, {}, "0.add_extra_input: expected");
}

TEST(LoweringErrors, OperandsThatDoNotConvert) {
  EXPECT_ERROR(Planned({"basic_linear"}, {complex({2, 4}, false)}, {random({3, 4})}),
               c10::TypeError,
               "0.basic_linear: expected x that converts to float32, in which the op computes, got "
               "complex64",
               ". Convert it before the call, or convert the module.");
  EXPECT_ERROR(Planned({"basic_linear"}, {leaf({2, 4})}, {at::ones({3, 4}, at::kLong)}),
               c10::TypeError, "that converts to int64, in which the op computes, got float32");
}

TEST(LoweringErrors, NumberOfTensors) {
  EXPECT_ERROR(Planned({"basic_linear"}, {random({2, 4})}, {}), c10::ValueError,
               "pipeline: expected 1 inputs and 1 parameters, got 1 and 0",
               ". Pass the main input and one tensor per unbound extra input.");
  EXPECT_ERROR(Planned({"add_extra_input"}, {random({2, 4})}, {}), c10::ValueError,
               "pipeline: expected 2 inputs and 0 parameters");
}

TEST(LoweringErrors, UndefinedTensors) {
  EXPECT_ERROR(Planned({"gelu"}, {at::Tensor()}, {}), c10::ValueError,
               "pipeline: expected a tensor for input 0", ", got an undefined one. Pass a tensor.");
  EXPECT_ERROR(Planned({"bias"}, {random({2, 4})}, {at::Tensor()}), c10::ValueError,
               "expected a tensor for parameter 0");
}

TEST(LoweringErrors, Float64UnderARecipe) {
  EXPECT_ERROR(Planned({"basic_linear"}, {random({2, 4}, at::kDouble)},
                       {random({4, 4}, at::kDouble)}, kRecipe),
               c10::NotImplementedError,
               "0.basic_linear: expected float32, bfloat16 or float16 under a recipe, got float64",
               "Leave the autocast");
}

}  // namespace
}  // namespace tandem::testing::planner_lower
