// Modules in C++ whose backward leaves gradients of weights for later, or computes forward again.
#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>

#include <optional>
#include <string>
#include <tuple>

#include "support/modules.h"
#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/functional.h"
#include "tandem/tandem.h"

namespace tandem::testing::front_delayed_gradients {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHidden = 32, kWide = 64, kRows = 32;

template <typename Holder>
at::Tensor grad(Holder& module, const std::string& name) {
  return module->named_parameters()[name].grad();
}

template <typename Holder>
void expect_same_gradients(Holder& got, Holder& expected) {
  for (const auto& param : expected->named_parameters())
    EXPECT_TRUE(same(grad(got, param.key()), param.value().grad())) << param.key();
}

LayerNormMLP mlp(const LayerNormMLPOptions& options = {}) {
  return randomized(LayerNormMLP(kHidden, kWide, options));
}

/// With or without a recipe.
class DelayedGradients : public ::testing::TestWithParam<bool> {
 protected:
  template <typename Holder>
  at::Tensor forward(Holder& module, const at::Tensor& x) {
    const Autocast region(/*enabled=*/GetParam(), MXFP8BlockScaling());
    return module->forward(x);
  }
  const at::Tensor x_ = random({kRows, kHidden}), other_ = random({kRows, kHidden}, at::kFloat, 2);
};
INSTANTIATE_TEST_SUITE_P(Recipes, DelayedGradients, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "quantized" : "plain");
});

TEST_P(DelayedGradients, ComeWithBackwardDwOldestFirst) {
  LayerNormMLP plain = mlp(), delayed = mlp({.delay_wgrad_compute = true});
  for (const at::Tensor& x : {x_, other_}) forward(delayed, x).square().sum().backward();
  EXPECT_FALSE(grad(delayed, "fc1_weight").defined());
  EXPECT_FALSE(grad(delayed, "fc2_weight").defined());
  EXPECT_TRUE(grad(delayed, "fc2_bias").defined());
  forward(plain, x_).square().sum().backward();
  delayed->backward_dw();
  for (const char* weight : {"fc1_weight", "fc2_weight"})
    EXPECT_TRUE(same(grad(delayed, weight), grad(plain, weight))) << "of the first backward";
  forward(plain, other_).square().sum().backward();
  delayed->backward_dw();
  expect_same_gradients(delayed, plain);
  EXPECT_ERROR(delayed->backward_dw(), c10::Error,
               "backward_dw: expected a backward before it whose gradients of weights are delayed, "
               "got none. Call backward() first.");
}

TEST_P(DelayedGradients, ASecondBackwardOfAGraphLeavesThemAgain) {
  LayerNormLinear plain = randomized(LayerNormLinear(kHidden, kWide)),
                  delayed =
                      randomized(LayerNormLinear(kHidden, kWide, {.delay_wgrad_compute = true}));
  for (LayerNormLinear* module : {&plain, &delayed}) {
    const at::Tensor loss = forward(*module, x_).square().sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  }
  delayed->backward_dw();
  delayed->backward_dw();
  expect_same_gradients(delayed, plain);
}

TEST_P(DelayedGradients, OfPartsAndOfOpsOfLists) {
  const auto list = [](bool delays) {
    const ops::LinearOptions split{.bias = false,
                                   .parameters_split = {{"gate", kWide}, {"up", kWide}}};
    const Op first = ops::linear(kHidden, 2 * kWide, split),
             last = ops::linear(kWide, kHidden, {.bias = false});
    return randomized(Sequential({delays ? first.with_delayed_wgrad() : first, ops::swiglu(),
                                  delays ? last.with_delayed_wgrad() : last}));
  };
  Sequential plain = list(false), delayed = list(true);
  for (Sequential* module : {&plain, &delayed}) forward(*module, x_).square().sum().backward();
  for (const at::Tensor& param : delayed->parameters()) EXPECT_FALSE(param.grad().defined());
  delayed->backward_dw();
  expect_same_gradients(delayed, plain);
  EXPECT_TRUE(delayed->verify(x_).passed);
}

