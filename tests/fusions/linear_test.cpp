// Fusions of a product with what follows it.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>

#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::fusions_linear {
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
}

TEST(LinearBiasAdd, RefusesMixedDtypes) {
  const Planned planned({"basic_linear", "bias", "add_extra_input"},
                        {inputs(at::kBFloat16)[0], leaf({3, 2, 12}, at::kBFloat16)},
                        {leaf({12, 8}, at::kBFloat16), leaf({12})});
  EXPECT_THAT(planned.decisions(), Contains(HasSubstr("linear_bias_add at 0.basic_linear + 1.bias "
                                                      "+ 2.add_extra_input: the bias is Float")));
}

TEST(LinearBiasAdd, RefusesWhereTheProductIsTheExtraInput) {
  const Ops ops = {"basic_linear", "bias", to_channel("z"), from_channel("z")};
  const Planned planned(ops, inputs(), params());
  EXPECT_THAT(planned.decisions(),
              Contains(HasSubstr("the product is the extra input of the sum")));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs(), params()));
}

const std::string kScaled = R"(constant_scale {"options": {"factor": -0.75}})";

/// A product and what follows it, by the name of the fusion that takes all of it.
struct Sum {
  const char* fusion;
  Ops ops;
  bool has_bias() const { return std::string(fusion).find("bias") != std::string::npos; }
  bool has_extra() const { return std::string(fusion).find("add") != std::string::npos; }
  friend std::ostream& operator<<(std::ostream& out, const Sum& sum) { return out << sum.fusion; }
};

class LinearSum : public ::testing::TestWithParam<Sum> {
 protected:
  Tensors inputs(at::ScalarType dtype = at::kFloat, at::ScalarType residual = at::kFloat) const {
    Tensors list{leaf({3, 2, 8}, dtype)};
    if (GetParam().has_extra()) list.push_back(leaf({3, 2, 12}, residual, 4));
    return list;
  }
  Tensors params(at::ScalarType dtype = at::kFloat) const {
    Tensors list{leaf({12, 8}, dtype, 2)};
    if (GetParam().has_bias()) list.push_back(leaf({12}, dtype, 3));
    return list;
  }
};
class LinearSumOfExtra : public LinearSum {};
INSTANTIATE_TEST_SUITE_P(Parts, LinearSum,
                         ::testing::Values(Sum{"linear_bias_scale",
                                               {"basic_linear", "bias", kScaled}},
                                           Sum{"linear_scale", {"basic_linear", kScaled}}),
                         [](const auto& info) { return std::string(info.param.fusion); });
const Sum kWithExtra[] = {
    {"linear_bias_add", {"basic_linear", "bias", "add_extra_input"}},
    {"linear_bias_scale_add", {"basic_linear", "bias", kScaled, "add_extra_input"}},
    {"linear_add", {"basic_linear", "add_extra_input"}},
    {"linear_scale_add", {"basic_linear", kScaled, "add_extra_input"}}};
INSTANTIATE_TEST_SUITE_P(PartsWithExtra, LinearSum, ::testing::ValuesIn(kWithExtra),
                         [](const auto& info) { return std::string(info.param.fusion); });
INSTANTIATE_TEST_SUITE_P(PartsWithExtra, LinearSumOfExtra, ::testing::ValuesIn(kWithExtra),
                         [](const auto& info) { return std::string(info.param.fusion); });

TEST_P(LinearSum, FiresAndEquals) {
  const Ops& ops = GetParam().ops;
  const Planned planned(ops, inputs(), params());
  EXPECT_THAT(planned.forward(), StartsWith(GetParam().fusion + std::string(": x, ")));
  EXPECT_THAT(planned.decisions(), Contains(::testing::AllOf(StartsWith(GetParam().fusion),
                                                             ::testing::EndsWith(": made"))));
  // In 16 bits a factor behind a bias rounds once less: RoundsNoMoreThanTheUnfusedOpsDo.
  const bool rounds_less = std::string(GetParam().fusion).find("bias_scale") != std::string::npos;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    if (rounds_less && c10::elementSize(dtype) == 2) continue;
    EXPECT_TRUE(fused_equals_unfused(ops, inputs(dtype, dtype), params(dtype))) << dtype;
  }
  EXPECT_TRUE(fused_equals_unfused(ops, inputs(), params(), kRecipe));
}

