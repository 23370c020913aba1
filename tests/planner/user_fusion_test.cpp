// Fusions that a user registers in C++: forward, backward, joint; precedence, removal, what is
// refused.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/tanh.h>
#include <gmock/gmock.h>

#include "core/call.h"
#include "kernel_ops/unit/activation.h"
#include "planner/planner.h"
#include "planner/registry.h"
#include "support/plans.h"
#include "support/throws.h"
#include "tandem/op_options.h"

namespace tandem::testing::planner_user_fusion {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

double factor_of(const Call& call, size_t op) { return call.options<ops::ScaleOptions>(op).factor; }

/// y = gelu(x) * factor in one step.
void scaled_gelu(Call& call) { call.out(0, at::gelu(call.in(0), "tanh") * factor_of(call, 1)); }

at::Tensor gelu_derivative(const at::Tensor& x) {
  constexpr double kBeta = 0.7978845608028654;
  const at::Tensor t = at::tanh(kBeta * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (kBeta * (1 + 3 * 0.044715 * x * x));
}

/// The same, which leaves the derivative behind for backward instead of x.
void scaled_gelu_joint(Call& call) {
  enum Write { y, slope };
  scaled_gelu(call);
  call.out(slope, gelu_derivative(call.in(0)) * factor_of(call, 1));
}

void scaled_gelu_joint_backward(Call& call) {
  enum Read { grad_y, slope };
  call.out(0, call.in(grad_y)*call.in(slope));
}

/// grad_x = (grad_y * factor) * gelu'(x) in one step of backward.
void scaled_gelu_backward(Call& call) {
  enum Read { grad_y, x };
  call.out(0, call.in(grad_y)*factor_of(call, 0) * gelu_derivative(call.in(x)));
}

/// grad_x, and y again where a product behind it reads that.
void gelu_backward(Call& call) {
  enum Read { grad_y, x };
  enum Write { grad_x, y };
  call.out(grad_x, call.in(grad_y)*gelu_derivative(call.in(x)));
  if (call.wants(y)) call.out(y, at::gelu(call.in(x), "tanh"));
}

Fusion forward_fusion(std::string name = "test_scaled_gelu") {
  return {.name = std::move(name),
          .pass = Pass::forward,
          .pattern = {"gelu", "constant_scale"},
          .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = scaled_gelu}};
}

Fusion backward_fusion() {
  return {.name = "test_scaled_gelu_backward",
          .pass = Pass::backward,
          .pattern = {"constant_scale.backward", "gelu.backward"},
          .run = {.reads = {{0, "grad_y"}, {1, "x"}},
                  .writes = {{1, "grad_x"}},
                  .run = scaled_gelu_backward}};
}

Fusion joint_fusion() {
  return {.name = "test_scaled_gelu_joint",
          .pass = Pass::joint,
          .pattern = {"gelu", "constant_scale"},
          .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = scaled_gelu_joint},
          .backward = {.reads = {{1, "grad_y"}},
                       .writes = {{0, "grad_x"}},
                       .run = scaled_gelu_joint_backward},
          .keeps = {"slope"}};
}

const Ops kOps = {"basic_linear", "gelu", R"(constant_scale {"options": {"factor": 3}})",
                  "basic_linear"};
Tensors params() { return {leaf({6, 4}, at::kFloat, 2), leaf({2, 6}, at::kFloat, 3)}; }

TEST(UserFusion, WhichAsksForATypeThatIsNotThere) {
  Fusion fusion = forward_fusion();
  fusion.refuse = [](const Match& match) -> Refusal {
    match.type({0, "nothing"});
    return {};
  };
  const FusionHandle handle = register_fusion(fusion);
  EXPECT_ERROR(Planned(kOps, {leaf({3, 4})}, params()), c10::ValueError,
               "fusion: expected an operand of gelu that is there, got ",
               "\"nothing\". Ask with has() first.");
}

TEST(UserFusion, Forward) {
  const FusionHandle handle = register_fusion(forward_fusion());
  const Planned planned(kOps, {leaf({3, 4})}, params());
  EXPECT_THAT(planned.forward(),
              HasSubstr("test_scaled_gelu: 0.basic_linear.y -> 2.constant_scale.y\n"));
  EXPECT_THAT(planned.decisions(), Contains("test_scaled_gelu at 1.gelu + 2.constant_scale: made"));
  EXPECT_TRUE(fused_equals_unfused(kOps, {leaf({3, 4})}, params(), R"({"fusions_version": 1001})"));
}

