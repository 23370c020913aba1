// Fusions of the residual stream that have no product: dropout and sums, sums and norms; and of
// activations with the bias before them.
#include <gmock/gmock.h>

#include "support/plans.h"

namespace tandem::testing::fusions_residual {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

const std::string kDropout = R"(dropout {"options": {"p": 0.25}})";
const std::string kTraining = R"({"training": true})";

/// Outputs, as each kernel of forward rounds where the ops by themselves do.
void expect_the_same_bits(const Ops& ops, const Tensors& inputs, const Tensors& params,
                          const std::string& fields, const std::string& unfused_fields) {
  const auto fused = run(ops, inputs, params, fields),
             unfused = run(ops, inputs, params, unfused_fields);
  for (size_t i = 0; i < fused.outputs.size(); ++i)
    EXPECT_TRUE(same(fused.outputs[i], unfused.outputs[i])) << "output " << i;
}

Tensors in_float32(const Tensors& tensors) {
  Tensors wide;
  for (const at::Tensor& tensor : tensors)
    wide.push_back(tensor.itemsize() == 2 ? tensor.detach().to(at::kFloat) : tensor.detach());
  return wide;
}

/// Outputs, as those of the ops by themselves on the same numbers in float32, rounded once.
void expect_one_rounding(const Ops& ops, const Tensors& inputs, const Tensors& params,
                         const std::string& fields, const std::string& unfused_fields) {
  const auto fused = run(ops, inputs, params, fields),
             unfused = run(ops, in_float32(inputs), in_float32(params), unfused_fields);
  for (size_t i = 0; i < fused.outputs.size(); ++i)
    EXPECT_TRUE(same(fused.outputs[i], unfused.outputs[i].to(fused.outputs[i].scalar_type())))
        << "output " << i;
}

class DropoutAdd : public ::testing::TestWithParam<bool> {
 protected:
  bool has_bias() const { return GetParam(); }
  std::string fusion() const { return has_bias() ? "bias_dropout_add" : "dropout_add"; }
  Ops ops(const std::string& add = "add_extra_input") const {
    Ops list{"bias", kDropout, add};
    if (!has_bias()) list.erase(list.begin());
    return list;
  }
  Tensors params(at::ScalarType dtype = at::kFloat) const {
    return has_bias() ? Tensors{leaf({40}, dtype, 2)} : Tensors{};
  }
};
INSTANTIATE_TEST_SUITE_P(Bias, DropoutAdd, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "with" : "without"; });

TEST_P(DropoutAdd, FiresAndRoundsOnce) {
  const Tensors both{leaf({7, 40}), leaf({7, 40}, at::kFloat, 4)};
  EXPECT_THAT(Planned(ops(), both, params(), kTraining).forward(), HasSubstr(fusion() + ": "));
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    for (const auto residual : {dtype, at::kFloat})
      expect_one_rounding(ops(), {leaf({7, 40}, dtype), leaf({7, 40}, residual, 4)}, params(dtype),
                          kTraining, R"({"training": true, "fuse": false})");
  EXPECT_TRUE(fused_equals_unfused(ops(), both, params(), kTraining));
}

TEST_P(DropoutAdd, WritesTheSumIntoTheCallersTensor) {
  const Ops in_place = ops(kAddInPlace);
  const std::string unfused = R"({"training": true, "fuse": false})";
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble})
    for (const bool is_strided : {false, true}) {
      const at::Tensor x = random({7, 40}, dtype), residual = random({40, 7}, dtype, 4);
      const auto target = [&] {
        return is_strided ? residual.clone().t() : residual.t().contiguous();
      };
      const at::Tensor fused = target(), expected = in_float32({target()})[0];
      const int64_t version = fused._version();
      EXPECT_THAT(Planned(in_place, {x, fused}, params(dtype), kTraining).forward(),
                  HasSubstr(fusion() + ": "));
      const RunResult result = run(in_place, {x, fused}, params(dtype), kTraining);
      run(in_place, {in_float32({x})[0], expected}, in_float32(params(dtype)), unfused);
      EXPECT_TRUE(same(fused, expected.to(dtype))) << dtype << is_strided;
      EXPECT_TRUE(same(result.outputs[0], fused));
      EXPECT_GT(fused._version(), version);
    }
}

