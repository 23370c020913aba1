// Fusions of units and biases with the quantizer behind them: that they are made, with the bits of
// the unfused steps, and why not.
#include <gmock/gmock.h>

#include "support/plans.h"

namespace tandem::testing::fusions_quantize {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

const char* const kRecipes[] = {"Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
                                "NVFP4BlockScaling"};

std::string fields_of(const std::string& recipe) {
  return R"({"recipe": {"name": ")" + recipe + R"("}})";
}

bool is_gated(const std::string& op) { return op.find("glu") != std::string::npos; }

void expect_the_same_bits(const Ops& ops, const Tensors& inputs, const Tensors& params,
                          const std::string& recipe) {
  EXPECT_TRUE(has_bits_without("quantize", ops, inputs, params, fields_of(recipe)));
}

/// linear -> bias -> unit -> linear.
struct Mlp {
  explicit Mlp(std::string unit) : op(std::move(unit)) {}
  Ops ops() const { return {"basic_linear", "bias", op, "basic_linear"}; }
  Tensors params(at::ScalarType dtype = at::kFloat) const {
    return {leaf({64, 32}, dtype, 2), leaf({64}, dtype, 3),
            leaf({32, is_gated(op) ? 32 : 64}, dtype, 4)};
  }
  std::string op;
};

const char* const kUnits[] = {"gelu", "silu", "relu", "swiglu", "geglu"};

TEST(QuantizeFusion, OfAnMlpWithABiasFiresInBothDirections) {
  for (const std::string op : kUnits) {
    const Mlp mlp(op);
    const Planned planned(mlp.ops(), {leaf({32, 32})}, mlp.params(),
                          fields_of("MXFP8BlockScaling"));
    const std::string unit = is_gated(op) ? "glu" : "activation";
    const std::string all = "_backward_bias_quantize_quantize_y";
    EXPECT_THAT(planned.forward(), HasSubstr("linear_bias_" + unit + "_quantize: x in "));
    EXPECT_THAT(planned.backward(), HasSubstr(unit + all + ": grad of "));
    EXPECT_THAT(planned.backward(), Not(::testing::ContainsRegex("\nquantize: [0-9]"))) << "y";
    EXPECT_THAT(planned.decisions(),
                Contains("linear_bias_" + unit + "_quantize at 0.basic_linear + 1.bias + 2." + op +
                         " + quantize: made"));
    EXPECT_THAT(planned.decisions(), Contains(unit + all + " at 2." + op +
                                              ".backward + 1.bias.grad_bias + quantize + quantize: "
                                              "made"));
  }
}

TEST(QuantizeFusion, OfAnMlpWithABiasEqualsBitwise) {
  for (const std::string op : kUnits)
    for (const std::string recipe : kRecipes)
      for (const auto dtype : kKernelDtypes)
        expect_the_same_bits(Mlp(op).ops(), {leaf({32, 32}, dtype)}, Mlp(op).params(dtype), recipe);
}

TEST(QuantizeFusion, OfAnMlpOfManyRows) {
  for (const std::string op : {"gelu", "swiglu"})
    for (const std::string recipe : kRecipes)
      expect_the_same_bits(Mlp(op).ops(), {leaf({1120, 32}, at::kBFloat16)},
                           Mlp(op).params(at::kBFloat16), recipe);
}

TEST(QuantizeFusion, OfAnMlpKeepsWhatTheUnfusedStepsKeep) {
  for (const std::string op : {"gelu", "swiglu"})
    for (const std::string recipe : {"MXFP8BlockScaling", "Float8CurrentScaling"})
      EXPECT_TRUE(fused_equals_unfused(Mlp(op).ops(), {leaf({32, 32})}, Mlp(op).params(),
                                       fields_of(recipe)))
          << op << recipe;
}

TEST(QuantizeFusion, OfAFrozenBiasSumsNothing) {
  Tensors params = Mlp("gelu").params();
  params[1] = params[1].detach();
  const Planned planned(Mlp("gelu").ops(), {leaf({32, 32})}, params,
                        fields_of("MXFP8BlockScaling"));
  EXPECT_THAT(planned.backward(), HasSubstr("activation_backward_quantize_quantize_y: "));
  EXPECT_THAT(planned.backward(), Not(HasSubstr("bias_quantize")));
  expect_the_same_bits(Mlp("gelu").ops(), {leaf({32, 32})}, params, "MXFP8BlockScaling");
}

TEST(QuantizeFusion, OfABiasBehindNoProduct) {
  for (const std::string op : kUnits) {
    const std::string unit = is_gated(op) ? "glu" : "activation";
    const Ops ops = {"bias", op, "basic_linear"};
    const auto params = [&](at::ScalarType dtype) {
      return Tensors{leaf({64}, dtype, 3), leaf({32, is_gated(op) ? 32 : 64}, dtype, 4)};
    };
    EXPECT_THAT(Planned(ops, {leaf({32, 64})}, params(at::kFloat), fields_of("MXFP8BlockScaling"))
                    .forward(),
                HasSubstr("bias_" + unit + "_quantize: x, "));
    for (const auto dtype : kKernelDtypes)
      expect_the_same_bits(ops, {leaf({32, 64}, dtype)}, params(dtype), "MXFP8BlockScaling");
    expect_the_same_bits(ops, {leaf({32, 64}, at::kBFloat16)}, params(at::kFloat),
                         "MXFP8BlockScaling");
  }
}

TEST(QuantizeFusion, OfYThatIsWrittenAgainAlone) {
  for (const std::string op : kUnits)
    for (const bool bias : {false, true}) {
      const std::string fusion = std::string(is_gated(op) ? "glu" : "activation") + "_backward" +
                                 (bias ? "_bias" : "") + "_quantize_y";
      const Ops ops = bias ? Ops{"bias", op, "basic_linear"} : Ops{op, "basic_linear"};
      const auto params = [&](at::ScalarType dtype) {
        Tensors list{leaf({64}, dtype, 3), leaf({32, is_gated(op) ? 32 : 64}, dtype, 4)};
        if (!bias) list.erase(list.begin());
        return list;
      };
      const Planned planned(ops, {leaf({32, 64})}, params(at::kFloat),
                            fields_of("MXFP8BlockScaling"));
      EXPECT_THAT(planned.backward(), HasSubstr(fusion + ": grad of "));
      EXPECT_THAT(planned.backward(), Not(::testing::ContainsRegex("\nquantize: [0-9]")));
      for (const std::string recipe : kRecipes)
        for (const auto dtype : kKernelDtypes)
          for (const int64_t rows : {0, 33, 1120})
            expect_the_same_bits(ops, {leaf({rows, 64}, dtype)}, params(dtype), recipe);
      EXPECT_TRUE(fused_equals_unfused(ops, {leaf({32, 64})}, params(at::kFloat),
                                       fields_of("MXFP8BlockScaling")));
    }
}

TEST(QuantizeFusion, WritesYWhereItIsDemanded) {
  for (const std::string op : {"gelu", "swiglu"}) {
    Ops ops = Mlp(op).ops();
    ops.insert(ops.begin() + 3, "make_extra_output");
    EXPECT_THAT(
        Planned(ops, {leaf({32, 32})}, Mlp(op).params(), fields_of("MXFP8BlockScaling")).forward(),
        ::testing::ContainsRegex("linear_bias_[a-z]*_quantize: .* -> 1.bias.y, 2." + op + ".y, "));
    expect_the_same_bits(ops, {leaf({32, 32})}, Mlp(op).params(), "MXFP8BlockScaling");
  }
}

TEST(QuantizeFusion, OfAGradientAndTheBiasThatItIsOf) {
  const Ops ops = {"basic_linear", "bias"};
  const auto params = [](at::ScalarType dtype) {
    return Tensors{leaf({64, 32}, dtype, 2), leaf({64}, dtype, 3)};
  };
  const Planned planned(ops, {leaf({32, 32})}, params(at::kFloat), fields_of("MXFP8BlockScaling"));
  EXPECT_THAT(planned.backward(),
              HasSubstr("bias_backward_quantize: grad of 1.bias.y -> grad of 1.bias.bias, "));
  EXPECT_THAT(planned.decisions(),
              Contains("bias_backward_quantize at 1.bias.grad_bias + quantize: made"));
  for (const std::string recipe : kRecipes)
    for (const auto dtype : kKernelDtypes)
      expect_the_same_bits(ops, {leaf({1120, 32}, dtype)}, params(dtype), recipe);
  EXPECT_TRUE(fused_equals_unfused(ops, {leaf({32, 32})}, params(at::kFloat),
                                   fields_of("MXFP8BlockScaling")));
}

TEST(QuantizeFusion, RefusesABiasOfAnotherDtype) {
  Tensors params = Mlp("gelu").params();
  params[1] = leaf({64}, at::kBFloat16, 3);
  const Planned planned(Mlp("gelu").ops(), {leaf({32, 32})}, params,
                        fields_of("MXFP8BlockScaling"));
  EXPECT_THAT(planned.decisions(),
              Contains("linear_bias_activation_quantize at 0.basic_linear + 1.bias + 2.gelu + "
                       "quantize: the bias is BFloat16 and the product Float"));
  EXPECT_THAT(planned.decisions(),
              Contains("activation_backward_bias_quantize at 2.gelu.backward + 1.bias.grad_bias + "
                       "quantize: the bias is BFloat16 and the activation's input Float"));
  expect_the_same_bits(Mlp("gelu").ops(), {leaf({32, 32})}, params, "MXFP8BlockScaling");
}

}  // namespace
}  // namespace tandem::testing::fusions_quantize
