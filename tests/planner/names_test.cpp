// Names are for people: whatever a user calls an op, an operand or a fusion, the planner takes it
// for what it is.
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>

#include "core/call.h"
#include "planner/planner.h"
#include "planner/registry.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::planner_names {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

void twice(Call& call) { call.out(0, call.in(0) * 2); }

/// y = 2 x.
OpDef doubling(std::string_view name) {
  return {
      .name = name,
      .formula = "y = 2 x",
      .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = twice}},
      .backward = {{.name = "backward", .reads = {"grad_y"}, .writes = {"grad_x"}, .run = twice}}};
}

// What the planner calls its own steps, and families of ops.
const OpDef kAdd = doubling("add"), kCast = doubling("cast"), kRename = doubling("rename"),
            kSeed = doubling("draw_seed"), kDequantize = doubling("dequantize"),
            kRefresh = doubling("refresh_weight"), kActivation = doubling("activation"),
            kScaled = doubling("scaled_activation"), kNorm = doubling("norm");
TANDEM_REGISTER_OP(kAdd);
TANDEM_REGISTER_OP(kCast);
TANDEM_REGISTER_OP(kRename);
TANDEM_REGISTER_OP(kSeed);
TANDEM_REGISTER_OP(kDequantize);
TANDEM_REGISTER_OP(kRefresh);
TANDEM_REGISTER_OP(kActivation);
TANDEM_REGISTER_OP(kScaled);
TANDEM_REGISTER_OP(kNorm);

class Names : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(OfOurs, Names,
                         ::testing::Values("add", "cast", "rename", "draw_seed", "dequantize",
                                           "refresh_weight", "activation", "scaled_activation",
                                           "norm"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Names, ServeAnOpOfAUser) {
  // An extra output and a product before it, so that there are sums of gradients and patterns to be
  // taken for.
  const std::string op = GetParam();
  const Ops ops = {"basic_linear", "bias", op, "make_extra_output", op};
  const at::Tensor x = leaf({3, 4}), weight = leaf({5, 4}, at::kFloat, 2),
                   bias = leaf({5}, at::kFloat, 3);
  const RunResult result = run(ops, {x}, {weight, bias});
  const at::Tensor z = (x.matmul(weight.t()) + bias).detach();
  EXPECT_TRUE(near(result.outputs, {z * 4, z * 2}));
  const at::Tensor grad_z = random({3, 5}, at::kFloat, 51) * 4 + random({3, 5}, at::kFloat, 52) * 2;
  EXPECT_TRUE(near(result.gradients[0], grad_z.matmul(weight.detach())));
  EXPECT_TRUE(near(result.gradients[2], grad_z.sum(0)));
  for (const char* recipe : {"{}", R"({"recipe": {"name": "Float8CurrentScaling"}})"})
    EXPECT_TRUE(fused_equals_unfused(ops, {x}, {weight, bias}, recipe));
}

void joint_forward(Call& call) {
  call.out(0, call.in(0) * 4);
  call.out(1, call.in(0).clone());
}
void joint_backward(Call& call) { call.out(0, call.in(0) * 4); }

TEST_P(Names, ServeAFusionOfAUser) {
  const std::string name = GetParam();
  const auto expected = [](const at::Tensor& x) { return random(x.sizes(), at::kFloat, 51) * 4; };
  const at::Tensor x = leaf({3, 4});
  {
    const FusionHandle joint = register_fusion(
        {.name = name,
         .pass = Pass::joint,
         .pattern = {"cast", "norm"},
         .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = joint_forward},
         .backward = {.reads = {{1, "grad_y"}}, .writes = {{0, "grad_x"}}, .run = joint_backward},
         .keeps = {"copy"}});
    EXPECT_THAT(Planned({"cast", "norm"}, {x}, {}).backward(),
                HasSubstr(name + ": grad of 1.norm.y"));
    EXPECT_TRUE(near(run({"cast", "norm"}, {x}, {}, R"({"fusions_version": 2001})").gradients[0],
                     expected(x)));
  }
  const FusionHandle backward = register_fusion(
      {.name = name,
       .pass = Pass::backward,
       .pattern = {"norm.backward", "cast.backward"},
       .run = {.reads = {{0, "grad_y"}}, .writes = {{1, "grad_x"}}, .run = joint_backward}});
  EXPECT_TRUE(near(run({"cast", "norm"}, {x}, {}, R"({"fusions_version": 2002})").gradients[0],
                   expected(x)));
}

void product_of(Call& call) { call.out(0, call.in(0) * call.in(1)); }