TEST_P(DropoutAdd, RefusesATargetOfAnotherDtype) {
  const Ops in_place = ops(kAddInPlace);
  const Tensors both{leaf({7, 40}), random({7, 40}, at::kBFloat16, 4)};
  EXPECT_THAT(
      Planned(in_place, both, params(), kTraining).decisions(),
      Contains(::testing::AllOf(::testing::StartsWith(fusion()),
                                HasSubstr(": the sum is written into a tensor of BFloat16"))));
}

TEST_P(DropoutAdd, RefusesWhereWhatIsKeptIsTheExtraInput) {
  Ops list = ops(from_channel());
  list.insert(list.end() - 1, to_channel());
  EXPECT_THAT(
      Planned(list, {leaf({7, 40})}, params(), kTraining).decisions(),
      Contains(::testing::AllOf(::testing::StartsWith(fusion()),
                                HasSubstr(": what is kept is the extra input of the sum"))));
  EXPECT_TRUE(fused_equals_unfused(list, {leaf({7, 40})}, params(), kTraining));
}

TEST_P(DropoutAdd, RefusesAnExtraInputThatNoKernelTakes) {
  const Tensors both{leaf({7, 40}), random({7, 40}, at::kDouble, 4)};
  EXPECT_THAT(
      Planned(ops(), both, params(), kTraining).decisions(),
      Contains(::testing::AllOf(::testing::StartsWith(fusion()),
                                HasSubstr(": the extra input is Double, which no kernel takes"))));
  EXPECT_TRUE(fused_equals_unfused(ops(), both, params(), kTraining));
}

TEST(DropoutAddBehindAProduct, TakesItsBias) {
  const Ops ops = {"basic_linear", "bias", kDropout, "add_extra_input"};
  const Tensors both{leaf({7, 8}), leaf({7, 40}, at::kFloat, 4)},
      params{leaf({40, 8}, at::kFloat, 2), leaf({40}, at::kFloat, 3)};
  EXPECT_THAT(Planned(ops, both, params, kTraining).forward(), HasSubstr("bias_dropout_add: "));
  EXPECT_THAT(Planned(ops, both, params, R"({"training": false})").forward(),
              HasSubstr("linear_bias_add: "));
  EXPECT_TRUE(fused_equals_unfused(ops, both, params, kTraining));
}

class DropoutBackwardBias : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, DropoutBackwardBias,
                         ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble),
                         [](const auto& info) { return c10::toString(info.param); });