TEST_P(LinearSum, EqualsWhereLibrariesShareTheProduct) {
  // Large enough for oneDNN, with a number of rows that it is given in pieces.
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Tensors large{leaf({131, 256}, dtype)}, weights{leaf({512, 256}, dtype, 2)};
    if (GetParam().has_extra()) large.push_back(leaf({131, 512}, dtype, 4));
    if (GetParam().has_bias()) weights.push_back(leaf({512}, dtype, 3));
    const auto fused = run(GetParam().ops, large, weights),
               unfused = run(GetParam().ops, large, weights, R"({"fuse": false})");
    EXPECT_TRUE(near(fused.outputs, unfused.outputs, /*magnitude=*/256)) << dtype;
    EXPECT_TRUE(near(fused.gradients, unfused.gradients, /*magnitude=*/1024)) << dtype;
  }
}

TEST_P(LinearSumOfExtra, AMixedResidualPromotes) {
  const Tensors mixed = inputs(at::kBFloat16, at::kFloat), weights = params(at::kBFloat16);
  EXPECT_EQ(run(GetParam().ops, mixed, weights).outputs[0].scalar_type(), at::kFloat);
  // It rounds once less: RoundsNoMoreThanTheUnfusedOpsDo. Of numbers up to 8, to 8 bits.
  const at::Tensor fused = run(GetParam().ops, mixed, weights).outputs[0],
                   unfused = run(GetParam().ops, mixed, weights, R"({"fuse": false})").outputs[0];
  EXPECT_LE((fused - unfused).abs().max().item<float>(), 8.0 / 256);
}

TEST_P(LinearSumOfExtra, WritesInPlaceWhereAsked) {
  Ops ops = GetParam().ops;
  ops.back() = kAddInPlace;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    for (const bool strided : {false, true}) {
      const auto result_of = [&](const std::string& fields) {
        const at::Tensor wide = random({3, 2, 24}, dtype, 4),
                         extra = strided ? wide.slice(2, 0, 24, 2) : wide.slice(2, 0, 12).clone();
        const auto version = extra._version();
        RunResult result = run(ops, {inputs(dtype)[0], extra}, params(dtype), fields);
        EXPECT_EQ(result.outputs[0].const_data_ptr(), extra.const_data_ptr());
        EXPECT_GT(extra._version(), version);
        return result;
      };
      const auto fused = result_of("{}"), unfused = result_of(R"({"fuse": false})");
      EXPECT_TRUE(near(fused.outputs, unfused.outputs, /*magnitude=*/16)) << dtype << strided;
      EXPECT_TRUE(near(fused.gradients, unfused.gradients)) << dtype << strided;
    }
  EXPECT_THAT(Planned(ops, {leaf({3, 2, 8}), random({3, 2, 12})}, params()).forward(),
              StartsWith(GetParam().fusion + std::string(": ")));
}

TEST_P(LinearSumOfExtra, RefusesAnExtraInputOfAnotherShape) {
  Ops in_place = GetParam().ops;
  in_place.back() = kAddInPlace;
  for (const Ops& ops : {GetParam().ops, in_place})
    EXPECT_ERROR(
        run(ops, {inputs()[0], random({3, 2, 13})}, params()), c10::ValueError,
        "add_extra_input: expected the extra input of the shape of x, [3, 2, 12], got [3, 2, 13]");
}

TEST(LinearAdd, WritesInPlaceIntoWhatItReads) {
  const at::Tensor weight = random({8, 8}, at::kFloat, 2), x = random({5, 8}), in = x.clone();
  const RunResult result = run({"basic_linear", kAddInPlace}, {in, in}, {weight});
  EXPECT_TRUE(near(in, x.matmul(weight.t()) + x));
  EXPECT_TRUE(same(result.outputs[0], in));
}

TEST(LinearAdd, RefusesWhereTheProductIsTheExtraInput) {
  const Ops ops = {"basic_linear", to_channel("z"), from_channel("z")};
  EXPECT_THAT(Planned(ops, inputs(), {leaf({12, 8})}).decisions(),
              Contains("linear_add at 0.basic_linear + 2.add_extra_input: the product is the extra "
                       "input of the sum"));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs(), {leaf({12, 8})}));
}