TEST_P(DelayedGradients, GoIntoMainGrad) {
  const at::Tensor main_grad = at::zeros({kWide, kHidden});
  LayerNormMLP plain = mlp(),
               delayed =
                   mlp({.main_grads = {{"fc1_weight", main_grad}}, .delay_wgrad_compute = true});
  for (LayerNormMLP* module : {&plain, &delayed}) forward(*module, x_).sum().backward();
  EXPECT_TRUE(same(main_grad, at::zeros({kWide, kHidden})));
  delayed->backward_dw();
  EXPECT_TRUE(near(main_grad, grad(plain, "fc1_weight"), /*magnitude=*/100));
  EXPECT_FALSE(grad(delayed, "fc1_weight").defined());
  EXPECT_TRUE(same(grad(delayed, "fc2_weight"), grad(plain, "fc2_weight")));
}

TEST_P(DelayedGradients, GoIntoTheMainGradOfEachPart) {
  const at::Tensor gate = at::zeros({kWide, kHidden}), up = at::zeros({kWide, kHidden});
  const LinearOptions split{.bias = false, .parameters_split = {{"gate", kWide}, {"up", kWide}}};
  LinearOptions later = split;
  later.main_grads = {{"gate_weight", gate}, {"up_weight", up}};
  later.delay_wgrad_compute = true;
  Linear plain = randomized(Linear(kHidden, 2 * kWide, split)),
         delayed = randomized(Linear(kHidden, 2 * kWide, later));
  for (Linear* module : {&plain, &delayed}) forward(*module, x_).square().sum().backward();
  delayed->backward_dw();
  EXPECT_TRUE(same(gate, grad(plain, "gate_weight")));
  EXPECT_TRUE(same(up, grad(plain, "up_weight")));
  EXPECT_FALSE(grad(delayed, "up_weight").defined());
}

/// Experts with and without delayed gradients, one of which has no rows.
class DelayedGroups
    : public ::testing::TestWithParam<std::tuple<std::optional<Recipe>, bool, bool>> {
 protected:
  static constexpr int64_t kGroups = 3;

  /// `main_grads`: of the last layer.
  Sequential experts(bool delays, const std::vector<at::Tensor>& main_grads = {}) const {
    const auto& [recipe, is_packed, is_fused] = GetParam();
    const auto layer = [&, is_packed = is_packed](int64_t out) {
      const Op op =
          ops::grouped_linear(kHidden, out, {.num_groups = kGroups, .packed_weight = is_packed});
      return delays ? op.with_delayed_wgrad() : op;
    };
    Op last = layer(kHidden);
    for (size_t g = 0; g < main_grads.size(); ++g)
      last = last.with_main_grad(weight_of_group(g), main_grads[g]);
    return randomized(is_fused ? Sequential({layer(2 * kHidden), ops::swiglu(), last})
                               : Sequential({last}));
  }

  static std::string weight_of_group(size_t group) {
    return std::get<1>(GetParam()) ? "weight" : "weight" + std::to_string(group);
  }

  at::Tensor forward(Sequential& module, const at::Tensor& x) const {
    const auto& [recipe, is_packed, is_fused] = GetParam();
    const Autocast region(recipe.has_value(), recipe.value_or(Float8CurrentScaling{}));
    std::vector<at::Tensor> splits(is_fused ? 2 : 1, splits_);
    return module->forward(x, splits)[0];
  }

  const at::Tensor splits_ = at::tensor({20, 0, 12}), x_ = random({kRows, kHidden}),
                   other_ = random({kRows, kHidden}, at::kFloat, 2);
};
const std::vector<std::optional<Recipe>> kRecipes = {std::nullopt, Float8CurrentScaling{},
                                                     MXFP8BlockScaling{},
                                                     DelayedScaling{.amax_history_len = 4}};

std::string name_of(const ::testing::TestParamInfo<DelayedGroups::ParamType>& info) {
  const auto& [recipe, is_packed, is_fused] = info.param;
  const char* names[] = {"current", "delayed", "", "mxfp8"};
  return std::string(recipe ? names[recipe->index()] : "plain") + (is_packed ? "_packed" : "") +
         (is_fused ? "_two" : "");
}

