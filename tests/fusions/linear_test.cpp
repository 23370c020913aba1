// Fusions of a product with what follows it.
#include <gmock/gmock.h>

#include "support/plans.h"

namespace tandem::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Tensors inputs(at::ScalarType dtype = at::kFloat) { return {leaf({3, 2, 8}, dtype)}; }
Tensors params(at::ScalarType dtype = at::kFloat, int64_t out = 12) {
  return {leaf({out, 8}, dtype, 2), leaf({out}, dtype, 3)};
}

const std::string kRecipe = R"({"recipe": {"name": "Float8CurrentScaling"}})";
const std::vector<std::string> kFields = {"{}", kRecipe};

TEST(LinearBias, Fires) {
  const Planned planned({"basic_linear", "bias"}, inputs(), params());
  EXPECT_EQ(planned.forward(), "linear_bias: x, 0.basic_linear.weight, 1.bias.bias -> 1.bias.y\n");
  EXPECT_THAT(planned.decisions(), Contains("linear_bias at 0.basic_linear + 1.bias: made"));
}

TEST(LinearBias, EqualsTheUnfusedOps) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    EXPECT_TRUE(fused_equals_unfused({"basic_linear", "bias"}, inputs(dtype), params(dtype)))
        << dtype;
  EXPECT_TRUE(fused_equals_unfused({"basic_linear", "bias"}, inputs(), params(), kRecipe));
}

TEST(LinearBias, EqualsTheUnfusedOpsOnEveryPath) {
  for (const auto& dtype : {at::kFloat, at::kBFloat16}) {
    const auto direct = run({"basic_linear", "bias"}, inputs(dtype), params(dtype)),
               dispatched = run({"basic_linear", "bias"}, inputs(dtype), params(dtype), "{}",
                                Path::dispatch);
    EXPECT_TRUE(near(direct.outputs, dispatched.outputs));
    EXPECT_TRUE(near(direct.gradients, dispatched.gradients));
  }
}

TEST(LinearBias, RefusesMixedDtypes) {
  const Planned planned({"basic_linear", "bias"}, inputs(at::kBFloat16),
                        {leaf({12, 8}, at::kBFloat16), leaf({12})});
  EXPECT_THAT(planned.decisions(),
              Contains("linear_bias at 0.basic_linear + 1.bias: the bias is Float and the product "
                       "BFloat16"));
  EXPECT_THAT(planned.forward(), StartsWith("basic_linear: "));
}

TEST(LinearBias, RefusesWhereTheProductIsDemanded) {
  const Ops ops = {"basic_linear", "make_extra_output", "bias"};
  const Planned planned(ops, inputs(), params());
  EXPECT_THAT(planned.decisions(),
              Contains("linear_bias at 0.basic_linear + 2.bias: 0.basic_linear.y is demanded "
                       "outside and the fused step does not write it"));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs(), params()));
}

TEST(LinearBiasAdd, FiresAndEquals) {
  const Ops ops = {"basic_linear", "bias", "add_extra_input"};
  const Tensors both{inputs()[0], leaf({3, 2, 12}, at::kFloat, 4)};
  EXPECT_EQ(Planned(ops, both, params()).forward(),
            "linear_bias_add: x, 0.basic_linear.weight, 1.bias.bias, extra 0 -> "
            "2.add_extra_input.y\n");
  for (const auto& fields : kFields) EXPECT_TRUE(fused_equals_unfused(ops, both, params(), fields));
  EXPECT_TRUE(fused_equals_unfused(ops, {inputs(at::kHalf)[0], leaf({3, 2, 12}, at::kHalf)},
                                   params(at::kHalf)));
}

TEST(LinearBiasAdd, AMixedResidualPromotes) {
  const Ops ops = {"basic_linear", "bias", "add_extra_input"};
  const Tensors both{inputs(at::kBFloat16)[0], leaf({3, 2, 12}, at::kFloat, 4)};
  EXPECT_EQ(run(ops, both, params(at::kBFloat16)).outputs[0].scalar_type(), at::kFloat);
  EXPECT_TRUE(fused_equals_unfused(ops, both, params(at::kBFloat16)));
}