TEST_P(DropoutBackwardBias, FiresAndEqualsBitwise) {
  const Ops ops = {"bias", kDropout};
  for (const auto of_bias : {GetParam(), at::kFloat}) {
    const Tensors x{leaf({70, 40}, GetParam())}, bias{leaf({40}, of_bias, 2)};
    EXPECT_THAT(Planned(ops, x, bias, kTraining).backward(), HasSubstr("dropout_backward_bias: "));
    const auto fused = run(ops, x, bias, kTraining),
               unfused = run(ops, x, bias, R"({"training": true, "fuse": false})");
    ASSERT_EQ(fused.gradients.size(), 2u);
    for (size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(same(fused.gradients[i], unfused.gradients[i])) << of_bias << " " << i;
    EXPECT_TRUE(fused_equals_unfused(ops, x, bias, kTraining));
  }
}

TEST(DropoutBackwardBiasOf, AProductAndTheResidualStream) {
  const Ops ops = {"basic_linear", "bias", kDropout, "add_extra_input"};
  const Tensors both{leaf({7, 8}), leaf({7, 40}, at::kFloat, 4)},
      params{leaf({40, 8}, at::kFloat, 2), leaf({40}, at::kFloat, 3)};
  EXPECT_THAT(Planned(ops, both, params, kTraining).backward(),
              HasSubstr("dropout_backward_bias: "));
  EXPECT_TRUE(fused_equals_unfused(ops, both, params, kTraining));
}

TEST(DropoutBackwardBiasOf, XThatNeedsNoGradientWritesTheSumsAlone) {
  const Ops ops = {"bias", kDropout};
  const Tensors x{random({7, 40})}, bias{leaf({40}, at::kFloat, 2)};
  EXPECT_THAT(Planned(ops, x, bias, kTraining).backward(),
              HasSubstr("dropout_backward_bias: grad of 1.dropout.y, 1.dropout.seed -> grad of "
                        "0.bias.bias\n"));
  EXPECT_TRUE(fused_equals_unfused(ops, x, bias, kTraining));
}

TEST(DropoutBackwardBiasOf, NothingInEvaluation) {
  const Ops ops = {"bias", kDropout};
  EXPECT_THAT(Planned(ops, {leaf({7, 40})}, {leaf({40}, at::kFloat, 2)}, R"({"training": false})")
                  .backward(),
              ::testing::Not(HasSubstr("dropout")));
}

class AddNorm : public ::testing::TestWithParam<const char*> {
 protected:
  std::string norm() const { return GetParam(); }
  std::string fusion() const { return "add_" + norm(); }
  Tensors params(at::ScalarType dtype = at::kFloat) const {
    Tensors list{leaf({40}, dtype, 2), leaf({40}, dtype, 3)};
    if (norm() == "rms_norm") list.pop_back();
    return list;
  }
};
INSTANTIATE_TEST_SUITE_P(Norms, AddNorm, ::testing::Values("rms_norm", "layer_norm"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(AddNorm, FiresAndEqualsBitwise) {
  // The sum is the next residual: both are outputs.
  const Ops ops = {"add_extra_input", "make_extra_output", norm()};
  const Tensors both{leaf({7, 40}), leaf({7, 40}, at::kFloat, 4)};
  EXPECT_THAT(Planned(ops, both, params()).forward(),
              HasSubstr(fusion() + ": x, extra 0, 2." + norm() + ".weight"));
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    for (const auto other : {dtype, at::kFloat})
      expect_the_same_bits(ops, {leaf({7, 40}, dtype), leaf({7, 40}, other, 4)}, params(other),
                           "{}", R"({"fuse": false})");
  EXPECT_TRUE(fused_equals_unfused(ops, both, params()));
}

TEST_P(AddNorm, WritesTheSumOnlyWhereItIsDemanded) {
  const Ops ops = {"add_extra_input", norm()};
  const Tensors both{random({7, 40}), random({7, 40}, at::kFloat, 4)};
  Tensors frozen;
  for (const at::Tensor& param : params()) frozen.push_back(param.detach());
  EXPECT_THAT(Planned(ops, both, frozen).forward(),
              ::testing::EndsWith(" -> 1." + norm() + ".y\n"));
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    expect_the_same_bits(ops, {both[0].to(dtype), both[1]}, frozen, "{}", R"({"fuse": false})");
  EXPECT_TRUE(fused_equals_unfused(ops, {leaf({7, 40}), leaf({7, 40}, at::kFloat, 4)}, params()));
}

TEST_P(AddNorm, WritesTheSumIntoTheCallersTensor) {
  for (const bool reads_sum : {false, true})
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble})
      for (const bool is_strided : {false, true}) {
        Ops ops{kAddInPlace, norm()};
        if (reads_sum) ops.insert(ops.begin() + 1, "make_extra_output");
        const at::Tensor x = random({7, 40}, dtype), residual = random({40, 7}, dtype, 4);
        const auto target = [&] {
          return is_strided ? residual.clone().t() : residual.t().contiguous();
        };
        const at::Tensor fused = target(), expected = target();
        EXPECT_THAT(Planned(ops, {x, fused}, params(dtype)).forward(), HasSubstr(fusion() + ": "));
        const RunResult result = run(ops, {x, fused}, params(dtype)),
                        unfused = run(ops, {x, expected}, params(dtype), R"({"fuse": false})");
        EXPECT_TRUE(same(fused, expected)) << dtype << is_strided;
        // The norm by itself reads the sum where it lies, and adds in another order.
        EXPECT_TRUE(near(result.outputs, unfused.outputs)) << dtype << is_strided;
        for (size_t i = 0; i < result.gradients.size(); ++i)
          if (result.gradients[i].defined()) {
            EXPECT_TRUE(near(Tensors{result.gradients[i]}, Tensors{unfused.gradients[i]})) << i;
          }
      }
}

TEST_P(AddNorm, RefusesAnExtraInputThatNoKernelTakes) {
  const Ops ops = {"add_extra_input", norm()};
  const Tensors both{leaf({7, 40}), random({7, 40}, at::kFloat, 4).to(at::kLong)};
  EXPECT_THAT(Planned(ops, both, params()).decisions(),
              Contains(fusion() + " at 0.add_extra_input + 1." + norm() +
                       ": the extra input is Long, which no kernel takes"));
  EXPECT_TRUE(fused_equals_unfused(ops, both, params()));
}

TEST_P(AddNorm, OfAValueAndItself) {
  const Ops ops = {to_channel(), from_channel(), norm()};
  EXPECT_THAT(Planned(ops, {leaf({7, 40})}, params()).forward(), HasSubstr(fusion() + ": x, x, "));
  EXPECT_TRUE(fused_equals_unfused(ops, {leaf({7, 40})}, params()));
}

TEST(AddNormBehindAProduct, TakesTheSumFromOneWithoutABias) {
  const std::string recipe = R"({"recipe": {"name": "MXFP8BlockScaling"}})";
  const Ops ops = {to_channel(), "basic_linear", from_channel(), "rms_norm", "basic_linear"},
            biased = {to_channel(),   "basic_linear", "bias",
                      from_channel(), "rms_norm",     "basic_linear"};
  const Tensors inputs{leaf({32, 64})},
      params{leaf({64, 64}, at::kFloat, 2), leaf({64}, at::kFloat, 3),
             leaf({64, 64}, at::kFloat, 4)},
      with_bias{params[0], leaf({64}, at::kFloat, 5), params[1], params[2]};
  EXPECT_THAT(Planned(ops, inputs, params).forward(), HasSubstr("\nadd_rms_norm: "));
  EXPECT_THAT(Planned(ops, inputs, params, recipe).forward(),
              HasSubstr("\nadd_rms_norm_quantize: "));
  EXPECT_THAT(Planned(biased, inputs, with_bias).forward(), HasSubstr("linear_bias_add: "));
  EXPECT_THAT(Planned(biased, inputs, with_bias, recipe).forward(),
              AllOf(HasSubstr("linear_bias_add: "), HasSubstr("\nrms_norm_quantize: ")));
}

TEST(BiasActivation, FiresAndEqualsBitwise) {
  for (const std::string op : {"gelu", "silu", "relu", "swiglu", "geglu"}) {
    const std::string fusion = op.find("glu") == std::string::npos ? "bias_activation" : "bias_glu";
    const Ops ops = {"bias", op};
    EXPECT_EQ(Planned(ops, {leaf({7, 40})}, {leaf({40})}).forward(),
              fusion + ": x, 0.bias.bias -> 0.bias.y, 1." + op + ".y\n");
    EXPECT_EQ(Planned(ops, {random({7, 40})}, {random({40})}).forward(),
              fusion + ": x, 0.bias.bias -> 1." + op + ".y\n");
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
      for (const auto bias : {dtype, at::kFloat})
        expect_the_same_bits(ops, {leaf({7, 40}, dtype)}, {leaf({40}, bias, 2)}, "{}",
                             R"({"fuse": false})");
    EXPECT_TRUE(fused_equals_unfused(ops, {leaf({7, 40})}, {leaf({40}, at::kFloat, 2)}));
  }
}

TEST(ActivationQuantize, FiresAndEqualsBitwise) {
  for (const std::string op : {"gelu", "silu", "relu", "swiglu", "geglu"}) {
    const bool is_glu = op.find("glu") != std::string::npos;
    const std::string fusion = is_glu ? "glu_quantize" : "activation_quantize";
    const Ops ops = {"basic_linear", op, "basic_linear"};
    for (const std::string recipe : {"Float8CurrentScaling", "MXFP8BlockScaling"}) {
      const std::string fields = R"({"recipe": {"name": ")" + recipe + R"("}})",
                        unfused = R"({"fuse": false, "recipe": {"name": ")" + recipe + R"("}})";
      const auto params = [&](at::ScalarType dtype) {
        return Tensors{leaf({64, 32}, dtype, 2), leaf({32, is_glu ? 32 : 64}, dtype, 3)};
      };
      EXPECT_THAT(Planned(ops, {leaf({32, 32})}, params(at::kFloat), fields).forward(),
                  HasSubstr(fusion + ": 0.basic_linear.y -> "));
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
        expect_the_same_bits(ops, {leaf({32, 32}, dtype)}, params(dtype), fields, unfused);
      EXPECT_TRUE(fused_equals_unfused(ops, {leaf({32, 32})}, params(at::kFloat), fields)) << op;
    }
  }
}

TEST(ActivationQuantize, WritesYWhereItIsDemanded) {
  const Ops ops = {"gelu", "make_extra_output", "basic_linear"};
  const std::string recipe = R"({"recipe": {"name": "Float8CurrentScaling"}})";
  EXPECT_THAT(Planned(ops, {leaf({3, 8})}, {leaf({8, 8})}, recipe).forward(),
              ::testing::StartsWith("activation_quantize: x -> 0.gelu.y, 0.gelu.y in fp8_e4m3"));
  EXPECT_TRUE(fused_equals_unfused(ops, {leaf({3, 8})}, {leaf({8, 8})}, recipe));
}

}  // namespace
}  // namespace tandem::testing::fusions_residual
