// Ops as values: typed options, parameters that are shared, gradients that are accumulated.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <limits>

#include "core/call.h"
#include "core/op_def.h"
#include "support/modules.h"
#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/tandem.h"

namespace tandem::testing::front_ops {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> basics_of(const Op& op) {
  std::vector<std::string> names;
  for (const BasicOp& basic : op.basic_ops) names.push_back(basic.name);
  return names;
}

at::Tensor weight_of(const Sequential& model, const std::string& name) {
  return model->named_parameters()[name];
}

struct ThresholdOptions {
  double threshold = 0;
  bool keeps = false;
};
struct OtherOptions {
  double threshold = 0;
};

void threshold(Call& call) {
  const auto& options = call.options<ThresholdOptions>();
  call.out(0, at::relu(call.in(0) - options.threshold) + (options.keeps ? options.threshold : 0.0));
}

const OpDef kThreshold{
    .name = "test_threshold",
    .formula = "y = max(x - threshold, 0)",
    .signature = {ThresholdOptions{},
                  {{"threshold", &ThresholdOptions::threshold, at_least(0), "what x has to exceed"},
                   {"keeps", &ThresholdOptions::keeps, "it is added again"}}},
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = threshold}},
};
TANDEM_REGISTER_OP(kThreshold);

TEST(Ops, OptionsOfAUsersOpAreItsStruct) {
  const at::Tensor x = random({2, 4});
  Sequential model({ops::op("test_threshold", {}, ThresholdOptions{.threshold = 0.5})});
  EXPECT_TRUE(same(model->forward(x), at::relu(x - 0.5)));
  Sequential keeps({ops::op("test_threshold", {}, ThresholdOptions{0.5, true})});
  EXPECT_TRUE(same(keeps->forward(x), at::relu(x - 0.5) + 0.5));
}

TEST(OpsErrors, OptionsAreCheckedWhereTheOpIsMade) {
  EXPECT_ERROR(ops::op("test_threshold", {}, ThresholdOptions{-1}), c10::ValueError,
               "test_threshold: expected option threshold to be a finite number >= 0, got -1");
  EXPECT_ERROR(ops::op("test_threshold", {}, OtherOptions{}), c10::TypeError,
               "test_threshold: expected options as ", "ThresholdOptions, got ",
               "OtherOptions. Give the struct that its signature is made of.");
  EXPECT_ERROR(ops::op("identity", {}, OtherOptions{}), c10::TypeError,
               "identity: expected no options, got ");
}

TEST(OpsErrors, OptionsThatCannotBeWritten) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_ERROR(ops::constant_scale(nan), c10::ValueError,
               "constant_scale: expected option factor to be a finite number, got nan. factor: ");
  EXPECT_ERROR(ops::op("dropout", {}, {{"p", 0.1}, {"p", 0.2}}), c10::ValueError,
               "dropout: expected option p once, got it twice. Leave one out.");
  EXPECT_ERROR(ops::op("all_reduce", {}, {{"group", std::string("\xff")}, {"size", int64_t{2}}}),
               c10::ValueError,
               "all_reduce: expected option group to be a text of at most 1024 bytes in UTF-8, "
               "got ");
}

TEST(OpsErrors, NormsHaveAShape) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {4, 0}})
    EXPECT_ERROR(ops::layer_norm(shape), c10::ValueError,
                 "layer_norm: expected normalized_shape with sizes > 0, got [",
                 "]. Give the sizes of the last dimensions of x.");
}

TEST(OpsErrors, RmsNormAloneRoundsBeforeItsWeight) {
  const auto refusal = ThrowsText<c10::ValueError>(
      "layer_norm: expected rounds_before_weight to be false, as rms_norm alone has it, got true. "
      "Leave it out.");
  EXPECT_THAT([] { ops::layer_norm(4, {.rounds_before_weight = true}); }, refusal);
  EXPECT_THAT([] { ops::layer_norm({2, 4}, {.rounds_before_weight = true}); }, refusal);
}

TEST(OpsErrors, AParameterWithoutFirstValues) {
  Op norm = ops::rms_norm(4);
  norm.parameters[0].init = nullptr;
  EXPECT_ERROR(Sequential({norm}), c10::ValueError,
               "rms_norm: expected a function that gives weight its first values, got none. Use "
               "tandem::init::zeros() or another.");
}