TEST(LinearScale, RoundsNoMoreThanTheUnfusedOpsDo) {
  // Against float64: of three roundings to 16 bits two are left.
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    for (const bool adds : {false, true}) {
      Ops ops{"basic_linear", "bias", kScaled};
      Tensors tensors{random({33, 64}, dtype)};
      const at::Tensor weight = random({48, 64}, dtype, 2), bias = random({48}, dtype, 3) * 50,
                       extra = random({33, 48}, dtype, 4);
      if (adds) {
        ops.push_back("add_extra_input");
        tensors.push_back(extra);
      }
      const Planned planned(ops, tensors, {weight, bias});
      EXPECT_THAT(planned.forward(),
                  HasSubstr(adds ? "linear_bias_scale_add: " : "linear_bias_scale: "));
      at::Tensor exact =
          (tensors[0].to(at::kDouble).matmul(weight.to(at::kDouble).t()) + bias.to(at::kDouble)) *
          -0.75;
      if (adds) exact = exact + extra.to(at::kDouble);
      const auto error = [&](const std::string& fields) {
        const at::Tensor y = run(ops, tensors, {weight, bias}, fields).outputs[0];
        return (y.to(at::kDouble) - exact).square().mean().sqrt().item<double>();
      };
      EXPECT_LE(error("{}"), error(R"({"fuse": false})") * 1.01) << dtype << " " << adds;
    }
}

TEST(LinearScale, RefusesMixedDtypesOfTheBias) {
  const Planned planned({"basic_linear", "bias", kScaled}, inputs(at::kBFloat16),
                        {leaf({12, 8}, at::kBFloat16), leaf({12})});
  EXPECT_THAT(planned.decisions(), Contains(HasSubstr("linear_bias_scale at 0.basic_linear + "
                                                      "1.bias + 2.constant_scale: the bias is "
                                                      "Float and the product BFloat16")));
}

TEST(LinearScale, FactorsThatLibrariesLose) {
  // 0 times infinity is NaN, and torch's products refuse what is no float32.
  for (const char* factor : {"0", "1e-60", "1e60"}) {
    const Ops ops = {"basic_linear",
                     R"(constant_scale {"options": {"factor": )" + std::string(factor) + "}}"};
    at::Tensor x = random({4, 8});
    x[1][2] = INFINITY;
    const Tensors params{random({12, 8}, at::kFloat, 2)};
    const auto fused = run(ops, {x}, params), unfused = run(ops, {x}, params, R"({"fuse": false})");
    EXPECT_TRUE(fused.outputs[0].isnan().equal(unfused.outputs[0].isnan())) << factor;
    EXPECT_TRUE(fused.outputs[0].isinf().equal(unfused.outputs[0].isinf())) << factor;
  }
}

TEST(LinearBackwardScale, ScalesBothProducts) {
  const Ops ops = {"basic_linear", kScaled};
  const Tensors params{leaf({12, 8}, at::kFloat, 2)};
  EXPECT_EQ(Planned(ops, inputs(), params).backward(),
            "linear_backward_scale_x_weight: grad of 1.constant_scale.y, 0.basic_linear.weight, x "
            "-> grad "
            "of x, grad of 0.basic_linear.weight\n");
  EXPECT_EQ(Planned(ops, {random({3, 8})}, params).backward(),
            "linear_backward_scale_weight: grad of 1.constant_scale.y, x -> grad of "
            "0.basic_linear.weight\n");
  EXPECT_EQ(Planned(ops, inputs(), {random({12, 8})}).backward(),
            "linear_backward_scale_x: grad of 1.constant_scale.y, 0.basic_linear.weight -> grad of "
            "x\n");
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    EXPECT_TRUE(fused_equals_unfused(ops, {random({3, 8}, dtype)}, {leaf({12, 8}, dtype)}));
    EXPECT_TRUE(fused_equals_unfused(ops, inputs(dtype), {random({12, 8}, dtype)}));
  }
}

TEST(LinearBackwardScale, RefusesWhereTheScaledGradientIsDemanded) {
  const Ops ops = {"basic_linear", "bias", kScaled};
  const Planned planned(ops, inputs(), params());
  EXPECT_THAT(planned.backward(), HasSubstr("constant_scale.backward: "));
  EXPECT_THAT(
      planned.decisions(),
      Contains(
          "linear_backward_scale_x_weight at 2.constant_scale.backward + 0.basic_linear.grad_x "
          "+ 0.basic_linear.grad_weight: grad of 1.bias.y is demanded outside and the "
          "fused step does not write it"));
}

TEST(LinearBackward, TheSumWinsOverTheScale) {
  // Rounded once with the sum; behind the scale it would be twice.
  const Planned planned({"make_extra_output", "basic_linear", kScaled}, {leaf({4, 8})},
                        {random({8, 8})});
  EXPECT_THAT(planned.backward(), HasSubstr("linear_backward_add: "));
}