INSTANTIATE_TEST_SUITE_P(Groups, DelayedGroups,
                         ::testing::Combine(::testing::ValuesIn(kRecipes), ::testing::Bool(),
                                            ::testing::Bool()),
                         name_of);

TEST_P(DelayedGroups, ComeWithBackwardDwOldestFirst) {
  Sequential plain = experts(false), delayed = experts(true);
  for (const at::Tensor& x : {x_, other_}) forward(delayed, x).square().sum().backward();
  for (const auto& param : delayed->named_parameters())
    EXPECT_EQ(param.value().grad().defined(), param.key().find("bias") != std::string::npos);
  for (const at::Tensor& x : {x_, other_}) {
    forward(plain, x).square().sum().backward();
    delayed->backward_dw();
    for (const auto& param : plain->named_parameters())
      if (param.key().find("weight") != std::string::npos) {
        EXPECT_TRUE(near(grad(delayed, param.key()), param.value().grad())) << param.key();
      }
  }
  EXPECT_ERROR(delayed->backward_dw(), c10::Error, "backward_dw: expected a backward before it");
}

TEST_P(DelayedGroups, AreThoseOfWeightsThatAreNotFrozen) {
  Sequential plain = experts(false), delayed = experts(true);
  for (Sequential* module : {&plain, &delayed}) {
    (*module)->named_parameters()["0." + weight_of_group(2)].set_requires_grad(false);
    forward(*module, x_).square().sum().backward();
  }
  delayed->backward_dw();
  EXPECT_FALSE(grad(delayed, "0." + weight_of_group(2)).defined());
  for (const auto& param : plain->named_parameters())
    EXPECT_TRUE(near(grad(delayed, param.key()), param.value().grad())) << param.key();
}

TEST_P(DelayedGroups, GoIntoMainGrads) {
  const auto& [recipe, is_packed, is_fused] = GetParam();
  std::vector<at::Tensor> main_grads = {at::zeros({kGroups, kHidden, kHidden})};
  if (!is_packed) main_grads = main_grads[0].unbind(0);
  Sequential plain = experts(false), delayed = experts(true, main_grads);
  for (Sequential* module : {&plain, &delayed}) forward(*module, x_).square().sum().backward();
  for (const at::Tensor& main_grad : main_grads)
    EXPECT_TRUE(same(main_grad, at::zeros_like(main_grad)));
  delayed->backward_dw();
  for (size_t g = 0; g < main_grads.size(); ++g) {
    const std::string name = (is_fused ? "2." : "0.") + weight_of_group(g);
    EXPECT_TRUE(near(main_grads[g], grad(plain, name))) << name;
    EXPECT_FALSE(grad(delayed, name).defined());
  }
}

TEST(DelayedGroupsAlone, AreProductsOfFloat64) {
  const at::Tensor x = random({5, 8}, at::kDouble), splits = at::tensor({2, 3});
  Sequential delayed(
      {ops::grouped_linear(8, 4, {.num_groups = 2, .bias = false}).with_delayed_wgrad()},
      at::TensorOptions().dtype(at::kDouble));
  const at::Tensor y = delayed->forward(x, {splits})[0];
  const at::Tensor grad_y = random({5, 4}, at::kDouble, 3);
  y.backward(grad_y);
  delayed->backward_dw();
  for (const auto& [name, first, rows] : {std::tuple("0.weight0", 0, 2), {"0.weight1", 2, 3}})
    EXPECT_TRUE(
        near(grad(delayed, name), grad_y.narrow(0, first, rows).t().mm(x.narrow(0, first, rows))));
  EXPECT_TRUE(delayed->verify(x, {splits}).passed);
  delayed->forward(x, {splits})[0].sum().backward();
  splits.add_(0);
  EXPECT_ERROR(delayed->backward_dw(), c10::Error,
               "backward_dw: expected the numbers of rows unchanged since backward",
               "got an in-place write. Call backward_dw() before it");
}