TEST(UserFusion, Backward) {
  const FusionHandle handle = register_fusion(backward_fusion());
  const Planned planned(kOps, {leaf({3, 4})}, params());
  EXPECT_THAT(planned.backward(),
              HasSubstr("test_scaled_gelu_backward: grad of 2.constant_scale.y, 0.basic_linear.y "
                        "-> grad of 0.basic_linear.y\n"));
  EXPECT_TRUE(fused_equals_unfused(kOps, {leaf({3, 4})}, params(), R"({"fusions_version": 1002})"));
}

TEST(UserFusion, JointKeepsAPrivateValueInsteadOfTheOperand) {
  const FusionHandle handle = register_fusion(joint_fusion());
  const Planned planned(kOps, {leaf({3, 4})}, params());
  EXPECT_THAT(planned.forward(),
              HasSubstr("test_scaled_gelu_joint: 0.basic_linear.y -> 2.constant_scale.y, "
                        "test_scaled_gelu_joint.slope\n"));
  EXPECT_THAT(planned.backward(),
              HasSubstr("test_scaled_gelu_joint: grad of 2.constant_scale.y, "
                        "test_scaled_gelu_joint.slope -> grad of 0.basic_linear.y\n"));
  EXPECT_THAT(planned.kept(), Contains("test_scaled_gelu_joint.slope"));
  EXPECT_THAT(planned.kept(), Not(Contains("0.basic_linear.y")));
  const std::string fields = R"({"fusions_version": 1003})";
  const Tensors weights = params(), inputs{leaf({3, 4})};
  const RunResult fused = run(kOps, inputs, weights, fields),
                  unfused = run(kOps, inputs, weights, R"({"fuse": false})");
  EXPECT_TRUE(near(fused.outputs, unfused.outputs));
  EXPECT_TRUE(near(fused.gradients, unfused.gradients));
  EXPECT_EQ(fused.saved_bytes, unfused.saved_bytes) << "the slope in place of the product";
}

TEST(UserFusion, JointDoesNothingWithoutBackward) {
  const FusionHandle handle = register_fusion(joint_fusion());
  Tensors frozen{random({6, 4}), random({2, 6})};
  const Planned planned(kOps, {random({3, 4})}, frozen);
  EXPECT_THAT(planned.forward(), Not(HasSubstr("test_scaled_gelu_joint")));
  EXPECT_THAT(planned.decisions(), Contains(HasSubstr("these ops have no backward here")));
}

TEST(UserFusion, JointIsRefusedWhereAnOutputIsDemanded) {
  const FusionHandle handle = register_fusion(joint_fusion());
  const Planned planned(
      {"gelu", "make_extra_output", R"(constant_scale {"options": {"factor": 3}})"}, {leaf({3, 4})},
      {});
  EXPECT_THAT(planned.decisions(), Contains(HasSubstr("forward: 0.gelu.y is demanded outside")));
}

TEST(UserFusion, IsPartOfThePlanOnlyWhileItIsRegistered) {
  const uint64_t before = fusions_version();
  {
    FusionHandle handle = register_fusion(forward_fusion());
    EXPECT_GT(fusions_version(), before);
    const uint64_t registered = fusions_version();
    handle.remove();
    EXPECT_GT(fusions_version(), registered);
    handle.remove();
    EXPECT_THAT(Planned(kOps, {leaf({3, 4})}, params()).forward(),
                Not(HasSubstr("test_scaled_gelu")));
  }
  EXPECT_TRUE(user_fusions().patterns.empty());
}

TEST(UserFusion, DiesWithTheLastPlanThatMayApplyIt) {
  FusionHandle handle = register_fusion(forward_fusion());
  const std::weak_ptr<const Fusion> fusion = user_fusions().patterns.at(0);
  auto planned = std::make_unique<Planned>(kOps, Tensors{leaf({3, 4})}, params());
  handle.remove();
  EXPECT_FALSE(fusion.expired()) << "backward may be planned later";
  EXPECT_NO_THROW(planned->backward());
  planned.reset();
  EXPECT_TRUE(fusion.expired());
}