TEST(LinearBackwardAdd, FiresAndEquals) {
  const Ops ops = {to_channel(), "basic_linear", "gelu", "basic_linear", from_channel()};
  const auto weights = [](at::ScalarType dtype) {
    return Tensors{leaf({12, 8}, dtype, 2), leaf({8, 12}, dtype, 3)};
  };
  const Planned planned(ops, inputs(), weights(at::kFloat));
  EXPECT_THAT(planned.backward(),
              HasSubstr("linear_backward_add: grad of 1.basic_linear.y, 1.basic_linear.weight, "
                        "grad of 4.add_extra_input.y -> grad of x\n"));
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    EXPECT_TRUE(fused_equals_unfused(ops, inputs(dtype), weights(dtype))) << dtype;
  EXPECT_TRUE(fused_equals_unfused(ops, inputs(), weights(at::kFloat), kRecipe));
}

TEST(LinearBackwardAdd, LeavesTheGradientOfTheCallerAlone) {
  const at::Tensor x = leaf({3, 8}), weight = leaf({8, 8}, at::kFloat, 2);
  const Ops ops = {"make_extra_output", "basic_linear"};
  const auto program = function_of(ops);
  const Tensors outputs = program({x, weight});
  const Tensors grads{random({3, 8}, at::kFloat, 5), at::ones({}).expand({3, 8})};
  const at::Tensor before = grads[0].clone();
  const Tensors gradients = gradients_of(outputs, {x}, grads);
  EXPECT_TRUE(near(gradients[0], before.matmul(weight.detach()) + 1));
  EXPECT_TRUE(same(grads[0], before));
  EXPECT_TRUE(same(grads[1], at::ones({3, 8})));
}

TEST(LinearBackwardAdd, RefusesWhereTheSumHasNoOtherTerm) {
  const Ops ops = {to_channel(), from_channel(), "basic_linear"};
  EXPECT_THAT(Planned(ops, inputs(), {leaf({12, 8})}).decisions(),
              Contains(::testing::AllOf(StartsWith("linear_backward_add at "),
                                        HasSubstr(": the sum has no other term"))));
  EXPECT_TRUE(fused_equals_unfused(ops, inputs(), {leaf({12, 8})}));
}

class LinearActivation : public ::testing::TestWithParam<const char*> {
 protected:
  bool is_glu() const { return std::string(GetParam()).find("glu") != std::string::npos; }
  std::string fusion() const { return is_glu() ? "linear_glu" : "linear_activation"; }
  Ops ops() const { return {"basic_linear", GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Functions, LinearActivation,
                         ::testing::Values("gelu", "silu", "relu", "swiglu", "geglu"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(LinearActivation, KeepsTheProductOnlyWhereBackwardReadsIt) {
  const std::string reads = ": x, 0.basic_linear.weight -> ",
                    y = std::string("1.") + GetParam() + ".y\n";
  EXPECT_EQ(Planned(ops(), inputs(), {leaf({12, 8})}).forward(),
            fusion() + reads + "0.basic_linear.y, " + y);
  EXPECT_EQ(Planned(ops(), {random({3, 8})}, {random({12, 8})}).forward(), fusion() + reads + y);
}

TEST_P(LinearActivation, EqualsTheUnfusedOps) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    EXPECT_TRUE(fused_equals_unfused(ops(), inputs(dtype), {leaf({12, 8}, dtype)})) << dtype;
    EXPECT_TRUE(fused_equals_unfused(ops(), {random({3, 8}, dtype)}, {random({12, 8}, dtype)}));
  }
  EXPECT_TRUE(fused_equals_unfused(ops(), inputs(), {leaf({12, 8})}, kRecipe));
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
  for (const auto dtype : {at::kFloat, at::kDouble})
    EXPECT_TRUE(fused_equals_unfused(ops(), inputs(dtype), params(dtype))) << dtype;
  for (const auto dtype : {at::kBFloat16, at::kHalf})  // as the product with its bias, and the unit
    EXPECT_TRUE(has_bits_without("linear_bias_", ops(), inputs(dtype), params(dtype))) << dtype;
  EXPECT_TRUE(fused_equals_unfused(ops(), inputs(), params(), kRecipe));
  EXPECT_TRUE(fused_equals_unfused(ops(), {random({3, 8})}, {random({12, 8}), random({12})}));
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
}  // namespace tandem::testing::fusions_linear