TEST(Ops, AUnitTimesANumberPerRowIsTheUnitTimesIt) {
  const at::Tensor x = random({3, 8}), scales = random({3}, at::kFloat, 2);
  const std::vector<std::pair<Op, Op>> pairs = {
      {ops::scaled_swiglu({.glu_interleave_size = 2}), ops::swiglu({.glu_interleave_size = 2})},
      {ops::scaled_situglu({.beta1 = 3}), ops::situglu({.beta1 = 3})},
      {ops::scaled_clamped_qgeglu({.limit = 0.5}), ops::clamped_swiglu({.limit = 0.5})},
      {ops::scaled_srelu(), ops::srelu()}};
  for (const auto& [scaled, unit] : pairs) {
    Sequential model({scaled}), plain({unit});
    EXPECT_TRUE(near(model->forward(x, {scales})[0], plain->forward(x) * scales.unsqueeze(-1)))
        << scaled.name;
  }
}

TEST(OpsErrors, BetasAreAboveZero) {
  EXPECT_ERROR(Sequential({ops::situglu({.beta1 = 0})}), c10::ValueError,
               "situglu: expected option beta1 to be a finite number > 0, got 0. beta1: above 0");
}

TEST(Ops, OpsThatAreGivenOneTensorShareIt) {
  const at::Tensor weight = leaf({8, 8}), x = leaf({3, 8}, at::kFloat, 2);
  const Op shared = ops::linear(8, 8, {.bias = false}).with_parameter("weight", weight);
  Sequential model({shared, ops::relu(), shared});
  EXPECT_TRUE(model->parameters().empty()) << "it stays with whoever has registered it";
  model->forward(x).sum().backward();
  const at::Tensor got = weight.grad().clone(), got_x = x.grad().clone();
  weight.mutable_grad() = x.mutable_grad() = at::Tensor();
  at::linear(at::relu(at::linear(x, weight)), weight).sum().backward();
  EXPECT_TRUE(near(got, weight.grad()));
  EXPECT_TRUE(near(got_x, x.grad()));
  EXPECT_TRUE(verify(model, x).passed);
}

TEST(Ops, OneTensorMayBeTwoParametersOfAnOp) {
  const at::Tensor both = leaf({8}), x = random({3, 8});
  Sequential model(
      {ops::layer_norm(8).with_parameter("weight", both).with_parameter("bias", both)});
  model->forward(x).sum().backward();
  const at::Tensor got = both.grad().clone();
  both.mutable_grad() = at::Tensor();
  at::layer_norm(x, {8}, both, both).sum().backward();
  EXPECT_TRUE(near(got, both.grad(), 10));
}

TEST(Ops, APipelineReadsTheParameterOfAnother) {
  Sequential embedding({ops::linear(4, 6, {.bias = false})});
  const at::Tensor weight = weight_of(embedding, "0.weight");
  Sequential head({ops::rms_norm(4), ops::linear(4, 6).with_parameter("weight", weight)});
  EXPECT_THAT(names_of(*head), ElementsAre("0.weight", "1.bias"));
  const at::Tensor x = random({2, 4});
  {
    const c10::AutoGradMode no_grad(false);
    weight.fill_(1);
  }
  const at::Tensor bias = weight_of(head, "1.bias");
  Sequential norm({ops::rms_norm(4)});
  EXPECT_TRUE(near(head->forward(x).detach(), at::linear(norm->forward(x), weight, bias).detach()));
  embedding->to(at::kDouble);
  head->to(at::kDouble);
  EXPECT_EQ(head->forward(x.to(at::kDouble)).scalar_type(), at::kDouble);
}

TEST(OpsErrors, ASharedParameterFitsTheOp) {
  const Op op = ops::linear(8, 4);
  EXPECT_ERROR(op.with_parameter("weigth", leaf({4, 8})), c10::ValueError,
               "linear: expected one of the parameters [weight, bias], got \"weigth\"");
  EXPECT_ERROR(op.with_parameter("weight", leaf({8, 4})), c10::ValueError,
               "linear: expected weight of shape [4, 8], got [8, 4]",
               ". Give one that fits the op.");
  EXPECT_ERROR(op.with_parameter("weight", at::Tensor()), c10::ValueError,
               "linear: expected weight of shape [4, 8]",
               ", got an undefined tensor. Make it first.");
  EXPECT_ERROR(op.with_parameter("weight", leaf({4, 8}) * 2), c10::ValueError,
               "linear: expected weight as a leaf, got a result of other tensors. Give the "
               "parameter that it is made of.");
}