/// Operands that are called as gradients of others.
const OpDef kGradients{
    .name = "test_gradients",
    .formula = "y = x grad_x grad_grad_x",
    .inputs = {"x", "grad_x"},
    .params = {"grad_grad_x"},
    .dtype = DtypeRule::promote,
    .forward = {{.name = "forward",
                 .reads = {"x", "grad_x", "grad_grad_x"},
                 .writes = {"y"},
                 .run = [](Call& call) { call.out(0, call.in(0) * call.in(1) * call.in(2)); }}},
    .backward = {{.name = "first",
                  .reads = {"grad_y", "x", "grad_x", "grad_grad_x"},
                  .writes = {"grad_x", "grad_grad_x", "grad_grad_grad_x"},
                  .run = [](Call& call) {
                    const at::Tensor &gy = call.in(0), &x = call.in(1), &a = call.in(2),
                                     &b = call.in(3);
                    if (call.wants(0)) call.out(0, gy * a * b);
                    if (call.wants(1)) call.out(1, gy * x * b);
                    if (call.wants(2)) call.out(2, gy * x * a);
                  }}}};
TANDEM_REGISTER_OP(kGradients);

TEST(OperandNames, MayLookLikeGradients) {
  EXPECT_TRUE(gradients_match(
      function_of({"test_gradients", "gelu"}, 2),
      {leaf({3}, at::kDouble), leaf({3}, at::kDouble, 2), leaf({3}, at::kDouble, 3)}));
}

TEST(OperandNames, AreReadAndWrittenBySide) {
  const FusionHandle handle = register_fusion(
      {.name = "test_side",
       .pass = Pass::backward,
       .pattern = {"gelu.backward", "test_gradients.first"},
       .run = {.reads = {{0, "grad_y"}, {0, "x"}, {1, "x"}, {1, "grad_x"}, {1, "grad_grad_x"}},
               .writes = {{1, "grad_x"}, {1, "grad_grad_x"}, {1, "grad_grad_grad_x"}},
               .run = product_of}});
  EXPECT_EQ(Planned({"test_gradients", "gelu"}, {leaf({3}), leaf({3})}, {leaf({3})}).backward(),
            "test_side: grad of 1.gelu.y, 0.test_gradients.y, x, extra 0, "
            "0.test_gradients.grad_grad_x -> grad of x, grad of extra 0, grad of "
            "0.test_gradients.grad_grad_x\n");
}

TEST(OperandNames, TheMainOnesNeedNotBeXAndY) {
  static const OpDef named{
      .name = "test_main_names",
      .formula = "b = 2 a",
      .inputs = {"a"},
      .results = {{"b"}},
      .forward = {{.name = "forward", .reads = {"a"}, .writes = {"b"}, .run = twice}},
      .backward = {{.name = "backward", .reads = {"grad_b"}, .writes = {"grad_a"}, .run = twice}}};
  static const bool registered = (register_op(named), true);
  EXPECT_TRUE(registered);
  const FusionHandle handle =
      register_fusion({.name = "test_main",
                       .pattern = {"test_main_names", "cast"},
                       .run = {.reads = {{0, "a"}}, .writes = {{1, "y"}}, .run = joint_backward}});
  const at::Tensor x = leaf({3});
  EXPECT_EQ(Planned({"test_main_names", "cast"}, {x}, {}).forward(), "test_main: x -> 1.cast.y\n");
  EXPECT_TRUE(
      fused_equals_unfused({"test_main_names", "cast"}, {x}, {}, R"({"fusions_version": 2003})"));
}

TEST(Patterns, OfNamesMeanOpsAndOfKindsThePlanner) {
  const auto fusion = [](PatternStep first) {
    return Fusion{.name = "test_kinds",
                  .pattern = {first},
                  .run = {.reads = {{0, "x"}}, .writes = {{0, "y"}}, .run = twice}};
  };
  const Tensors inputs{random({2, 4}, at::kHalf)}, weights{random({3, 4})};
  const Ops ops = {"basic_linear", "cast"};
  {
    const FusionHandle handle = register_fusion(fusion("cast"));
    EXPECT_THAT(Planned(ops, inputs, weights).decisions(),
                ::testing::ElementsAre("test_kinds at 1.cast: made"));
  }
  const FusionHandle handle = register_fusion(fusion(StepKind::cast));
  EXPECT_THAT(Planned(ops, inputs, weights).decisions(),
              ::testing::ElementsAre("test_kinds at cast: made"));
}

