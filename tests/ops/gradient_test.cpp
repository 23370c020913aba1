// Every op in a pipeline: its gradients by central differences in float64, and torch's values.
#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>

#include "support/plans.h"

namespace tandem::testing::ops_gradient {
namespace {

struct OpCase {
  const char* name;
  Ops ops;
  std::vector<std::vector<int64_t>> inputs, params;
};
std::ostream& operator<<(std::ostream& out, const OpCase& c) { return out << c.name; }

const std::string kChannel = R"(make_extra_output {"extra_outputs": [{"channel": "r"}]})";
const std::string kReader = from_channel();

const std::vector<OpCase> kCases = {
    {"identity", {"identity"}, {{2, 3}}, {}},
    {"basic_linear", {"basic_linear"}, {{2, 3}}, {{4, 3}}},
    {"basic_linear_of_a_vector", {"basic_linear"}, {{3}}, {{4, 3}}},
    {"basic_linear_in_3_dimensions", {"basic_linear"}, {{2, 2, 3}}, {{4, 3}}},
    {"basic_linear_of_nothing", {"basic_linear"}, {{0, 3}}, {{4, 3}}},
    {"bias", {"bias"}, {{2, 3}}, {{3}}},
    {"rms_norm", {"rms_norm"}, {{2, 5}}, {{5}}},
    {"rms_norm_zero_centered",
     {R"(rms_norm {"options": {"zero_centered_gamma": true, "eps": 0.1}})"},
     {{2, 5}},
     {{5}}},
    {"layer_norm", {"layer_norm"}, {{2, 5}}, {{5}, {5}}},
    {"layer_norm_zero_centered",
     {R"(layer_norm {"options": {"zero_centered_gamma": true}})"},
     {{2, 5}},
     {{5}, {5}}},
    {"rms_norm_over_two", {"rms_norm"}, {{2, 3, 5}}, {{3, 5}}},
    {"layer_norm_over_two", {"layer_norm"}, {{2, 3, 5}}, {{3, 5}, {3, 5}}},
    {"l2_normalization", {"l2_normalization"}, {{2, 5}}, {}},
    {"qk_norm",
     {R"(qk_norm {"options": {"num_heads": 2, "num_kv_heads": 1}})"},
     {{2, 3, 12}},
     {{3}, {3}}},
    {"qk_norm_zero_centered",
     {R"(qk_norm {"options": {"num_heads": 1, "zero_centered_gamma": true, "eps": 0.1}})"},
     {{2, 15}},
     {{5}, {5}}},
    {"gelu", {"gelu"}, {{2, 5}}, {}},
    {"silu", {"silu"}, {{2, 5}}, {}},
    {"relu", {"relu"}, {{2, 5}}, {}},
    {"sigmoid", {"sigmoid"}, {{2, 5}}, {}},
    {"qgelu", {"qgelu"}, {{2, 5}}, {}},
    {"srelu", {"srelu"}, {{2, 5}}, {}},
    {"erf_gelu", {"erf_gelu"}, {{2, 5}}, {}},
    {"mish", {"mish"}, {{2, 5}}, {}},
    {"softplus", {"softplus"}, {{2, 5}}, {}},
    {"hard_swish", {"hard_swish"}, {{2, 5}}, {}},
    {"leaky_relu", {"leaky_relu"}, {{2, 5}}, {}},
    {"swiglu", {"swiglu"}, {{2, 6}}, {}},
    {"geglu", {"geglu"}, {{2, 6}}, {}},
    {"glu", {"glu"}, {{2, 6}}, {}},
    {"qgeglu", {"qgeglu"}, {{2, 6}}, {}},
    {"reglu", {"reglu"}, {{2, 6}}, {}},
    {"sreglu", {"sreglu"}, {{2, 6}}, {}},
    {"erf_geglu", {"erf_geglu"}, {{2, 6}}, {}},
    {"swiglu_by_turns", {R"(swiglu {"options": {"glu_interleave_size": 2}})"}, {{2, 12}}, {}},
    {"situglu", {R"(situglu {"options": {"beta1": 0.5}})"}, {{2, 6}}, {}},
    {"clamped_swiglu", {R"(clamped_swiglu {"options": {"limit": 0.9}})"}, {{2, 6}}, {}},
    {"scaled_swiglu", {"scaled_swiglu"}, {{2, 6}, {2}}, {}},
    {"scaled_situglu", {"scaled_situglu"}, {{2, 6}, {2}}, {}},
    {"scaled_clamped_qgeglu",
     {R"(scaled_clamped_qgeglu {"options": {"limit": 0.9, "glu_interleave_size": 1}})"},
     {{2, 6}, {2}},
     {}},
    {"scaled_srelu", {"scaled_srelu"}, {{2, 5}, {2}}, {}},
    {"scaled_experts",
     {"basic_linear", "scaled_situglu", "basic_linear"},
     {{2, 3}, {2}},
     {{6, 3}, {4, 3}}},
    {"constant_scale", {R"(constant_scale {"options": {"factor": -1.5}})"}, {{2, 5}}, {}},
    {"dropout", {R"(dropout {"options": {"p": 0.4}})"}, {{4, 5}}, {}},
    {"reshape", {R"(reshape {"options": {"shape": [3, -1]}})"}, {{2, 6}}, {}},
    {"quantize_without_recipe", {"quantize"}, {{2, 6}}, {}},
    {"make_extra_output", {"make_extra_output"}, {{2, 3}}, {}},
    {"add_extra_input", {"add_extra_input"}, {{2, 3}, {2, 3}}, {}},
    {"residual", {kChannel, "gelu", kReader}, {{2, 3}}, {}},
    {"llama_block",
     {to_channel(), "rms_norm", "basic_linear", "swiglu", "basic_linear", kReader},
     {{2, 4}},
     {{4}, {6, 4}, {4, 3}}},
    {"bert_block",
     {kChannel, "layer_norm", "basic_linear", "bias", "gelu", "basic_linear", "bias", "dropout",
      kReader},
     {{2, 4}},
     {{4}, {4}, {6, 4}, {6}, {4, 6}, {4}}},
    {"reshapes_around_a_product",
     {R"(reshape {"options": {"shape": [-1, 3]}})", "basic_linear",
      R"(reshape {"options": {"shape": [2, -1]}})", "silu"},
     {{2, 6}},
     {{4, 3}}},
    {"shared_weight",
     {"basic_linear", "gelu", R"(basic_linear {"params": [0]})"},
     {{2, 3}},
     {{3, 3}}},
};

class OpGradient : public ::testing::TestWithParam<OpCase> {};
INSTANTIATE_TEST_SUITE_P(Ops, OpGradient, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(OpGradient, IsTheCentralDifference) {
  const OpCase& c = GetParam();
  Tensors tensors;
  uint64_t seed = 20;
  for (const auto* shapes : {&c.inputs, &c.params})
    for (const auto& shape : *shapes) tensors.push_back(leaf(shape, at::kDouble, ++seed));
  for (const char* fields : {"{}", R"({"fuse": false})"})
    EXPECT_TRUE(gradients_match(function_of(c.ops, c.inputs.size(), fields), tensors)) << fields;
}

TEST_P(OpGradient, OfKernelsIsThatOfTheReference) {
  const OpCase& c = GetParam();
  const auto tensors = [&](const auto& shapes, at::ScalarType dtype, uint64_t seed) {
    Tensors list;
    for (const auto& shape : shapes)
      list.push_back(random(shape, at::kBFloat16, ++seed).to(dtype).requires_grad_(true));
    return list;
  };
  const auto result = [&](at::ScalarType dtype, Path path) {
    return run(c.ops, tensors(c.inputs, dtype, 30), tensors(c.params, dtype, 60), "{}", path);
  };
  const RunResult wide = result(at::kDouble, Path::direct);
  for (const Path path : {Path::direct, Path::dispatch}) {
    const RunResult got = result(at::kFloat, path);
    for (size_t i = 0; i < wide.outputs.size(); ++i)
      EXPECT_TRUE(near(got.outputs[i], wide.outputs[i].to(at::kFloat)));
    ASSERT_EQ(got.gradients.size(), wide.gradients.size());
    for (size_t i = 0; i < wide.gradients.size(); ++i)
      EXPECT_TRUE(near(got.gradients[i], wide.gradients[i].to(at::kFloat))) << i;
  }
}

TEST_P(OpGradient, WithoutGradNothingIsSaved) {
  const OpCase& c = GetParam();
  Tensors inputs, params;
  for (const auto& shape : c.inputs) inputs.push_back(random(shape));
  for (const auto& shape : c.params) params.push_back(random(shape));
  EXPECT_EQ(run(c.ops, inputs, params).saved_bytes, 0);
}

TEST(OpValues, AreTorchs) {
  const at::Tensor x = random({3, 2, 8}), weight = random({8}, at::kFloat, 2),
                   bias = random({8}, at::kFloat, 3), matrix = random({6, 8}, at::kFloat, 4),
                   row = random({6}, at::kFloat, 5);
  const auto y = [&](const Ops& ops, const Tensors& params) {
    return run(ops, {x}, params).outputs[0];
  };
  EXPECT_TRUE(near(y({"rms_norm"}, {weight}), at::rms_norm(x, {8}, weight, 1e-5)));
  EXPECT_TRUE(near(y({"layer_norm"}, {weight, bias}), at::layer_norm(x, {8}, weight, bias)));
  EXPECT_TRUE(near(y({"gelu"}, {}), at::gelu(x, "tanh")));
  EXPECT_TRUE(near(y({"silu"}, {}), at::silu(x)));
  EXPECT_TRUE(near(y({"relu"}, {}), at::relu(x)));
  EXPECT_TRUE(near(y({"basic_linear", "bias"}, {matrix, row}), at::linear(x, matrix, row)));
  EXPECT_TRUE(near(y({"swiglu"}, {}), at::silu(x.narrow(-1, 0, 4)) * x.narrow(-1, 4, 4)));
  EXPECT_TRUE(near(y({"geglu"}, {}), at::gelu(x.narrow(-1, 0, 4), "tanh") * x.narrow(-1, 4, 4)));
  EXPECT_TRUE(same(y({R"(constant_scale {"options": {"factor": 0.5}})"}, {}), x * 0.5));
}

TEST(OpValues, EveryLayoutOfTheInput) {
  for (const Layout& layout : layouts())
    for (const auto dtype : kKernelDtypes) {
      const at::Tensor x = layout.make(dtype, 6, 16, 3);
      const Ops ops = {"rms_norm", "basic_linear", "bias", "swiglu"};
      const Tensors params{leaf({16}, dtype, 4), leaf({10, 16}, dtype, 5), leaf({10}, dtype, 6)};
      const auto strided = run(ops, {x}, params), dense = run(ops, {x.contiguous()}, params);
      EXPECT_TRUE(near(strided.outputs, dense.outputs)) << layout << dtype;
      EXPECT_TRUE(near(strided.gradients, dense.gradients)) << layout << dtype;
    }
}

}  // namespace
}  // namespace tandem::testing::ops_gradient