TEST(LinearBiasAdd, RefusesMixedDtypes) {
  const Planned planned({"basic_linear", "bias", "add_extra_input"},
                        {inputs(at::kBFloat16)[0], leaf({3, 2, 12}, at::kBFloat16)},
                        {leaf({12, 8}, at::kBFloat16), leaf({12})});
  EXPECT_THAT(planned.decisions(), Contains(HasSubstr("linear_bias_add at 0.basic_linear + 1.bias "
                                                      "+ 2.add_extra_input: the bias is Float")));
}

TEST(LinearBiasAdd, RefusesWhereTheProductIsTheExtraInput) {
  const Ops ops = {"basic_linear", "bias",
                   R"(make_extra_output {"extra_outputs": [{"channel": "z", "to_caller": false}]})",
                   R"(add_extra_input {"extra_inputs": [{"channel": "z"}]})"};
  const Planned planned(ops, inputs(), params());
  EXPECT_THAT(planned.decisions(),
              Contains(HasSubstr("the product is the extra input of the sum")));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs(), params()));
}

class LinearBiasActivation : public ::testing::TestWithParam<const char*> {
 protected:
  bool is_glu() const { return std::string(GetParam()).find("glu") != std::string::npos; }
  std::string fusion() const { return is_glu() ? "linear_bias_glu" : "linear_bias_activation"; }
  Ops ops() const { return {"basic_linear", "bias", GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Functions, LinearBiasActivation,
                         ::testing::Values("gelu", "silu", "relu", "swiglu", "geglu"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(LinearBiasActivation, WritesTheSumOnlyWhereBackwardReadsIt) {
  const std::string reads = ": x, 0.basic_linear.weight, 1.bias.bias -> ",
                    y = std::string("2.") + GetParam() + ".y\n";
  EXPECT_EQ(Planned(ops(), inputs(), params()).forward(), fusion() + reads + "1.bias.y, " + y);
  EXPECT_EQ(Planned(ops(), {random({3, 8})}, {random({12, 8}), random({12})}).forward(),
            fusion() + reads + y);
}

TEST_P(LinearBiasActivation, EqualsTheUnfusedOps) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    EXPECT_TRUE(fused_equals_unfused(ops(), inputs(dtype), params(dtype))) << dtype;
  EXPECT_TRUE(fused_equals_unfused(ops(), inputs(), params(), kRecipe));
  EXPECT_TRUE(fused_equals_unfused(ops(), {random({3, 8})}, {random({12, 8}), random({12})}));
}

TEST_P(LinearBiasActivation, EqualsThroughTheDispatcher) {
  const auto direct = run(ops(), inputs(), params()),
             dispatched = run(ops(), inputs(), params(), "{}", Path::dispatch);
  EXPECT_TRUE(near(direct.outputs, dispatched.outputs));
  EXPECT_TRUE(near(direct.gradients, dispatched.gradients));
}

TEST_P(LinearBiasActivation, RefusesMixedDtypes) {
  const Planned planned(ops(), inputs(at::kBFloat16), {leaf({12, 8}, at::kBFloat16), leaf({12})});
  EXPECT_THAT(planned.decisions(),
              Contains(fusion() + " at 0.basic_linear + 1.bias + 2." + GetParam() +
                       ": the bias is Float and the product BFloat16"));
}

TEST_P(LinearBiasActivation, RefusesWhereTheProductIsDemanded) {
  const Ops demanded = {"basic_linear", "make_extra_output", "bias", GetParam()};
  EXPECT_THAT(Planned(demanded, inputs(), params()).decisions(),
              Contains(::testing::AllOf(StartsWith(fusion()),
                                        HasSubstr("0.basic_linear.y is demanded outside"))));
  EXPECT_TRUE(fused_equals_unfused(demanded, inputs(), params()));
}

TEST(LinearFusions, TheLongestComesFirst) {
  EXPECT_THAT(Planned({"basic_linear", "bias", "gelu"}, inputs(), params()).decisions(),
              Not(Contains(StartsWith("linear_bias at"))));
}

}  // namespace
}  // namespace tandem::testing