TEST(Patterns, OfAFamilyMeanItsOpsOnly) {
  const FusionHandle handle =
      register_fusion({.name = "test_family",
                       .pattern = {PatternStep::any_of("activation")},
                       .run = {.reads = {{0, "x"}}, .writes = {{0, "y"}}, .run = twice}});
  EXPECT_THAT(Planned({"activation", "gelu", "silu"}, {random({2})}, {}).decisions(),
              ::testing::ElementsAre("test_family at 1.gelu: made", "test_family at 2.silu: made"));
}

TEST(Patterns, OfNamesDoNotMeanFusions) {
  const FusionHandle first =
      register_fusion({.name = "gelu",
                       .pattern = {"cast", "norm"},
                       .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = joint_backward}});
  const FusionHandle second =
      register_fusion({.name = "test_second",
                       .pattern = {"gelu", "rename"},
                       .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = joint_backward}});
  EXPECT_THAT(Planned({"cast", "norm", "rename"}, {random({2})}, {}).forward(),
              Not(HasSubstr("test_second")));
}

TEST(PatternErrors, OperandsThatAreNotThere) {
  Fusion fusion{.name = "test_operands",
                .pattern = {"cast", "norm"},
                .run = {.reads = {{0, "x"}, {1, "scale"}}, .writes = {{1, "y"}}, .run = twice}};
  {
    const FusionHandle handle = register_fusion(fusion);
    EXPECT_THAT(Planned({"cast", "norm"}, {random({2})}, {}).decisions(),
                Contains("test_operands at 0.cast + 1.norm: step norm has no operand called "
                         "\"scale\""));
  }
  fusion.run.reads = {{0, "x"}, {1, kOtherRead}};
  {
    const FusionHandle handle = register_fusion(fusion);
    EXPECT_THAT(
        Planned({"cast", "norm"}, {random({2})}, {}).decisions(),
        Contains("test_operands at 0.cast + 1.norm: step norm has not one read that is left"));
  }
  fusion.run.reads = {{0, "x"}, {2, "x"}};
  EXPECT_ERROR(register_fusion(fusion), c10::ValueError,
               "fusion \"test_operands\": expected operands of the 2 steps of its pattern, got x "
               "of step 2. Count the steps from 0.");
}

TEST(PatternErrors, StepsThatNoOpHas) {
  const auto register_pattern = [](Pass pass, const std::vector<PatternStep>& pattern) {
    register_fusion({.name = "test_steps",
                     .pass = pass,
                     .pattern = pattern,
                     .run = {.reads = {{0, "x"}}, .writes = {{0, "y"}}, .run = twice}});
  };
  EXPECT_ERROR(register_pattern(Pass::forward, {"silu", "rms_nrom"}), c10::ValueError,
               "fusion \"test_steps\": expected step 1 of its pattern to be one of ", "rms_norm",
               " in the forward pass, got \"rms_nrom\". Register the op before the fusion, or name "
               "another step.");
  EXPECT_ERROR(register_pattern(Pass::forward, {"rms_norm.backward"}), c10::ValueError,
               "expected step 0 of its pattern to be one of rms_norm in the forward pass, got "
               "\"rms_norm.backward\"");
  EXPECT_ERROR(
      register_pattern(Pass::backward, {"rms_norm.backwards"}), c10::ValueError,
      "to be one of rms_norm, rms_norm.backward in the backward pass, got \"rms_norm.backwards\"");
  EXPECT_ERROR(register_pattern(Pass::forward, {"silu|gleu"}), c10::ValueError,
               "in the forward pass, got \"gleu\"");
  EXPECT_ERROR(register_pattern(Pass::forward, {PatternStep::any_of("silu")}), c10::ValueError,
               "activation", ", got \"silu\"");
  EXPECT_ERROR(
      register_pattern(Pass::forward, {"silu", PatternStep("add_extra_input").through("z", "x")}),
      c10::ValueError,
      "fusion \"test_steps\": expected step 1 of its pattern to be reached through one of x, y of "
      "the step before, got \"z\". Name one of them.");
  EXPECT_ERROR(register_pattern(Pass::forward,
                                {"silu", PatternStep("add_extra_input").through("y", "other")}),
               c10::ValueError, "to be reached through one of extra, x of its own, got \"other\"");
  EXPECT_ERROR(register_pattern(Pass::forward, {"silu", PatternStep("gelu").behind(1)}),
               c10::ValueError,
               "fusion \"test_steps\": expected step 1 of its pattern to be behind an earlier one, "
               "got step 1. Count from 0, in the order of the pattern.");
}

}  // namespace
}  // namespace tandem::testing::planner_names
