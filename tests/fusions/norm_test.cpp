// Fusions of norms: with the quantize point behind them, and of their backward with the residual's
// gradient.
#include <gmock/gmock.h>

#include "support/plans.h"

namespace tandem::testing::fusions_norm {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::string kRecipe = R"({"recipe": {"name": "Float8CurrentScaling"}})";

class NormFusion : public ::testing::TestWithParam<const char*> {
 protected:
  std::string norm() const { return GetParam(); }
  Tensors params(at::ScalarType dtype = at::kFloat) const {
    Tensors list{leaf({8}, dtype, 2), leaf({8}, dtype, 3), leaf({8, 8}, dtype, 4)};
    if (norm() == "rms_norm") list.erase(list.begin() + 1);
    return list;
  }
  /// x = x + linear(norm(x)): a residual branch.
  Ops branch() const { return {to_channel(), norm(), "basic_linear", from_channel()}; }
};
INSTANTIATE_TEST_SUITE_P(Norms, NormFusion, ::testing::Values("rms_norm", "layer_norm"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(NormFusion, QuantizeFiresAndEqualsBitwise) {
  const Ops ops = {norm(), "basic_linear"};
  const Planned planned(ops, {leaf({3, 8})}, params(), kRecipe);
  EXPECT_THAT(planned.forward(), StartsWith(norm() + "_quantize: x, 0." + norm() + ".weight"));
  EXPECT_THAT(planned.decisions(),
              Contains(norm() + "_quantize at 0." + norm() + " + quantize: made"));
  for (const auto dtype : kKernelDtypes) {
    const Tensors inputs{leaf({3, 8}, dtype)}, weights = params(dtype);
    EXPECT_TRUE(fused_equals_unfused(ops, inputs, weights, kRecipe)) << dtype;
    const auto fused = run(ops, inputs, weights, kRecipe),
               unfused = run(ops, inputs, weights,
                             R"({"recipe": {"name": "Float8CurrentScaling"}, "fuse": false})");
    EXPECT_TRUE(same(fused.outputs[0], unfused.outputs[0])) << dtype;
  }
}

TEST_P(NormFusion, QuantizeWritesYWhereItIsDemanded) {
  const Ops ops = {norm(), "make_extra_output", "basic_linear"};
  const Planned planned(ops, {leaf({3, 8})}, params(), kRecipe);
  EXPECT_THAT(planned.forward(),
              ::testing::ContainsRegex(norm() + "_quantize: .* -> 0." + norm() + ".y, .*"));
  EXPECT_TRUE(fused_equals_unfused(ops, {leaf({3, 8})}, params(), kRecipe));
}

TEST_P(NormFusion, BackwardAddFiresAndEquals) {
  const Planned planned(branch(), {leaf({3, 8})}, params());
  EXPECT_THAT(planned.backward(), HasSubstr(norm() + "_backward_add: "));
  EXPECT_THAT(planned.decisions(),
              Contains(norm() + "_backward_add at 1." + norm() + ".backward + add: made"));
  for (const auto dtype : {at::kFloat, at::kDouble})
    EXPECT_TRUE(fused_equals_unfused(branch(), {leaf({3, 8}, dtype)}, params(dtype))) << dtype;
  for (const auto& fields : {std::string("{}"), kRecipe})
    EXPECT_TRUE(fused_equals_unfused(branch(), {leaf({3, 8})}, params(), fields));
}

TEST_P(NormFusion, BackwardAddOfTheFirstNormLeavesTheOtherTermAlone) {
  const Ops two = {to_channel("a"),   norm(),           to_channel("b"), "identity",
                   from_channel("a"), from_channel("b")};
  Tensors weights = params();
  weights.pop_back();
  EXPECT_TRUE(fused_equals_unfused(two, {leaf({3, 8})}, weights));
}

TEST_P(NormFusion, BackwardAddIsRefusedWhereTheSumHasNoOtherTerm) {
  // x + x before the norm: its gradient is added to itself.
  const Ops ops = {to_channel(), from_channel(), norm()};
  Tensors weights = params();
  weights.pop_back();
  const Planned planned(ops, {leaf({3, 8})}, weights);
  EXPECT_THAT(planned.decisions(), Contains(norm() + "_backward_add at 2." + norm() +
                                            ".backward + add: the sum has no other term"));
  EXPECT_TRUE(fused_equals_unfused(ops, {leaf({3, 8})}, weights));
}

TEST(ActivationFusion, BackwardBiasFiresAndEquals) {
  for (const std::string op : {"gelu", "silu", "relu", "swiglu", "geglu"}) {
    const bool glu = op.find("glu") != std::string::npos;
    const std::string fusion = glu ? "glu_backward_bias" : "activation_backward_bias";
    const Ops ops = {"basic_linear", "bias", op, "basic_linear"};
    const auto params = [&](at::ScalarType dtype) {
      return Tensors{leaf({12, 8}, dtype, 2), leaf({12}, dtype, 3),
                     leaf({4, glu ? 6 : 12}, dtype, 4)};
    };
    const Planned planned(ops, {leaf({5, 8})}, params(at::kFloat));
    EXPECT_THAT(planned.backward(),
                HasSubstr(fusion + ": grad of 2." + op + ".y, 1.bias.y -> grad of 1.bias.y, 2." +
                          op + ".y, grad of 1.bias.bias\n"));
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
      EXPECT_TRUE(has_bits_without("backward_bias", ops, {leaf({5, 8}, dtype)}, params(dtype)))
          << op << dtype;
    EXPECT_TRUE(fused_equals_unfused(ops, {leaf({5, 8})}, params(at::kFloat), kRecipe)) << op;
  }
}

TEST(ActivationFusion, BackwardBiasWithoutGradX) {
  const Ops ops = {"bias", "gelu"};
  EXPECT_THAT(Planned(ops, {random({5, 8})}, {leaf({8})}).backward(),
              HasSubstr("activation_backward_bias: grad of 1.gelu.y, 0.bias.y -> grad of "
                        "0.bias.bias\n"));
  EXPECT_TRUE(fused_equals_unfused(ops, {random({5, 8})}, {leaf({8})}));
  EXPECT_TRUE(fused_equals_unfused({"bias", "swiglu"}, {random({5, 8})}, {leaf({8})}));
}

TEST(ActivationFusion, RefusesMixedDtypes) {
  const Ops ops = {"bias", "gelu"};
  const Tensors inputs{leaf({5, 8})}, params{leaf({8}, at::kBFloat16)};
  EXPECT_THAT(
      Planned(ops, inputs, params).decisions(),
      Contains("activation_backward_bias at 1.gelu.backward + 0.bias.grad_bias: the bias is "
               "BFloat16 and the activation's input Float"));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs, params));
}

}  // namespace
}  // namespace tandem::testing::fusions_norm
