// Modules in C++ whose backward leaves gradients of weights for later, or computes forward again.
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/functional.h"
#include "tandem/tandem.h"

namespace tandem::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHidden = 32, kWide = 64, kRows = 32;

/// The same first values of every module of one shape.
template <typename Holder>
Holder randomized(Holder module) {
  const c10::AutoGradMode no_grad(false);
  uint64_t seed = 10;
  for (at::Tensor& param : module->parameters())
    param.copy_(random(param.sizes(), at::kFloat, ++seed));
  return module;
}

template <typename Holder>
at::Tensor grad(Holder& module, const char* name) {
  return module->named_parameters()[name].grad();
}

template <typename Holder>
void expect_same_gradients(Holder& got, Holder& expected) {
  for (const auto& param : expected->named_parameters())
    EXPECT_TRUE(same(grad(got, param.key().c_str()), param.value().grad())) << param.key();
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
  EXPECT_THAT(
      [&] { delayed->backward_dw(); },
      ThrowsText<c10::Error>("backward_dw: expected a backward before it whose gradients of "
                             "weights are delayed, got none. Call backward() first."));
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
  EXPECT_THAT([&] { delayed->backward_dw(); },
              ThrowsText<c10::Error>("backward_dw: expected x unchanged since backward, as",
                                     "got an in-place write. Call backward_dw() before it"));
}

TEST(DelayedGradientErrors, OnlyProductsOfOneWeightDelayThem) {
  for (const Op& op : {ops::gelu(), ops::rms_norm(4), ops::grouped_linear(4, 4, {.num_groups = 2})})
    EXPECT_THAT(
        [&] { op.with_delayed_wgrad(); },
        ThrowsText<c10::ValueError>(op.name + ": expected an op with a product of one weight, as ",
                                    "got one without. Leave it as it is."));
  EXPECT_THAT(
      [] {
        functional::layer_norm_linear_forward({.x = random({3, 4}),
                                               .layer_norm_weight = at::zeros({4}),
                                               .layer_norm_bias = at::zeros({4}),
                                               .weight = random({4, 4}),
                                               .options = {.delay_wgrad_compute = true}});
      },
      ThrowsText<c10::ValueError>("layer_norm_linear: expected delay_wgrad_compute=false of a ",
                                  "plain function", "got true. Use the module"));
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
}  // namespace tandem::testing