TEST(Ops, AGradientGoesIntoMainGrad) {
  const at::Tensor main_grad = at::zeros({4, 8}), x = random({3, 8});
  Sequential model({ops::linear(8, 4).with_main_grad("weight", main_grad)});
  for (int step = 0; step < 2; ++step) model->forward(x).sum().backward();
  EXPECT_FALSE(weight_of(model, "0.weight").grad().defined());
  EXPECT_TRUE(weight_of(model, "0.bias").grad().defined());
  EXPECT_TRUE(near(main_grad, at::linear(at::ones({4, 3}), x.t()) * 2));
}

TEST(Ops, VerifyReturnsGradientsAndWritesNoMainGrad) {
  const at::Tensor main_grad = at::zeros({4, 8});
  Sequential model({ops::linear(8, 4).with_main_grad("weight", main_grad), ops::gelu()});
  const VerifyReport report = verify(model, random({3, 8}));
  EXPECT_TRUE(report.passed) << report.text;
  EXPECT_EQ(main_grad.abs().max().item<float>(), 0);
}

TEST(OpsErrors, MainGradFitsTheOp) {
  const Op op = ops::linear(8, 4);
  EXPECT_ERROR(op.with_main_grad("weight", at::zeros({8, 4})), c10::ValueError,
               "linear: expected main_grad of shape [4, 8], got [8, 4]");
  EXPECT_ERROR(
      op.with_main_grad("bias", at::zeros({4})), c10::ValueError,
      "linear: expected the weight of a product, got bias. The gradients of others are returned.");
  EXPECT_ERROR(op.with_main_grad("weight", leaf({4, 8})), c10::ValueError,
               "linear: expected main_grad without requires_grad, got one with it");
  EXPECT_ERROR(ops::grouped_linear(4, 5, {.num_groups = 2}).with_main_grad("bias0", at::zeros({5})),
               c10::ValueError, "grouped_linear: expected the weight of a product, got bias0");
}

TEST(Ops, ALinearOfSeveralNamedWeights) {
  const at::Tensor x = leaf({5, 8});
  Sequential model({ops::linear(8, 12, {.parameters_split = {{"gate", 8}, {"up", 4}}}),
                    ops::constant_scale(2.0)});
  EXPECT_THAT(names_of(*model),
              ElementsAre("0.gate_weight", "0.up_weight", "0.gate_bias", "0.up_bias"));
  const auto p = model->named_parameters();
  EXPECT_EQ(p["0.up_weight"].storage_offset(), 64) << "in the memory of the other";
  EXPECT_TRUE(p["0.up_weight"].is_alias_of(p["0.gate_weight"]));
  const at::Tensor weight = at::cat({p["0.gate_weight"], p["0.up_weight"]});
  const at::Tensor y = model->forward(x);
  const at::Tensor bias = at::cat({p["0.gate_bias"], p["0.up_bias"]});
  const at::Tensor expected = 2 * at::linear(x, weight, bias);
  EXPECT_TRUE(near(y.detach(), expected.detach()));
  y.sum().backward();
  const at::Tensor grad = x.detach().sum(0).expand({4, 8}) * 2;
  EXPECT_TRUE(near(p["0.up_weight"].grad(), grad));
  EXPECT_EQ(p["0.gate_bias"].grad().sizes(), (std::vector<int64_t>{8}));

  const Op ranks = ops::linear(8, 12,
                               {.tensor_parallel = {TensorParallel::Mode::column, "0", 2},
                                .parameters_split = {{"gate", 8}, {"up", 4}}});
  EXPECT_EQ(ranks.parameters[1].shape, (std::vector<int64_t>{2, 8}));
  EXPECT_THAT(ranks.basic_ops[1].joins, ElementsAre(2));
}

TEST(OpsErrors, PartsOfALinear) {
  const auto make = [](const std::vector<std::pair<std::string, int64_t>>& split) {
    ops::linear(8, 12, {.parameters_split = split});
  };
  EXPECT_ERROR(make({{"a", 8}, {"b", 3}}), c10::ValueError,
               "linear: expected parameters_split to sum up to out_features, 12, got 11. Give the "
               "features of each.");
  for (const char* name : {"", "a.b", "a"})
    EXPECT_ERROR(make({{"a", 8}, {name, 4}}), c10::ValueError,
                 "linear: expected names in parameters_split that differ and have no dot, got");
  EXPECT_ERROR(make({{"a", 12}, {"b", 0}}), c10::ValueError,
               "expected features in parameters_split > 0, got 0");
  const Op split = ops::linear(8, 12, {.parameters_split = {{"a", 8}, {"b", 4}}});
  EXPECT_ERROR(
      Sequential({split.with_main_grad("a_weight", at::zeros({8, 8}))}), c10::ValueError,
      "0.basic_linear: expected no main_grad of a parameter that is several tensors, got one.");
}

