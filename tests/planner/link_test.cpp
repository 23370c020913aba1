// Through which values patterns go, and what a fused step may read.
#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <gmock/gmock.h>

#include "core/call.h"
#include "planner/planner.h"
#include "planner/registry.h"
#include "support/plans.h"
#include "support/throws.h"
#include "tandem/op_options.h"

namespace tandem::testing::planner_link {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ReadsOfFusedSteps, AProductThatOnlyTheFusionHasIsNotItsOwnAddend) {
  const Ops ops = {"basic_linear", to_channel(), "bias", from_channel()};
  const Tensors inputs{leaf({4, 8})}, params{leaf({8, 8}, at::kFloat, 2), leaf({8}, at::kFloat, 3)};
  EXPECT_THAT(Planned(ops, inputs, params).decisions(),
              Contains("linear_bias_add at 0.basic_linear + 2.bias + 3.add_extra_input: "
                       "0.basic_linear.y is read by the fused step, and only the steps it replaces "
                       "write it"));
  const at::Tensor product = inputs[0].matmul(params[0].t());
  EXPECT_TRUE(near(run(ops, inputs, params).outputs[0], (2 * product + params[1]).detach()));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs, params));
  EXPECT_TRUE(
      fused_equals_unfused(ops, inputs, params, R"({"recipe": {"name": "Float8CurrentScaling"}})"));
}

TEST(ReadsOfFusedSteps, AnAddendFromElsewhereIsFused) {
  const Ops ops = {to_channel(), "basic_linear", "bias", from_channel()};
  const Tensors inputs{leaf({4, 8})}, params{leaf({8, 8}, at::kFloat, 2), leaf({8}, at::kFloat, 3)};
  EXPECT_THAT(Planned(ops, inputs, params).forward(), HasSubstr("linear_bias_add: "));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs, params));
}

void never(Call&) { FAIL() << "this fusion is not to be made"; }

TEST(ReadsOfFusedSteps, AreNotWhatMembersWrite) {
  const FusionHandle handle =
      register_fusion({.name = "test_inner",
                       .pattern = {"gelu", "silu"},
                       .run = {.reads = {{0, "x"}, {0, "y"}}, .writes = {{1, "y"}}, .run = never}});
  const FusionHandle backward = register_fusion(
      {.name = "test_inner_backward",
       .pass = Pass::backward,
       .pattern = {"silu.backward", "gelu.backward"},
       .run = {.reads = {{0, "grad_y"}, {0, "grad_x"}}, .writes = {{1, "grad_x"}}, .run = never}});
  EXPECT_THAT(Planned({"gelu", "silu"}, {random({3})}, {}).decisions(),
              Contains("test_inner at 0.gelu + 1.silu: 0.gelu.y is read by the fused step, and "
                       "only the steps it replaces write it"));
  EXPECT_THAT(
      Planned({"gelu", "silu"}, {leaf({3})}, {}).decisions(),
      Contains("test_inner_backward at 1.silu.backward + 0.gelu.backward: grad of 0.gelu.y is "
               "read by the fused step, and only the steps it replaces write it"));
  EXPECT_TRUE(
      fused_equals_unfused({"gelu", "silu"}, {leaf({3})}, {}, R"({"fusions_version": 3001})"));
}

TEST(ReadsOfFusedSteps, OfAJointBackwardAreWhatForwardWrites) {
  Fusion joint{
      .name = "test_joint_reads",
      .pass = Pass::joint,
      .pattern = {"gelu", "silu"},
      .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = never},
      .backward = {.reads = {{1, "grad_y"}, {0, "y"}}, .writes = {{0, "grad_x"}}, .run = never}};
  {
    const FusionHandle handle = register_fusion(joint);
    EXPECT_THAT(Planned({"gelu", "silu"}, {leaf({3})}, {}).decisions(),
                Contains("test_joint_reads at 0.gelu + 1.silu: forward: 0.gelu.y is demanded "
                         "outside and the fused step does not write it"));
  }
  joint.backward.reads = {{1, "grad_y"}, {0, "grad_y"}};
  {
    const FusionHandle handle = register_fusion(joint);
    EXPECT_THAT(Planned({"gelu", "silu"}, {leaf({3})}, {}).decisions(),
                Contains(HasSubstr("backward: grad of 0.gelu.y is read by the fused step")));
  }
  joint.backward.reads = {{1, "grad_y"}, {0, "y"}};
  joint.run.writes = {{1, "y"}, {0, "y"}};
  const FusionHandle handle = register_fusion(joint);
  const Planned planned({"gelu", "silu"}, {leaf({3})}, {});
  EXPECT_THAT(planned.forward(), HasSubstr("test_joint_reads: x -> 1.silu.y, 0.gelu.y\n"));
  EXPECT_THAT(planned.kept(), Contains("0.gelu.y"));
}

