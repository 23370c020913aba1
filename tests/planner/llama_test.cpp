// Plans of a LLaMA MLP as programs: which steps run, what is kept, what is written again.
#include <gmock/gmock.h>

#include "support/plans.h"

namespace tandem::testing::planner_llama {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

constexpr int64_t kHidden = 8, kFeatures = 12;
const Ops kMlp = {"rms_norm", "basic_linear", "swiglu", "basic_linear"};

Tensors params(bool norm, bool up, bool down) {
  return {random({kHidden}).set_requires_grad(norm),
          random({2 * kFeatures, kHidden}).set_requires_grad(up),
          random({kHidden, kFeatures}).set_requires_grad(down)};
}

constexpr const char* kForward =
    "rms_norm: x, 0.rms_norm.weight -> 0.rms_norm.y, 0.rms_norm.inv_rms\n"
    "linear_glu: 0.rms_norm.y, 1.basic_linear.weight -> 1.basic_linear.y, 2.swiglu.y\n"
    "basic_linear: 2.swiglu.y, 3.basic_linear.weight -> 3.basic_linear.y\n";

TEST(LlamaMlp, WritesNormAndSwigluAgainAndKeepsNeither) {
  const Planned planned(kMlp, {leaf({3, kHidden})}, params(true, true, true));
  EXPECT_EQ(planned.forward(), kForward);
  EXPECT_EQ(
      planned.backward(),
      "basic_linear.grad_x: grad of 3.basic_linear.y, 3.basic_linear.weight -> grad of "
      "2.swiglu.y\n"
      "swiglu.backward: grad of 2.swiglu.y, 1.basic_linear.y -> grad of 1.basic_linear.y, "
      "2.swiglu.y\n"
      "basic_linear.grad_weight: grad of 3.basic_linear.y, 2.swiglu.y -> grad of "
      "3.basic_linear.weight\n"
      "basic_linear.grad_x: grad of 1.basic_linear.y, 1.basic_linear.weight -> grad of "
      "0.rms_norm.y\n"
      "rms_norm.backward: grad of 0.rms_norm.y, x, 0.rms_norm.weight, 0.rms_norm.inv_rms -> grad "
      "of x, grad of 0.rms_norm.weight, 0.rms_norm.y\n"
      "basic_linear.grad_weight: grad of 1.basic_linear.y, 0.rms_norm.y -> grad of "
      "1.basic_linear.weight\n");
  EXPECT_THAT(planned.kept(),
              ElementsAre("3.basic_linear.weight", "1.basic_linear.y", "1.basic_linear.weight", "x",
                          "0.rms_norm.weight", "0.rms_norm.inv_rms"));
}

TEST(LlamaMlp, BytesKeptAreThoseOfTheProductAndTheStatistic) {
  const RunResult result = run(kMlp, {leaf({3, kHidden})}, params(true, true, true));
  EXPECT_EQ(result.saved_bytes, 3 * 2 * kFeatures * 4 + 3 * 4);
}

TEST(LlamaMlp, FrozenWeightsHaveNoStepsAndKeepNothingForThem) {
  const Planned planned(kMlp, {leaf({3, kHidden})}, params(true, false, false));
  EXPECT_EQ(
      planned.backward(),
      "basic_linear.grad_x: grad of 3.basic_linear.y, 3.basic_linear.weight -> grad of "
      "2.swiglu.y\n"
      "swiglu.backward: grad of 2.swiglu.y, 1.basic_linear.y -> grad of 1.basic_linear.y\n"
      "basic_linear.grad_x: grad of 1.basic_linear.y, 1.basic_linear.weight -> grad of "
      "0.rms_norm.y\n"
      "rms_norm.backward: grad of 0.rms_norm.y, x, 0.rms_norm.weight, 0.rms_norm.inv_rms -> grad "
      "of x, grad of 0.rms_norm.weight\n");
  EXPECT_THAT(planned.kept(), UnorderedElementsAre("3.basic_linear.weight", "1.basic_linear.y",
                                                   "1.basic_linear.weight", "x",
                                                   "0.rms_norm.weight", "0.rms_norm.inv_rms"));
}

TEST(LlamaMlp, FrozenInputAndNormNeedNoGradientOfEither) {
  const Planned planned(kMlp, {random({3, kHidden})}, params(false, true, true));
  EXPECT_EQ(planned.backward(),
            "basic_linear.grad_x: grad of 3.basic_linear.y, 3.basic_linear.weight -> grad of "
            "2.swiglu.y\n"
            "swiglu.backward: grad of 2.swiglu.y, 1.basic_linear.y -> grad of 1.basic_linear.y, "
            "2.swiglu.y\n"
            "basic_linear.grad_weight: grad of 3.basic_linear.y, 2.swiglu.y -> grad of "
            "3.basic_linear.weight\n"
            "basic_linear.grad_weight: grad of 1.basic_linear.y, 0.rms_norm.y -> grad of "
            "1.basic_linear.weight\n");
  EXPECT_THAT(planned.kept(),
              UnorderedElementsAre("3.basic_linear.weight", "1.basic_linear.y", "0.rms_norm.y"))
      << "nobody runs the norm's backward, so nobody can write its output again";
}

TEST(LlamaMlp, OnlyTheLastWeightTrained) {
  const Planned planned(kMlp, {random({3, kHidden})}, params(false, false, true));
  EXPECT_EQ(planned.backward(),
            "basic_linear.grad_weight: grad of 3.basic_linear.y, 2.swiglu.y -> grad of "
            "3.basic_linear.weight\n");
  EXPECT_THAT(planned.kept(), ElementsAre("2.swiglu.y"));
}

TEST(LlamaMlp, WithoutGradNothingIsKept) {
  const Planned no_grad(kMlp, {leaf({3, kHidden})}, params(true, true, true), "{}",
                        {.grad_mode = false});
  const Planned frozen(kMlp, {random({3, kHidden})}, params(false, false, false));
  for (const Planned* planned : {&no_grad, &frozen}) {
    EXPECT_THAT(planned->kept(), IsEmpty());
    EXPECT_EQ(planned->backward(), "");
    EXPECT_FALSE(planned->plan().needs_backward);
    EXPECT_EQ(planned->forward(),
              "rms_norm: x, 0.rms_norm.weight -> 0.rms_norm.y\n"
              "linear_glu: 0.rms_norm.y, 1.basic_linear.weight -> 2.swiglu.y\n"
              "basic_linear: 2.swiglu.y, 3.basic_linear.weight -> 3.basic_linear.y\n");
  }
}

TEST(LlamaMlp, UnderARecipeOperandsAreCodesAndTheProductStays) {
  const Planned planned(kMlp, {leaf({3, kHidden})}, params(true, true, true),
                        R"({"recipe": {"name": "Float8CurrentScaling"}, "fuse": false})");
  EXPECT_EQ(planned.forward(),
            "rms_norm: x, 0.rms_norm.weight -> 0.rms_norm.y, 0.rms_norm.inv_rms\n"
            "quantize: 0.rms_norm.y -> 0.rms_norm.y in fp8_e4m3\n"
            "quantize: 1.basic_linear.weight -> 1.basic_linear.weight in fp8_e4m3\n"
            "basic_linear: 0.rms_norm.y in fp8_e4m3, 1.basic_linear.weight in fp8_e4m3 -> "
            "1.basic_linear.y\n"
            "swiglu: 1.basic_linear.y -> 2.swiglu.y\n"
            "quantize: 2.swiglu.y -> 2.swiglu.y in fp8_e4m3\n"
            "quantize: 3.basic_linear.weight -> 3.basic_linear.weight in fp8_e4m3\n"
            "basic_linear: 2.swiglu.y in fp8_e4m3, 3.basic_linear.weight in fp8_e4m3 -> "
            "3.basic_linear.y\n");
  EXPECT_THAT(planned.kept(),
              UnorderedElementsAre("3.basic_linear.weight in fp8_e4m3", "1.basic_linear.y",
                                   "1.basic_linear.weight in fp8_e4m3", "x", "0.rms_norm.weight",
                                   "0.rms_norm.inv_rms"));
  EXPECT_THAT(planned.backward(),
              AllOf(HasSubstr("-> grad of 1.basic_linear.y, 2.swiglu.y\n"),
                    HasSubstr("quantize: 2.swiglu.y -> 2.swiglu.y in fp8_e4m3\n"),
                    HasSubstr("quantize: 0.rms_norm.y -> 0.rms_norm.y in fp8_e4m3\n")))
      << "codes of what is written again are made again";
}

TEST(LlamaMlp, QuantizePointsDoNotDependOnFusion) {
  const std::string recipe = R"("recipe": {"name": "Float8CurrentScaling"})";
  const Tensors inputs{leaf({5, kHidden}, at::kBFloat16)};
  Tensors weights;
  for (const at::Tensor& param : params(true, true, true))
    weights.push_back(param.detach().to(at::kBFloat16).requires_grad_(true));
  const RunResult fused = run(kMlp, inputs, weights, "{" + recipe + "}"),
                  unfused = run(kMlp, inputs, weights, "{" + recipe + R"(, "fuse": false})");
  EXPECT_TRUE(same(fused.outputs[0], unfused.outputs[0]));
  for (size_t i = 0; i < fused.gradients.size(); ++i)
    EXPECT_TRUE(same(fused.gradients[i], unfused.gradients[i])) << i;
  EXPECT_EQ(fused.saved_bytes, unfused.saved_bytes);
}

TEST(LlamaMlp, OnAResidualStreamQuantizesNothingByItselfThatIsWrittenAgain) {
  Ops ops = kMlp;
  ops.insert(ops.begin(), to_channel());
  ops.emplace_back(from_channel());
  for (const std::string recipe :
       {"MXFP8BlockScaling", "Float8CurrentScaling", "Float8BlockScaling", "NVFP4BlockScaling"}) {
    const Planned planned(ops, {leaf({3, kHidden})}, params(true, true, true),
                          R"({"training": true, "recipe": {"name": ")" + recipe + R"("}})");
    EXPECT_THAT(planned.backward(), AllOf(HasSubstr("glu_backward_quantize_quantize_y: grad of "),
                                          HasSubstr("rms_norm_backward_add_quantize_y: grad of "),
                                          Not(ContainsRegex("(^|\n)quantize: [0-9x]"))))
        << recipe;
  }
}

}  // namespace
}  // namespace tandem::testing::planner_llama