TEST(UserFusion, HandlesMove) {
  FusionHandle first = register_fusion(forward_fusion("test_first"));
  FusionHandle second(std::move(first));
  first = register_fusion(forward_fusion("test_second"));
  EXPECT_EQ(user_fusions().patterns.size(), 2u);
  second = std::move(first);
  ASSERT_EQ(user_fusions().patterns.size(), 1u);
  EXPECT_EQ(user_fusions().patterns[0]->name, "test_second");
  const uint64_t version = fusions_version();
  bump_fusions_version();
  EXPECT_GT(fusions_version(), version);
}

TEST(UserFusion, ComesBeforeBuiltInOnesAndPrependBeforeOthers) {
  Fusion linear{.name = "test_linear_bias",
                .pattern = {"basic_linear", "bias"},
                .run = {.reads = {{0, "x"}, {0, "weight"}, {1, "bias"}},
                        .writes = {{1, "y"}},
                        .run = [](Call&) {}}};
  Fusion first = linear;
  first.name = "test_first";
  const FusionHandle handle = register_fusion(linear);
  const Ops ops = {"basic_linear", "bias", "gelu"};
  const Tensors inputs{random({3, 4})}, weights{random({6, 4}), random({6})};
  EXPECT_THAT(Planned(ops, inputs, weights).forward(), HasSubstr("test_linear_bias: "));
  const FusionHandle prepended = register_fusion(first, /*prepend=*/true);
  EXPECT_THAT(Planned(ops, inputs, weights).forward(), HasSubstr("test_first: "));
  EXPECT_THAT(Planned(ops, inputs, weights, R"({"skipped_fusions": ["test_first"]})").forward(),
              HasSubstr("test_linear_bias: "));
  EXPECT_THAT(Planned(ops, inputs, weights, R"({"fuse": false})").forward(),
              Not(HasSubstr("test_")));
}

TEST(UserFusion, OfOneDirectionComesBeforeBuiltInOnesOfBoth) {
  const std::string experts = R"(grouped_linear {"options": {"num_groups": 2, "bias": false}})";
  const Ops ops = {experts, "gelu", experts};
  const at::Tensor splits = at::full({2}, 2, at::kLong);
  const Tensors inputs{leaf({4, 3}), splits, splits},
      weights{leaf({3, 3}, at::kFloat, 2), leaf({3, 3}, at::kFloat, 3), leaf({3, 3}, at::kFloat, 4),
              leaf({3, 3}, at::kFloat, 5)};
  EXPECT_THAT(Planned(ops, inputs, weights).forward(), HasSubstr("grouped_mlp_activation: "));
  const FusionHandle handle = register_fusion({.name = "test_gelu_backward",
                                               .pass = Pass::backward,
                                               .pattern = {"gelu.backward"},
                                               .run = {.reads = {{0, "grad_y"}, {0, "x"}},
                                                       .writes = {{0, "grad_x"}, {0, "y"}},
                                                       .run = gelu_backward}});
  const Planned planned(ops, inputs, weights);
  EXPECT_THAT(planned.decisions(),
              Contains(HasSubstr("the user's fusion \"test_gelu_backward\" covers op 1")));
  EXPECT_THAT(planned.backward(), HasSubstr("test_gelu_backward: "));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs, weights, R"({"fusions_version": 1006})"));
  EXPECT_THAT(
      Planned(ops, inputs, weights, R"({"skipped_fusions": ["test_gelu_backward"]})").forward(),
      HasSubstr("grouped_mlp_activation: "));
}

TEST(UserFusion, ThatMissesADemandedValueIsRefusedNotWrong) {
  Fusion wrong = forward_fusion("test_forgetful");
  wrong.run.writes = {};
  const FusionHandle handle = register_fusion(wrong);
  const Planned planned(kOps, {leaf({3, 4})}, params());
  EXPECT_THAT(planned.forward(), Not(HasSubstr("test_forgetful")));
  EXPECT_THAT(
      planned.decisions(),
      Contains("test_forgetful at 1.gelu + 2.constant_scale: 2.constant_scale.y is demanded "
               "outside and the fused step does not write it"));
}

TEST(UserFusion, AStepThatForgetsAWriteIsNamed) {
  Fusion lazy = forward_fusion("test_lazy");
  lazy.run.run = [](Call&) {};
  const FusionHandle handle = register_fusion(lazy);
  EXPECT_ERROR(run(kOps, {leaf({3, 4})}, params(), R"({"fusions_version": 1004})"), c10::Error,
               "test_lazy did not write 2.constant_scale.y");
}