TEST_P(DelayedGradients, OfFrozenWeightsAreNone) {
  LayerNormMLP delayed = mlp({.delay_wgrad_compute = true});
  for (at::Tensor& param : delayed->parameters()) param.set_requires_grad(param.dim() == 1);
  forward(delayed, x_).sum().backward();
  delayed->backward_dw();
  EXPECT_FALSE(grad(delayed, "fc1_weight").defined());
  delayed->named_parameters()["fc1_weight"].set_requires_grad(true);
  forward(delayed, x_).sum().backward();
  delayed->backward_dw();
  EXPECT_TRUE(grad(delayed, "fc1_weight").defined());
  EXPECT_FALSE(grad(delayed, "fc2_weight").defined());
}

TEST_P(DelayedGradients, MayOutliveTheirModule) {
  at::Tensor x = random({kRows, kHidden}).requires_grad_(), y;
  {
    LayerNormMLP delayed = mlp({.delay_wgrad_compute = true});
    y = forward(delayed, x);
  }
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(DelayedGradientErrors, AnInputThatWasWrittenIsFoundOut) {
  Sequential delayed({ops::linear(kHidden, kWide).with_delayed_wgrad()});
  const at::Tensor x = random({kRows, kHidden});
  delayed->forward(x).sum().backward();
  x.add_(1);
  EXPECT_ERROR(delayed->backward_dw(), c10::Error,
               "backward_dw: expected x unchanged since backward, as",
               "got an in-place write. Call backward_dw() before it");
}

TEST(DelayedGradientErrors, OnlyProductsDelayThem) {
  for (const Op& op : {ops::gelu(), ops::rms_norm(4)})
    EXPECT_ERROR(op.with_delayed_wgrad(), c10::ValueError,
                 op.name + ": expected an op with a product, as ",
                 "got one without. Leave it as it is.");
  EXPECT_ERROR(functional::forward(
                   functional::LayerNormLinearArguments{.x = random({3, 4}),
                                                        .layer_norm_weight = at::zeros({4}),
                                                        .layer_norm_bias = at::zeros({4}),
                                                        .weight = random({4, 4}),
                                                        .options = {.delay_wgrad_compute = true}}),
               c10::ValueError, "layer_norm_linear: expected delay_wgrad_compute=false of a ",
               "plain function", "got true. Use the module");
  Sequential nothing({ops::linear(4, 4)});
  EXPECT_NO_THROW(nothing->backward_dw());
}

TEST_P(DelayedGradients, ACheckpointedMLPKeepsItsInputAlone) {
  for (const char* activation : {"gelu", "swiglu"}) {
    LayerNormMLP plain = mlp({.activation = activation}),
                 again = mlp({.activation = activation, .checkpoint = true});
    at::Tensor x = random({kRows, kHidden}).requires_grad_(), gradients[2], outputs[2];
    size_t nth = 0;
    for (LayerNormMLP* module : {&plain, &again}) {
      outputs[nth] = forward(*module, x);
      outputs[nth].square().sum().backward();
      gradients[nth++] = std::exchange(x.mutable_grad(), {});
    }
    EXPECT_TRUE(same(outputs[0], outputs[1]));
    EXPECT_TRUE(same(gradients[0], gradients[1]));
    expect_same_gradients(again, plain);
    EXPECT_LT(8 * again->saved_bytes(), plain->saved_bytes()) << "statistics of the norm, at most";
    EXPECT_THAT(again->explain(), HasSubstr("computed again: "));
    EXPECT_THAT(plain->explain(), ::testing::Not(HasSubstr("computed again: ")));
    EXPECT_TRUE(again->verify(x).passed);
  }
}

TEST_P(DelayedGradients, ACheckpointedMLPDelaysThemToo) {
  LayerNormMLP plain = mlp(), both = mlp({.delay_wgrad_compute = true, .checkpoint = true});
  for (LayerNormMLP* module : {&plain, &both}) forward(*module, x_).square().sum().backward();
  both->backward_dw();
  expect_same_gradients(both, plain);
}

}  // namespace
}  // namespace tandem::testing::front_delayed_gradients