TEST(ReadsOfFusedSteps, OfAGroupLeaveOutWhatMembersWrite) {
  static const auto fusion = std::make_shared<const Fusion>(
      Fusion{.name = "test_group_reads",
             .run = {.reads = {{0, "x"}, {2, "extra"}}, .writes = {{2, "y"}}, .run = never}});
  set_group_fusions([](Pass pass, const Description&, const std::vector<OpGroup>&) {
    return pass == Pass::forward ? std::vector<OpGroup>{{0, 2, fusion, nullptr}}
                                 : std::vector<OpGroup>();
  });
  const Ops ops = {"gelu", to_channel(), from_channel()};
  const Planned planned(ops, {leaf({3})}, {});
  EXPECT_THAT(planned.decisions(), Contains("test_group_reads at ops 0 to 2: made"));
  EXPECT_THAT(planned.forward(), HasSubstr("test_group_reads: x"));
  EXPECT_THAT(planned.forward(), Not(HasSubstr("0.gelu.y,")));
  set_group_fusions(nullptr);
}

class SharedNorm : public ::testing::TestWithParam<const char*> {
 protected:
  /// One norm twice, its parameters shared.
  Ops ops() const {
    const std::string norm = GetParam();
    const std::string shared =
        norm + (norm == "rms_norm" ? R"( {"params": [0]})" : R"( {"params": [0, 1]})");
    return {shared, "gelu", shared};
  }
  Tensors params() const {
    Tensors list{leaf({8}, at::kFloat, 2), leaf({8}, at::kFloat, 3)};
    if (std::string(GetParam()) == "rms_norm") list.pop_back();
    return list;
  }
};
INSTANTIATE_TEST_SUITE_P(Norms, SharedNorm, ::testing::Values("rms_norm", "layer_norm"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(SharedNorm, TheSumOfItsWeightGradientsIsNoResidual) {
  for (const bool needs_grad : {false, true})
    for (const auto& sizes : {std::vector<int64_t>{8}, std::vector<int64_t>{4, 8}}) {
      const Tensors inputs{needs_grad ? leaf(sizes) : random(sizes)};
      EXPECT_THAT(Planned(ops(), inputs, params()).backward(), Not(HasSubstr("backward_add")));
      EXPECT_TRUE(fused_equals_unfused(ops(), inputs, params()));
    }
}

TEST_P(SharedNorm, InResidualBranchesIsFusedThroughGradX) {
  const std::string norm = ops()[0];
  const Ops branches = {to_channel("a"), norm, "gelu", from_channel("a"),
                        to_channel("b"), norm, "gelu", from_channel("b")};
  for (const bool needs_grad : {false, true}) {
    const Tensors inputs{needs_grad ? leaf({4, 8}) : random({4, 8})};
    const std::string backward = Planned(branches, inputs, params()).backward();
    size_t made = 0;
    for (size_t at = 0; (at = backward.find("norm_backward_add: ", at)) != std::string::npos; ++at)
      ++made;
    EXPECT_EQ(made, needs_grad ? 2u : 1u) << backward;
    EXPECT_TRUE(fused_equals_unfused(branches, inputs, params()));
  }
}

TEST(Links, AreTheMainResultUnlessNamed) {
  // The sum of a shared norm's weight gradients is reached by that name only.
  Fusion fusion{
      .name = "test_link",
      .pass = Pass::backward,
      .pattern = {"rms_norm.backward", StepKind::add},
      .run = {.reads = {{0, "grad_y"}, {0, "x"}, {0, "weight"}, {0, "inv_rms"}, {1, kOtherRead}},
              .writes = {{1, "y"}, {0, "grad_x"}},
              .run = never}};
  const Ops ops = {R"(rms_norm {"params": [0]})", "gelu", R"(rms_norm {"params": [0]})"};
  {
    const FusionHandle handle = register_fusion(fusion);
    EXPECT_THAT(Planned(ops, {random({4, 8})}, {leaf({8})}).backward(),
                Not(HasSubstr("test_link: ")));
  }
  fusion.pattern = {"rms_norm.backward",
                    PatternStep(StepKind::add).through("grad_weight", kAnyRead)};
  const FusionHandle handle = register_fusion(fusion);
  EXPECT_THAT(Planned(ops, {random({4, 8})}, {leaf({8})}).backward(), HasSubstr("test_link: "));
}

TEST(Links, ComeByTheOperandThatTheyName) {
  Fusion fusion{
      .name = "test_operand",
      .pattern = {"silu", PatternStep("add_extra_input").through("y", "extra")},
      .run = {.reads = {{0, "x"}, {1, "x"}}, .writes = {{0, "y"}, {1, "y"}}, .run = [](Call& call) {
                const at::Tensor y = call.in(0) * at::sigmoid(call.in(0));
                if (call.wants(0)) call.out(0, y);
                call.out(1, call.in(1) + y);
              }}};
  const FusionHandle handle = register_fusion(fusion);
  EXPECT_THAT(Planned({"silu", "add_extra_input"}, {random({3}), random({3})}, {}).forward(),
              Not(HasSubstr("test_operand")))
      << "there it is x";
  const Ops ops = {"silu", to_channel("s"), "gelu", from_channel("s")};
  EXPECT_THAT(Planned(ops, {random({3})}, {}).decisions(),
              Contains("test_operand at 0.silu + 3.add_extra_input: no position is behind all that "
                       "it reads and before all that reads it"));
}

/// gelu -> a sum, with or without silu beside it.
Fusion optional_fusion() {
  return {.name = "test_gelu",
          .pattern = {"gelu", PatternStep("silu").behind(0).optional("_silu", 2),
                      PatternStep("add_extra_input").behind(0).optional("_add")},
          .run = {.reads = {{0, "x"}, {1, "x"}, {2, "extra"}},
                  .writes = {{0, "y"}, {1, "y"}, {2, "y"}},
                  .run = [](Call& call) {
                    EXPECT_EQ(call.has(1), call.wants(1));
                    const at::Tensor y = at::gelu(call.in(0), "tanh");
                    if (call.wants(0)) call.out(0, y);
                    if (call.wants(1)) call.out(1, at::silu(y));
                    if (call.wants(2)) call.out(2, y + call.in(2));
                  }}};
}

/// relu -> silu, with gelu between them and a factor behind gelu and silu.
Fusion chain() {
  return {
      .name = "test",
      .pattern = {"relu", PatternStep("gelu").optional("_gelu"), PatternStep("silu").named("_silu"),
                  PatternStep("constant_scale").optional("_scale", 1)},
      .run = {.reads = {{0, "x"}}, .writes = {{3, kMainResult}}, .run = [](Call& call) {
                const auto* scale =
                    static_cast<const ops::ScaleOptions*>(call.step().options[3].get());
                at::Tensor y = at::relu(call.in(0));
                if (call.step().options[1] != nullptr) y = at::gelu(y, "tanh");
                y = at::silu(y);
                call.out(0, scale == nullptr ? y : y * scale->factor);
              }}};
}

TEST(OptionalMembers, AreTakenWhereTheyAreThere) {
  const FusionHandle handle = register_fusion(optional_fusion());
  const Ops with_sum = {"gelu", "add_extra_input"}, without = {"gelu", "silu"};
  const Tensors inputs{random({3}), random({3}, at::kFloat, 2)};
  EXPECT_THAT(Planned(with_sum, inputs, {}).forward(),
              HasSubstr("test_gelu_add: x, extra 0 -> 1.add_extra_input.y"));
  EXPECT_TRUE(fused_equals_unfused(with_sum, inputs, {}, R"({"fusions_version": 3002})"));
  EXPECT_THAT(Planned(without, {inputs[0]}, {}).forward(), Not(HasSubstr("test_gelu")))
      << "which needs the sum";
  EXPECT_THAT(Planned(with_sum, inputs, {}, R"({"skipped_fusions": ["test_gelu_add"]})").forward(),
              Not(HasSubstr("test_gelu")));
  EXPECT_THAT(Planned(with_sum, inputs, {}, R"({"skipped_fusions": ["test_gelu"]})").forward(),
              Not(HasSubstr("test_gelu")));
}

TEST(OptionalMembers, AreSpelledInBrackets) {
  EXPECT_EQ(optional_fusion().spelled(), "test_gelu[_silu][_add]");
  EXPECT_EQ(chain().spelled(), "test[_gelu]_silu[_scale]");
}

TEST(OptionalMembers, OfAChainAreLeftOut) {
  const FusionHandle handle = register_fusion(chain());
  const std::string scale = R"(constant_scale {"options": {"factor": 3}})";
  const Tensors inputs{random({3})};
  const auto forward = [&](const Ops& ops) { return Planned(ops, inputs, {}).forward(); };
  EXPECT_EQ(forward({"relu", "gelu", "silu", scale}),
            "test_gelu_silu_scale: x -> 3.constant_scale.y\n");
  EXPECT_EQ(forward({"relu", "gelu", "silu"}), "test_gelu_silu: x -> 2.silu.y\n");
  EXPECT_EQ(forward({"relu", "silu"}), "test_silu: x -> 1.silu.y\n");
  EXPECT_EQ(forward({"relu", "silu", scale}),
            "test_silu: x -> 1.silu.y\nconstant_scale: 1.silu.y -> 2.constant_scale.y\n")
      << "the scale needs gelu";
  for (const Ops& ops : {Ops{"relu", "gelu", "silu", scale}, Ops{"relu", "silu"}})
    EXPECT_TRUE(fused_equals_unfused(ops, inputs, {}, R"({"fusions_version": 3003})"));
}

TEST(OptionalMembers, ComeBackWhereAMemberLessIsLegal) {
  Fusion fusion = chain();
  fusion.refuse = [](const Match& match) -> Refusal {
    if (match.has(3)) return "no scale today";
    return std::nullopt;
  };
  const FusionHandle handle = register_fusion(fusion);
  const Planned planned({"relu", "gelu", "silu", R"(constant_scale {"options": {"factor": 3}})"},
                        {random({3})}, {});
  EXPECT_THAT(planned.decisions(),
              ElementsAre("test_gelu_silu_scale at 0.relu + 1.gelu + 2.silu + 3.constant_scale: no "
                          "scale today",
                          "test_gelu_silu at 0.relu + 1.gelu + 2.silu: made"));
}

TEST(OptionalMembersErrors, NothingElseDependsOnThem) {
  Fusion fusion = optional_fusion();
  fusion.pattern[2].source = 1;
  EXPECT_ERROR(register_fusion(fusion), c10::ValueError,
               "fusion \"test_gelu\": expected step 2 of its pattern to be behind one that is "
               "always there, got an optional one. Name another");
  fusion = optional_fusion();
  fusion.pattern[0] = PatternStep("gelu").optional("_gelu");
  EXPECT_ERROR(
      register_fusion(fusion), c10::ValueError,
      "expected step 0 of its pattern to be behind one that is always there, got none before it");
  fusion = optional_fusion();
  fusion.pattern.resize(10, PatternStep("silu").behind(0).optional("_more"));
  EXPECT_ERROR(
      register_fusion(fusion), c10::ValueError,
      "fusion \"test_gelu\": expected at most 8 optional steps, got 9. Register several fusions.");
  fusion = optional_fusion();
  fusion.pattern[1].needs = 3;
  EXPECT_ERROR(register_fusion(fusion), c10::ValueError,
               "expected step 1 to need one of the 3 of its pattern, got step 3. Count from 0.");
  fusion = optional_fusion();
  fusion.pass = Pass::joint;
  fusion.backward = fusion.run;
  EXPECT_ERROR(register_fusion(fusion), c10::ValueError,
               "expected optional steps in a pass of one direction, got one at 1 in the joint "
               "pass. Register");
}

TEST(Links, ASumOfAValueWithItselfHasNoOtherTerm) {
  const Ops ops = {"basic_linear",    "bias",          to_channel("z"),
                   from_channel("z"), to_channel("w"), from_channel("w")};
  const Tensors inputs{leaf({4, 8})}, params{leaf({8, 8}, at::kFloat, 2), leaf({8}, at::kFloat, 3)};
  EXPECT_THAT(Planned(ops, inputs, params).forward(), Not(HasSubstr("linear_bias_add")));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs, params));
}

TEST(Links, OneValueReadByTwoStepsOfTheSameKind) {
  const Ops ops = {"basic_linear",    "bias", to_channel("z"),  "gelu", to_channel("a"),
                   from_channel("z"), "gelu", from_channel("a")};
  const Tensors inputs{leaf({4, 8})}, params{leaf({8, 8}, at::kFloat, 2), leaf({8}, at::kFloat, 3)};
  EXPECT_THAT(Planned(ops, inputs, params).forward(), HasSubstr("linear_bias_activation: "));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs, params));
}

}  // namespace
}  // namespace tandem::testing::planner_link