TEST(UserFusionErrors, TakenName) {
  const FusionHandle handle = register_fusion(forward_fusion());
  EXPECT_ERROR(register_fusion(forward_fusion()), c10::ValueError,
               "fusion: expected a new name, got \"test_scaled_gelu\"",
               "Remove the other one first");
}

TEST(UserFusionErrors, HalfAFusion) {
  Fusion no_pattern = forward_fusion();
  no_pattern.pattern.clear();
  EXPECT_ERROR(register_fusion(no_pattern), c10::ValueError, "fusion \"test_scaled_gelu\"",
               "got no pattern", "\": expected a pattern and an implementation, got ",
               "and a function");
  Fusion no_run = forward_fusion();
  no_run.run.run = nullptr;
  EXPECT_ERROR(register_fusion(no_run), c10::ValueError, "got no implementation");
  Fusion no_backward = joint_fusion();
  no_backward.backward.run = nullptr;
  EXPECT_ERROR(register_fusion(no_backward), c10::ValueError,
               "\": expected a backward half exactly for the joint pass, got none",
               "Choose the pass accordingly");
  Fusion two_halves = forward_fusion();
  two_halves.backward = joint_fusion().backward;
  EXPECT_ERROR(register_fusion(two_halves), c10::ValueError, "got one for another pass");
}

TEST(RequireFusion, IsAnErrorWithTheReason) {
  const Tensors inputs{leaf({3, 4})};
  EXPECT_NO_THROW(Planned({"basic_linear", "bias"}, inputs, {leaf({6, 4}), leaf({6})},
                          R"({"required_fusions": ["linear_bias"]})"));
  EXPECT_NO_THROW(Planned({"basic_linear", "bias", "gelu"}, inputs, {leaf({6, 4}), leaf({6})},
                          R"({"required_fusions": ["activation_backward_bias"]})"));
  EXPECT_ERROR(Planned({"gelu"}, inputs, {}, R"({"required_fusions": ["linear_bias"]})"),
               c10::ValueError, "require_fusion: expected fusion \"linear_bias\" to be made",
               "got no steps that match its pattern", "See explain()");
  EXPECT_ERROR(Planned({"basic_linear", "bias"}, inputs, {leaf({6, 4}), leaf({6}, at::kHalf)},
                       R"({"required_fusions": ["linear_bias"]})"),
               c10::ValueError, "got a refusal: 0.basic_linear + 1.bias: the bias is Half");
}

/// Fusions over the list of ops, as a front has them, while this lives.
struct ScopedGroups {
  explicit ScopedGroups(decltype(UserFusions::groups) groups) {
    set_group_fusions(std::move(groups));
  }
  ~ScopedGroups() { set_group_fusions(nullptr); }
};

TEST(GroupFusion, ReplacesTheStepsOfItsOps) {
  static const auto fusion = std::make_shared<const Fusion>(
      Fusion{.name = "test_group",
             .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = [](Call& call) {
                       call.out(0, at::gelu(call.in(0), "tanh") * 3);
                     }}});
  const ScopedGroups groups([](Pass pass, const Description&, const std::vector<OpGroup>&) {
    return pass == Pass::forward ? std::vector<OpGroup>{{1, 2, fusion, nullptr}}
                                 : std::vector<OpGroup>();
  });
  const Planned planned(kOps, {leaf({3, 4})}, params());
  EXPECT_THAT(planned.forward(), HasSubstr("test_group: 0.basic_linear.y -> 2.constant_scale.y\n"));
  EXPECT_THAT(planned.decisions(), Contains("test_group at ops 1 to 2: made"));
  EXPECT_TRUE(fused_equals_unfused(kOps, {leaf({3, 4})}, params(), R"({"fusions_version": 1005})"));
}

TEST(GroupFusionErrors, OverlappingGroups) {
  static const auto fusion = std::make_shared<const Fusion>(Fusion{.name = "test_overlap"});
  const ScopedGroups groups([](Pass pass, const Description&, const std::vector<OpGroup>&) {
    return pass == Pass::forward
               ? std::vector<OpGroup>{{0, 1, fusion, nullptr}, {1, 2, fusion, nullptr}}
               : std::vector<OpGroup>();
  });
  EXPECT_ERROR(Planned(kOps, {leaf({3, 4})}, params()), c10::ValueError,
               "test_overlap: expected fused ops that cover ops 2 to 3",
               " once and in order, got ops 1 to 2", "Return every op of the list");
}

}  // namespace
}  // namespace tandem::testing::planner_user_fusion
