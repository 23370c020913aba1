// The C++ front: ops as values, tandem::Sequential as a torch::nn::Module.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "core/call.h"
#include "planner/registry.h"
#include "support/modules.h"
#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/tandem.h"

namespace tandem::testing::front_sequential {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Sequential mlp() {
  return Sequential(
      {ops::rms_norm(8), ops::linear(8, 24, {.bias = false}), ops::swiglu(), ops::linear(12, 8)});
}

TEST(Sequential, ParametersAreNamedByPlaceInTheList) {
  EXPECT_THAT(names_of(*mlp()), ElementsAre("0.weight", "1.weight", "3.weight", "3.bias"));
  EXPECT_THAT(names_of(*Sequential({ops::gelu(), ops::layer_norm(4), ops::linear(4, 2)})),
              ElementsAre("1.weight", "1.bias", "2.weight", "2.bias"));
}

TEST(Sequential, KeepsTheStateOfDelayedScaling) {
  Sequential model({ops::linear(8, 4), ops::relu(), ops::quantize()});
  for (at::Tensor& param : model->parameters()) param.detach().fill_(0.5);  // relu passes all
  DelayedScaling recipe;
  recipe.amax_history_len = 3;
  const at::Tensor x = at::full({2, 8}, 7.0);
  for (int step = 0; step < 2; ++step) {
    at::Tensor y;
    {
      const Autocast region(true, recipe);
      y = model->forward(x);
    }
    y.sum().backward();
  }
  const auto buffers = model->named_buffers();
  EXPECT_EQ(buffers["0.recipe_state.forward.scale"][0].item<float>(), 64);
  EXPECT_EQ(buffers["0.recipe_state.forward.amax_history"].sizes(), (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(buffers["0.recipe_state.forward.amax_history"][1][0].item<float>(), 7);
  EXPECT_EQ(buffers["0.recipe_state.backward.amax_history"][2][0].item<float>(), 1);
  EXPECT_TRUE(buffers.contains("2.recipe_state.forward.scale"));
  recipe.amax_history_len = 2;
  const Autocast region(true, recipe);
  EXPECT_TRUE(verify(model, x).passed);
  EXPECT_EQ(model->named_buffers()["0.recipe_state.forward.amax_history"][1][0].item<float>(), 7);
}

TEST(Sequential, KeepsTheStateOfEachGroup) {
  Sequential model({ops::grouped_linear(8, 4, {.num_groups = 3})});
  DelayedScaling recipe;
  recipe.amax_history_len = 3;
  const at::Tensor x = at::full({5, 8}, 7.0), splits = at::tensor({2, 0, 3}, at::kLong);
  for (int step = 0; step < 2; ++step) {
    at::Tensor y;
    {
      const Autocast region(true, recipe);
      y = model->forward(x, {splits})[0];
    }
    y.sum().backward();
  }
  const auto buffers = model->named_buffers();
  const at::Tensor scales = buffers["0.recipe_state.forward.scale"];
  EXPECT_EQ(scales.sizes(), (std::vector<int64_t>{6}));
  EXPECT_EQ(scales[0].item<float>(), 64);
  EXPECT_EQ(scales[2].item<float>(), 1) << "the group has no rows";
  EXPECT_NE(scales[3].item<float>(), 1) << "its weight is quantized all the same";
  EXPECT_EQ(buffers["0.recipe_state.backward.amax_history"].sizes(), (std::vector<int64_t>{3, 3}));
}

TEST(Sequential, ParametersStartAsTorchsDo) {
  Sequential model({ops::linear(16, 64), ops::rms_norm(64),
                    ops::rms_norm(64, {.zero_centered_gamma = true}), ops::layer_norm(64)});
  const auto parameters = model->named_parameters();
  EXPECT_EQ(parameters["0.weight"].sizes(), (std::vector<int64_t>{64, 16}));
  EXPECT_LE(parameters["0.weight"].abs().max().item<float>(), 0.25f);
  EXPECT_GT(parameters["0.weight"].abs().max().item<float>(), 0.2f);
  EXPECT_EQ(parameters["0.bias"].abs().max().item<float>(), 0);
  EXPECT_EQ(parameters["1.weight"].min().item<float>(), 1);
  EXPECT_EQ(parameters["2.weight"].abs().max().item<float>(), 0) << "zero-centered gamma is 1 + w";
  EXPECT_EQ(parameters["3.bias"].abs().max().item<float>(), 0);
  EXPECT_TRUE(parameters["0.weight"].requires_grad());
}

TEST(Sequential, OptionsOfTheTensors) {
  Sequential model({ops::linear(4, 4)}, at::TensorOptions().dtype(at::kBFloat16));
  for (const at::Tensor& parameter : model->parameters())
    EXPECT_EQ(parameter.scalar_type(), at::kBFloat16);
  EXPECT_EQ(model->forward(random({2, 4}, at::kBFloat16)).scalar_type(), at::kBFloat16);
}

TEST(Sequential, ForwardIsWhatTheOpsSay) {
  Sequential model = mlp();
  const auto p = model->named_parameters();
  const at::Tensor x = random({5, 8});
  const at::Tensor up =
      at::linear(at::rms_norm(x, {8}, p["0.weight"], 1e-5), p["1.weight"]).detach();
  const at::Tensor expected = at::linear(at::silu(up.narrow(-1, 0, 12)) * up.narrow(-1, 12, 12),
                                         p["3.weight"], p["3.bias"]);
  EXPECT_TRUE(near(model->forward(x).detach(), expected.detach()));
}

TEST(Sequential, TrainsAndEvaluates) {
  Sequential model({ops::dropout({.p = 0.5})});
  const at::Tensor x = random({10, 10});
  EXPECT_FALSE(same(model->forward(x), x));
  model->eval();
  EXPECT_TRUE(same(model->forward(x), x));
}

TEST(Sequential, GradientsReachTheParameters) {
  Sequential model = mlp();
  model->forward(random({5, 8})).sum().backward();
  for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.grad().defined());
  EXPECT_EQ(model->saved_bytes(), 5 * 24 * 4 + 5 * 4) << "the product and the norm's statistic";
}

TEST(Sequential, EveryOpRuns) {
  const at::Tensor x = random({4, 8});
  const std::vector<std::pair<Op, std::vector<int64_t>>> cases = {
      {ops::linear(8, 6), {4, 6}},
      {ops::rms_norm(8), {4, 8}},
      {ops::rms_norm({4, 8}), {4, 8}},
      {ops::layer_norm({4, 8}, {.eps = 1e-6}), {4, 8}},
      {ops::l2_normalization({.eps = 1e-3}), {4, 8}},
      {ops::layer_norm(8, {.eps = 1e-6, .zero_centered_gamma = true}), {4, 8}},
      {ops::swiglu(), {4, 4}},
      {ops::swiglu({.glu_interleave_size = 2}), {4, 4}},
      {ops::geglu(), {4, 4}},
      {ops::glu(), {4, 4}},
      {ops::situglu({.beta1 = 2}), {4, 4}},
      {ops::clamped_swiglu({.limit = 1, .glu_interleave_size = 4}), {4, 4}},
      {ops::gelu(), {4, 8}},
      {ops::silu(), {4, 8}},
      {ops::relu(), {4, 8}},
      {ops::identity(), {4, 8}},
      {ops::dropout(), {4, 8}},
      {ops::constant_scale(0.5), {4, 8}},
      {ops::reshape({2, -1}), {2, 16}},
      {ops::quantize(), {4, 8}},
      {ops::rotary({.num_heads = 2, .head_dim = 2, .num_kv_heads = 1}), {4, 8}},
      {ops::attention({.num_heads = 2, .head_dim = 2, .num_kv_heads = 1}), {4, 4}},
      {ops::qk_norm(2, {.num_heads = 2, .num_kv_heads = 1}), {4, 8}},
  };
  for (const auto& [op, shape] : cases) {
    Sequential model(std::vector<Op>{op});
    EXPECT_EQ(model->forward(x).sizes(), shape) << op.name;
    const Autocast region;
    EXPECT_EQ(model->forward(x).sizes(), shape) << op.name;
  }
}

TEST(Sequential, AChannelOfNoUtf8IsRefused) {
  const auto expect = [](const std::string& op, auto make) {
    EXPECT_THAT(make, ThrowsText<c10::ValueError>(op + ": expected a channel named in UTF-8, got"));
  };
  expect("make_extra_output", [] { Sequential({ops::make_extra_output({"\xff"})}); });
  expect("add_extra_input", [] { Sequential({ops::add_extra_input({.channel = "a\xff"})}); });
}

TEST(Sequential, ADecoderLayersAttention) {
  const ops::RotaryOptions turned{.num_heads = 4, .head_dim = 6, .num_kv_heads = 2};
  const ops::AttentionOptions attended{
      .num_heads = 4, .head_dim = 6, .num_kv_heads = 2, .causal = true, .mask = true};
  Sequential model({ops::qk_norm(6, {.num_heads = 4, .num_kv_heads = 2}), ops::rotary(turned),
                    ops::attention(attended)});
  const at::Tensor x = random({2, 5, 48}).requires_grad_(), mask = at::ones({5, 5}, at::kBool);
  const auto by_head = [&](const at::Tensor& t) { return t.unflatten(-1, {-1, 6}); };
  const at::Tensor angles = RotaryPositionEmbedding(6)->forward(5);
  std::vector<at::Tensor> parts = by_head(x).split_with_sizes({4, 2, 2}, -2);
  for (at::Tensor* const part : {&parts[0], &parts[1]})
    *part = apply_rotary_pos_emb(at::rms_norm(*part, {6}, {}, 1e-5), angles, QkvFormat::bshd);
  for (at::Tensor& part : parts) part = part.transpose(1, 2);
  const at::Tensor expected =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true,
                                       std::nullopt, /*enable_gqa=*/true)
          .transpose(1, 2)
          .flatten(-2);
  const at::Tensor y = model->forward(x, {mask})[0], grad = random({2, 5, 24}, at::kFloat, 3);
  EXPECT_TRUE(near(y.detach(), expected.detach()));
  EXPECT_TRUE(near(torch::autograd::grad({y}, {x}, {grad})[0],
                   torch::autograd::grad({expected}, {x}, {grad})[0]));
}

TEST(Sequential, LossesOfLogitsAndOfAHead) {
  const at::Tensor x = random({2, 5, 8}).requires_grad_(),
                   targets = at::arange(10, at::kLong).remainder(6).view({2, 5});
  const ops::LinearCrossEntropyOptions options{.class_weight = true, .label_smoothing = 0.1};
  Sequential of_head({ops::linear_cross_entropy(8, 6, options)}),
      of_logits({ops::linear(8, 6, {.bias = false}), ops::cross_entropy(6, options)});
  const at::Tensor weight = of_head->parameters()[0];
  of_logits->parameters()[0].detach().copy_(weight.detach());
  const at::Tensor logits = at::linear(x, weight).flatten(0, 1);
  const at::Tensor expected = at::cross_entropy_loss(
      logits, targets.flatten(), {}, at::Reduction::Mean, -100, options.label_smoothing);
  for (Sequential& model : {std::ref(of_head), std::ref(of_logits)}) {
    const at::Tensor loss = model->forward(x, {targets})[0];
    EXPECT_TRUE(near(loss.detach(), expected.detach()));
    EXPECT_TRUE(near(torch::autograd::grad({loss}, {x})[0],
                     torch::autograd::grad({expected}, {x}, {}, /*retain_graph=*/true)[0]));
  }
}

TEST(Sequential, ChannelsAndExtraTensors) {
  Sequential residual(
      {ops::make_extra_output({"r", false}), ops::gelu(), ops::add_extra_input({.channel = "r"})});
  const at::Tensor x = random({2, 4}), extra = random({2, 4}, at::kFloat, 2);
  Sequential gelu({ops::gelu()});
  EXPECT_TRUE(near(residual->forward(x), gelu->forward(x) + x));
  Sequential open({ops::make_extra_output(), ops::add_extra_input()});
  const auto outputs = open->forward(x, {extra});
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_TRUE(same(outputs[0], x + extra));
  EXPECT_TRUE(same(outputs[1], x));
  Sequential in_place({ops::add_extra_input({.in_place = true})});
  EXPECT_TRUE(in_place->forward(x, {extra})[0].is_same(extra));
}

TEST(Sequential, AReplacedParameterTakesEffect) {
  Sequential model({ops::linear(4, 4, {.bias = false})});
  const at::Tensor x = random({2, 4}), before = model->forward(x).detach().clone();
  {
    const c10::AutoGradMode no_grad(false);
    model->parameters()[0].mul_(2);
  }
  EXPECT_TRUE(near(model->forward(x).detach(), before * 2));
}

TEST(SequentialErrors, OneOutputIsExpected) {
  Sequential model({ops::make_extra_output()});
  EXPECT_ERROR(model->forward(random({2})), c10::ValueError,
               "Sequential: expected one output, got 2", "Call forward(x, extra_inputs)");
}

TEST(SequentialErrors, ExtraInputsAreMissing) {
  Sequential model({ops::add_extra_input()});
  EXPECT_ERROR(model->forward(random({2})), c10::ValueError,
               "pipeline: expected 2 inputs and 0 parameters, got 1");
}

TEST(SequentialErrors, SizesAreChecked) {
  EXPECT_ERROR(ops::linear(0, 4), c10::ValueError, "linear: expected in_features > 0, got 0",
               "Give a number of features.");
  EXPECT_ERROR(ops::linear(4, -1), c10::ValueError, "linear: expected out_features > 0, got -1");
  EXPECT_ERROR(ops::rms_norm(0), c10::ValueError, "rms_norm: expected size hidden > 0");
  EXPECT_ERROR(ops::layer_norm(0), c10::ValueError, "layer_norm: expected size hidden > 0");
}

TEST(SequentialErrors, ChannelsAreCheckedWhereItIsMade) {
  EXPECT_ERROR(Sequential({ops::add_extra_input({.channel = "nowhere"})}), c10::ValueError,
               "channel \"nowhere\"", "no producer");
}

TEST(SequentialErrors, OptionsAreCheckedWhereTheOpIsMade) {
  EXPECT_ERROR(ops::cross_entropy(6, {.bias = true}), c10::ValueError,
               "cross_entropy: expected bias to be false, as x holds the logits, got true. Use "
               "linear_cross_entropy, or add the bias before.");
  EXPECT_ERROR(ops::dropout({.p = 2}), c10::ValueError,
               "dropout: expected option p to be a number from 0 to 1, got 2");
  EXPECT_ERROR(ops::op("gelu", {}, {{"tanh", true}}), c10::ValueError,
               "gelu: expected one of [], got \"tanh\". Remove it.");
  EXPECT_ERROR(ops::op("gelu", {{"hidden", 3}}), c10::ValueError,
               "gelu: expected the sizes [], got one called \"hidden\"");
  EXPECT_ERROR(ops::op("rms_norm"), c10::ValueError,
               "rms_norm: expected the sizes [hidden], got no hidden. Give the size of the last "
               "dimension of x.");
  EXPECT_ERROR(ops::op("grouped_linear", {{"in_features", 2}, {"out_features", 2}}),
               c10::NotImplementedError,
               "grouped_linear: expected an op whose parameters are single tensors, got the list "
               "weight[]. Use its own function, or fill in a tandem::BasicOp and its parameters.");
}

/// Every op whose parameters and inputs the front can make runs in a pipeline: one that is added is
/// tested here without a word.
TEST(Front, EveryRegisteredOpRunsAndDifferentiates) {
  size_t count = 0;
  for (const std::string& name : op_names()) {
    const OpDef& def = op_def(name);
    const auto options = def.signature.options();
    if (name.starts_with("test_") || def.inputs.size() > 1 || name == "reshape" ||
        std::ranges::any_of(options, [](const OptionDef& o) { return o.check.is_required; }))
      continue;
    std::vector<std::pair<std::string, int64_t>> sizes;
    for (const SizeDef& size : def.sizes) sizes.emplace_back(size.name, 8);
    Sequential model({ops::op(name, sizes)});
    const at::Tensor x = leaf({5, 8});
    const auto outputs = model->forward(x, {});
    outputs[0].sum().backward();
    EXPECT_TRUE(x.grad().defined()) << name;
    const VerifyReport report = verify(model, x);
    EXPECT_TRUE(report.passed) << name << ": " << report.text;
    ++count;
  }
  EXPECT_GE(count, 14u);
}

TEST(Sequential, ExplainsInFourFormats) {
  Sequential model = mlp();
  EXPECT_ERROR(model->explain(), c10::ValueError, "explain: expected");
  model->forward(random({5, 8}));
  EXPECT_THAT(model->explain(), HasSubstr("plan: training, with gradients"));
  EXPECT_THAT(model->explain(ExplainFormat::svg), ::testing::StartsWith("<svg"));
  EXPECT_THAT(model->explain(ExplainFormat::html), ::testing::StartsWith("<div>"));
  EXPECT_THAT(model->explain(ExplainFormat::json), ::testing::StartsWith("{"));
}

TEST(Sequential, Verifies) {
  Sequential model = mlp();
  const at::Tensor x = leaf({5, 8});
  EXPECT_TRUE(verify(model, x).passed);
  Sequential open({ops::linear(8, 8), ops::add_extra_input()});
  EXPECT_TRUE(verify(open, x, {random({5, 8})}).passed);
}

TEST(Sequential, VerifyAsksForTheGradientOfAPlainInput) {
  const FusionHandle handle =
      register_fusion({.name = "test_wrong_grad_x",
                       .pass = Pass::backward,
                       .pattern = {"gelu.backward"},
                       .run = {.reads = {{0, "grad_y"}, {0, "x"}},
                               .writes = {{0, "grad_x"}, {0, "y"}},
                               .run = [](Call& call) { call.out(0, call.in(0) * 2); }}});
  Sequential model({ops::gelu()});
  EXPECT_FALSE(verify(model, random({3, 4})).passed);
}

TEST(Sequential, VerifyNamesAWrongFusion) {
  const FusionHandle handle = register_fusion(
      {.name = "test_wrong_linear",
       .pattern = {"basic_linear", "bias"},
       .run = {.reads = {{0, "x"}, {0, "weight"}}, .writes = {{1, "y"}}, .run = [](Call& call) {
                 call.out(0, call.in(0).matmul(call.in(1).t()) + 1);
               }}});
  Sequential model({ops::linear(8, 8)});
  const VerifyReport report = verify(model, leaf({5, 8}));
  EXPECT_FALSE(report.passed);
  EXPECT_THAT(report.text, HasSubstr("fusion \"test_wrong_linear\""))
      << "also where the model has not run yet";
}

TEST(Front, KnowsItsInstructionSets) { EXPECT_FALSE(cpu_targets().empty()); }

}  // namespace
}  // namespace tandem::testing::front_sequential
