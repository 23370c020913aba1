// LayerNormLinear and LayerNormMLP in C++: names, numbers, results, state, checkpoints.
#include "support/modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>

#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/tandem.h"

namespace tandem::testing::front_modules {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 8, kWide = 12, kRows = 5;

TEST(LayerNormLinear, HasTheNamesOfTransformerEngine) {
  EXPECT_THAT(names_of(*LayerNormLinear(kHidden, kWide)),
              ElementsAre("layer_norm_weight", "layer_norm_bias", "weight", "bias"));
  EXPECT_THAT(names_of(*LayerNormLinear(kHidden, kWide,
                                        {.normalization = Normalization::rms_norm, .bias = false})),
              ElementsAre("layer_norm_weight", "weight"));
  const auto p = LayerNormLinear(kHidden, kWide)->named_parameters();
  EXPECT_EQ(p["weight"].sizes(), (std::vector<int64_t>{kWide, kHidden}));
  EXPECT_EQ(p["bias"].sizes(), (std::vector<int64_t>{kWide}));
}

TEST(LayerNormMLP, HasTheNamesOfTransformerEngine) {
  EXPECT_THAT(names_of(*LayerNormMLP(kHidden, kWide)),
              ElementsAre("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias",
                          "fc2_weight", "fc2_bias"));
  const auto p = LayerNormMLP(kHidden, kWide, {.activation = "swiglu"})->named_parameters();
  EXPECT_EQ(p["fc1_weight"].sizes(), (std::vector<int64_t>{2 * kWide, kHidden}));
  EXPECT_EQ(p["fc2_weight"].sizes(), (std::vector<int64_t>{kHidden, kWide}));
}

TEST(LayerNormLinear, IsANormAndAProduct) {
  const at::Tensor x = random({kRows, kHidden});
  LayerNormLinear layer = randomized(LayerNormLinear(kHidden, kWide, {.eps = 1e-3}));
  const auto p = layer->named_parameters();
  const at::Tensor norm =
      at::layer_norm(x, {kHidden}, p["layer_norm_weight"], p["layer_norm_bias"], 1e-3);
  EXPECT_TRUE(near(layer->forward(x).detach(), at::linear(norm, p["weight"], p["bias"]).detach()));
  LayerNormLinear rms = randomized(LayerNormLinear(
      kHidden, kWide, {.normalization = Normalization::rms_norm, .zero_centered_gamma = true}));
  const auto q = rms->named_parameters();
  const at::Tensor scaled = at::rms_norm(x, {kHidden}, q["layer_norm_weight"] + 1, 1e-5);
  EXPECT_TRUE(near(rms->forward(x).detach(), at::linear(scaled, q["weight"], q["bias"]).detach()));
}

TEST(LayerNormMLP, IsTwoProductsAndAnActivation) {
  const at::Tensor x = random({kRows, kHidden});
  const auto expected = [&](const LayerNormMLP& mlp, auto&& activation) {
    const auto p = mlp->named_parameters();
    const at::Tensor norm =
        at::layer_norm(x, {kHidden}, p["layer_norm_weight"], p["layer_norm_bias"]);
    const at::Tensor wide = activation(at::linear(norm, p["fc1_weight"], p["fc1_bias"]));
    return at::linear(wide, p["fc2_weight"], p["fc2_bias"]).detach();
  };
  LayerNormMLP gelu = randomized(LayerNormMLP(kHidden, kWide));
  const at::Tensor y = expected(gelu, [](const at::Tensor& t) { return at::gelu(t, "tanh"); });
  EXPECT_TRUE(near(gelu->forward(x).detach(), y, y.abs().max().item<double>() * 10));
  LayerNormMLP swiglu = randomized(LayerNormMLP(kHidden, kWide, {.activation = "swiglu"}));
  const at::Tensor z = expected(swiglu, [](const at::Tensor& t) {
    return at::silu(t.narrow(-1, 0, kWide)) * t.narrow(-1, kWide, kWide);
  });
  EXPECT_TRUE(near(swiglu->forward(x).detach(), z, z.abs().max().item<double>() * 10));
}

TEST(LayerNormMLP, HandsItsActivationItsOptions) {
  const at::Tensor x = random({kRows, kHidden});
  LayerNormMLP mlp = randomized(LayerNormMLP(
      kHidden, kWide,
      {.activation = "clamped_swiglu", .activation_params = {{"limit", 0.5}, {"alpha", 1.0}}}));
  const auto p = mlp->named_parameters();
  const at::Tensor norm =
      at::layer_norm(x, {kHidden}, p["layer_norm_weight"], p["layer_norm_bias"]);
  const std::vector<at::Tensor> halves =
      at::linear(norm, p["fc1_weight"], p["fc1_bias"]).chunk(2, -1);
  const at::Tensor wide = at::silu(halves[0].clamp_max(0.5)) * (halves[1].clamp(-0.5, 0.5) + 1);
  EXPECT_TRUE(near(mlp->forward(x).detach(),
                   at::linear(wide, p["fc2_weight"], p["fc2_bias"]).detach(), 10));
  EXPECT_ERROR(LayerNormMLP(8, 8, {.activation = "gelu", .activation_params = {{"limit", 0.5}}}),
               c10::ValueError, "gelu: expected ");
}

TEST(LayerNormMLP, StartsAsTransformerEnginesDoes) {
  LayerNormMLP mlp(64, 256);
  const auto p = mlp->named_parameters();
  EXPECT_NEAR(p["fc1_weight"].std().item<double>(), 0.023, 0.001);
  EXPECT_NEAR(p["fc2_weight"].std().item<double>(), 0.023, 0.001);
  EXPECT_EQ(p["layer_norm_weight"].min().item<float>(), 1);
  EXPECT_EQ(p["fc2_bias"].abs().max().item<float>(), 0);
  LayerNormMLP drawn(8, 8,
                     {.init_method = [](const at::Tensor& t) { t.fill_(3); },
                      .output_layer_init_method = init::ones()});
  EXPECT_EQ(drawn->named_parameters()["fc1_weight"].min().item<float>(), 3);
  EXPECT_EQ(drawn->named_parameters()["fc2_weight"].max().item<float>(), 1);
  LayerNormMLP wide(8, 8, {}, at::TensorOptions().dtype(at::kDouble));
  for (const at::Tensor& param : wide->parameters()) EXPECT_EQ(param.scalar_type(), at::kDouble);
}

TEST(LayerNormLinear, ReturnsWhatIsAskedFor) {
  const at::Tensor x = random({kRows, kHidden});
  LayerNormLinear layer = randomized(
      LayerNormLinear(kHidden, kWide, {.return_bias = true, .return_layernorm_output = true}));
  const auto p = layer->named_parameters();
  EXPECT_THAT(p.keys(), ElementsAre("layer_norm_weight", "layer_norm_bias", "weight", "bias"));
  const ModuleOutputs outputs = layer->forward_all(x);
  const at::Tensor norm =
      at::layer_norm(x, {kHidden}, p["layer_norm_weight"], p["layer_norm_bias"]);
  EXPECT_TRUE(near(outputs.layernorm_output.detach(), norm.detach()));
  EXPECT_TRUE(near(outputs.y.detach(), at::linear(norm, p["weight"]).detach()));
  EXPECT_TRUE(same(outputs.bias, p["bias"]));
  (outputs.y + outputs.bias).sum().backward();
  for (const at::Tensor& param : layer->parameters()) EXPECT_TRUE(param.grad().defined());
  EXPECT_FALSE(LayerNormLinear(8, 8)->forward_all(x).bias.defined());
  LayerNormMLP mlp(kHidden, kWide, {.return_bias = true});
  EXPECT_TRUE(same(mlp->forward_all(x).bias, mlp->named_parameters()["fc2_bias"]));
  LayerNormMLP without(kHidden, kWide, {.bias = false, .return_bias = true});
  EXPECT_FALSE(without->forward_all(x).bias.defined());
}

TEST(LayerNormMLP, IsOnePipelineAndAnOpOfLists) {
  const at::Tensor x = leaf({kRows, kHidden});
  LayerNormMLP module(kHidden, kWide, {.activation = "swiglu"});
  Sequential list({ops::layer_norm_mlp(kHidden, kWide, {.activation = "swiglu"})});
  {
    const c10::AutoGradMode no_grad(false);
    const auto theirs = list->named_parameters();
    for (const auto& param : module->named_parameters())
      theirs["0." + param.key()].copy_(param.value());
  }
  EXPECT_TRUE(same(module->forward(x), list->forward(x)));
  EXPECT_EQ(module->forward(x).grad_fn()->name(), "TandemPipelineBackward");
  EXPECT_THAT(module->explain(), HasSubstr("layer_norm"));
  EXPECT_TRUE(module->verify(x).passed);
}

TEST(LayerNormLinear, KeepsTheStateOfDelayedScaling) {
  LayerNormLinear layer(kHidden, kWide);
  const at::Tensor x = random({kRows, kHidden});
  {
    const Autocast region(true, DelayedScaling{.amax_history_len = 3});
    layer->forward(x).sum().backward();
  }
  EXPECT_EQ(layer->named_buffers()["recipe_state.forward.amax_history"].sizes(),
            (std::vector<int64_t>{3, 2}));
}

TEST(LayerNormMLP, StateOfDelayedScalingIsLoadedAndKeepsItsDtype) {
  const DelayedScaling recipe{.amax_history_len = 4};
  const at::Tensor x = random({kRows, kHidden});
  const auto step = [&](LayerNormMLP module, const at::Tensor& input) {
    const Autocast region(true, recipe);
    return module->forward(input);
  };
  LayerNormMLP saved = randomized(LayerNormMLP(kHidden, kWide));
  for (int i = 0; i < 3; ++i) step(saved, x * (i + 1)).sum().backward();
  LayerNormMLP fresh(kHidden, kWide);
  save_and_load(saved, fresh);
  EXPECT_THAT(fresh->named_buffers().keys(),
              ElementsAre("recipe_state.forward.scale", "recipe_state.forward.amax_history",
                          "recipe_state.backward.scale", "recipe_state.backward.amax_history"))
      << "made where the archive has it, and nothing of this process";
  EXPECT_TRUE(same(step(fresh, x), step(saved, x)));
  fresh->to(at::kBFloat16);
  EXPECT_EQ(fresh->named_buffers()["recipe_state.forward.scale"].scalar_type(), at::kFloat);
  EXPECT_EQ(step(fresh, x.to(at::kBFloat16)).scalar_type(), at::kBFloat16);
}

TEST(LayerNormMLP, StateThatIsMadeInInferenceModeServesTraining) {
  LayerNormMLP module(kHidden, kWide);
  const at::Tensor x = random({kRows, kHidden});
  {
    const c10::InferenceMode inference;
    const Autocast region(true, DelayedScaling{});
    module->forward(x);
  }
  const Autocast region(true, DelayedScaling{});
  module->forward(x).sum().backward();
  EXPECT_TRUE(module->parameters()[0].grad().defined());
}

TEST(LayerNormMLP, AddsGradientsOfWeightsToMainGrad) {
  const at::Tensor x = random({kRows, kHidden}), first = at::zeros({kWide, kHidden}),
                   second = at::full({kHidden, kWide}, 3.0);
  LayerNormMLP plain = randomized(LayerNormMLP(kHidden, kWide));
  LayerNormMLP fused = randomized(LayerNormMLP(
      kHidden, kWide, {.main_grads = {{"fc1_weight", first}, {"fc2_weight", second}}}));
  plain->forward(x).sum().backward();
  fused->forward(x).sum().backward();
  const auto expected = plain->named_parameters(), got = fused->named_parameters();
  EXPECT_TRUE(near(first, expected["fc1_weight"].grad()));
  EXPECT_TRUE(near(second - 3, expected["fc2_weight"].grad(), 100));
  EXPECT_FALSE(got["fc1_weight"].grad().defined());
  EXPECT_TRUE(near(got["fc1_bias"].grad(), expected["fc1_bias"].grad()));
}

TEST(LayerNormLinear, OverRanks) {
  using Mode = TensorParallel::Mode;
  const Op op = ops::layer_norm_linear(
      8, 12,
      {.return_layernorm_output = true,
       .return_layernorm_output_gathered = true,
       .tensor_parallel = {Mode::column, "0", 2, /*sequence_parallel=*/true}});
  std::vector<std::string> basics;
  for (const BasicOp& basic : op.basic_ops) basics.push_back(basic.name);
  EXPECT_THAT(basics,
              ElementsAre("layer_norm", "all_gather", "make_extra_output", "basic_linear", "bias"));
  EXPECT_EQ(op.parameters[2].shape, (std::vector<int64_t>{6, 8}));
  const Op mlp = ops::layer_norm_mlp(8, 12, {.tensor_parallel = {Mode::column, "0", 2}});
  basics.clear();
  for (const BasicOp& basic : mlp.basic_ops) basics.push_back(basic.name);
  EXPECT_THAT(basics, ElementsAre("layer_norm", "reduce_gradient", "basic_linear", "bias", "gelu",
                                  "basic_linear", "all_reduce", "bias"));
  EXPECT_EQ(mlp.parameters[4].shape, (std::vector<int64_t>{8, 6}));
}

TEST(ModuleErrors, TellWhatIsExpected) {
  EXPECT_ERROR(LayerNormLinear(0, 4), c10::ValueError,
               "layer_norm_linear: expected in_features > 0, got 0");
  EXPECT_ERROR(LayerNormMLP(4, 4, {.activation = "glue"}), c10::ValueError,
               "layer_norm_mlp: expected activation to be one of clamped_swiglu, erf_geglu, "
               "erf_gelu, geglu, gelu",
               ", got \"glue\". Name one of them.");
  EXPECT_ERROR(ops::layer_norm_linear(4, 4, {.return_bias = true}), c10::ValueError,
               "layer_norm_linear: expected an op whose output is what the next op takes, got one "
               "with return_bias. Use the module, or leave it out.");
  LayerNormLinear layer(4, 4, {.return_bias = true});
  EXPECT_ERROR(layer->forward(random({2, 4})), c10::ValueError,
               "LayerNormLinear: expected one output, got return_bias or return_layernorm_output. "
               "Call forward_all(x), which returns all of them.");
}

}  // namespace
}  // namespace tandem::testing::front_modules