TEST(Ops, GroupedLinearScalesItsBiases) {
  const at::Tensor x = leaf({7, 4}), splits = at::tensor({3, 4}, at::kLong), scales = leaf({7});
  Sequential model({ops::grouped_linear(4, 5, {.num_groups = 2, .scale_bias = true})});
  auto p = model->named_parameters();
  {
    const c10::AutoGradMode no_grad(false);
    for (const char* bias : {"0.bias0", "0.bias1"}) p[bias].copy_(random({5}));
  }
  const at::Tensor y = model->forward(x, {splits, scales})[0];
  const auto part = [&](int64_t first, int64_t rows, const char* weight, const char* bias) {
    return at::linear(x.narrow(0, first, rows), p[weight]) +
           scales.narrow(0, first, rows).unsqueeze(1) * p[bias];
  };
  const at::Tensor expected =
      at::cat({part(0, 3, "0.weight0", "0.bias0"), part(3, 4, "0.weight1", "0.bias1")});
  EXPECT_TRUE(near(y.detach(), expected.detach()));
  y.square().sum().backward();
  const c10::AutoGradMode no_grad(false);
  const at::Tensor grad = 2 * expected.detach(), first = grad.narrow(0, 0, 3),
                   second = grad.narrow(0, 3, 4);
  EXPECT_TRUE(
      near(scales.grad(), at::cat({at::mv(first, p["0.bias0"]), at::mv(second, p["0.bias1"])})));
  EXPECT_TRUE(near(p["0.bias1"].grad(), at::mv(second.t(), scales.narrow(0, 3, 4))));
}

TEST(Ops, LinearOverRanks) {
  using Mode = TensorParallel::Mode;
  const auto made = [](Mode mode, bool sequence_parallel) {
    return ops::linear(8, 12, {.tensor_parallel = {mode, "0", 2, sequence_parallel}});
  };
  EXPECT_THAT(basics_of(made(Mode::column, false)),
              ElementsAre("reduce_gradient", "basic_linear", "bias"));
  EXPECT_THAT(basics_of(made(Mode::column, true)),
              ElementsAre("all_gather", "basic_linear", "bias"));
  EXPECT_THAT(basics_of(made(Mode::row, false)), ElementsAre("basic_linear", "bias", "all_reduce"));
  EXPECT_THAT(basics_of(made(Mode::row, true)),
              ElementsAre("basic_linear", "bias", "reduce_scatter"));
  EXPECT_EQ(made(Mode::column, false).parameters[0].shape, (std::vector<int64_t>{6, 8}));
  EXPECT_EQ(made(Mode::row, false).parameters[0].shape, (std::vector<int64_t>{12, 4}));
  EXPECT_EQ(made(Mode::row, false).parameters[1].shape, (std::vector<int64_t>{12}));
  EXPECT_THAT(basics_of(ops::linear(8, 12, {.tensor_parallel = {Mode::row, "0", 1, true}})),
              ElementsAre("basic_linear", "bias"));
}

TEST(OpsErrors, RanksShareEvenly) {
  using Mode = TensorParallel::Mode;
  const auto make = [](int64_t out, const TensorParallel& parallel) {
    ops::linear(8, out, {.tensor_parallel = parallel});
  };
  EXPECT_ERROR(
      make(7, {Mode::column, "0", 2}), c10::ValueError,
      "linear: expected out_features that 2 ranks share evenly, got 7. Use a multiple of 2.");
  EXPECT_ERROR(make(8, {Mode::column, "", 2}), c10::ValueError,
               "linear: expected the name of a process group in tensor_parallel, got none");
  EXPECT_ERROR(make(8, {Mode::column, "0", 0}), c10::ValueError,
               "linear: expected the ranks of process group 0 in tensor_parallel.size, got 0");
}

TEST(OpsErrors, APlaceOfAParameterIsOne) {
  Op op = ops::linear(4, 4);
  op.basic_ops[1].parameters = {2};
  EXPECT_ERROR(Sequential({op}), c10::ValueError,
               "bias: expected the place of one of 2 parameters of linear, got 2");
}

}  // namespace
}  // namespace tandem::testing::front_ops
