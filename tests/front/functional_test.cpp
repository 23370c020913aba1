// Plain functions of the modules against the modules, which are pipelines under autograd.
#include "tandem/functional.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/throws.h"
#include "tandem/tandem.h"

namespace tandem::testing::front_functional {
namespace {

using namespace functional;

TEST(Functional, LinearIsTheModule) {
  at::manual_seed(1);
  Sequential module({ops::linear(6, 4)});
  const auto parameters = module->named_parameters();
  const at::Tensor x = at::randn({2, 3, 6}).requires_grad_();
  const at::Tensor y = module->forward(x);
  const at::Tensor grad_y = at::randn_like(y);
  y.backward(grad_y);
  const LinearArguments arguments{.x = x.detach(),
                                  .weight = parameters["0.weight"].detach(),
                                  .bias = parameters["0.bias"].detach()};
  const Results results = forward(arguments);
  EXPECT_TRUE(at::equal(results.y, y));
  EXPECT_FALSE(results.y.requires_grad());
  Context context = setup_context(arguments, results);
  EXPECT_EQ(context.saved_bytes(), 0);  // arguments alone
  const Gradients gradients = backward(context, grad_y);
  EXPECT_TRUE(at::equal(gradients.at("x"), x.grad()));
  EXPECT_TRUE(at::equal(gradients.at("weight"), parameters["0.weight"].grad()));
  EXPECT_TRUE(at::equal(gradients.at("bias"), parameters["0.bias"].grad()));
  Context another = setup_context(arguments, results);
  EXPECT_ERROR(backward(another, at::ones({2, 4, 4})), c10::ValueError,
               "backward: expected a gradient of shape [2, 3, 4]", "got [2, 4, 4]");
  arguments.weight.add_(1);
  EXPECT_ERROR(setup_context(arguments, results), c10::ValueError, "unchanged since forward",
               "got an in-place write");
  EXPECT_ERROR(backward(context, grad_y), c10::Error,
               "backward: expected a context whose activations are there",
               "got one whose backward has run");
}

TEST(Functional, LinearKeepsItsInputInsteadOfCodes) {
  at::manual_seed(3);
  const at::Tensor x = at::randn({32, 64}), grad_y = at::randn({32, 32});
  std::vector<Gradients> all;
  std::vector<std::pair<int64_t, int64_t>> saved;  // of the module, of the plain functions
  for (const bool saves : {false, true}) {
    at::manual_seed(4);
    Linear module(64, 32, LinearOptions{.bias = false, .save_original_input = saves});
    const at::Tensor weight = module->named_parameters()["weight"];
    const at::Tensor leaf = x.clone().requires_grad_();
    {
      const Autocast region(/*enabled=*/true, MXFP8BlockScaling());
      module->forward(leaf).backward(grad_y);
    }
    const LinearArguments arguments{.x = x,
                                    .weight = weight.detach(),
                                    .save_original_input = saves,
                                    .common = {.recipe = MXFP8BlockScaling()}};
    Context context = setup_context(arguments, forward(arguments));
    saved.emplace_back(module->saved_bytes(), context.saved_bytes());
    all.push_back(backward(context, grad_y));
    EXPECT_TRUE(at::equal(all.back().at("weight"), weight.grad()));
    EXPECT_TRUE(at::equal(all.back().at("x"), leaf.grad()));
  }
  EXPECT_TRUE(at::equal(all[0].at("weight"), all[1].at("weight")));
  const int64_t codes = x.numel();
  EXPECT_GE(saved[0].first - saved[1].first, codes);
  EXPECT_GE(saved[0].second - saved[1].second, codes);
}

TEST(Functional, MlpIsTheModuleUnderARecipe) {
  at::manual_seed(2);
  LayerNormMLP module(32, 64, LayerNormMLPOptions{.activation = "swiglu"});
  const auto parameters = module->named_parameters();
  const at::Tensor x = at::randn({16, 32}).requires_grad_();
  at::Tensor y;
  {
    const Autocast region(true, MXFP8BlockScaling{});
    y = module->forward(x);
  }
  y.backward(at::ones_like(y));
  const auto parameter = [&](const char* name) { return parameters[name].detach(); };
  const LayerNormMLPArguments arguments{.x = x.detach(),
                                        .layer_norm_weight = parameter("layer_norm_weight"),
                                        .layer_norm_bias = parameter("layer_norm_bias"),
                                        .fc1_weight = parameter("fc1_weight"),
                                        .fc1_bias = parameter("fc1_bias"),
                                        .fc2_weight = parameter("fc2_weight"),
                                        .fc2_bias = parameter("fc2_bias"),
                                        .options = {.activation = "swiglu"},
                                        .common = {.recipe = MXFP8BlockScaling{}}};
  const Results results = forward(arguments);
  EXPECT_TRUE(at::equal(results.y, y));
  Context context = setup_context(arguments, results);
  EXPECT_GT(context.saved_bytes(), 0);
  const Gradients kept = backward(context, at::ones_like(y), {}, /*retain=*/true);
  EXPECT_GT(context.saved_bytes(), 0);
  const Gradients gradients = backward(context, at::ones_like(y));
  EXPECT_EQ(context.saved_bytes(), 0);
  EXPECT_TRUE(at::equal(gradients.at("x"), x.grad()));
  for (const auto& each : parameters) {
    EXPECT_TRUE(at::equal(gradients.at(each.key()), each.value().grad())) << each.key();
    EXPECT_TRUE(at::equal(kept.at(each.key()), each.value().grad())) << each.key();
  }
}

TEST(Functional, AGradientOfANormsOutputThatWasNotReturned) {
  const LinearArguments arguments{.x = at::randn({3, 6}), .weight = at::randn({4, 6})};
  Context context = setup_context(arguments, forward(arguments));
  EXPECT_ERROR(backward(context, at::ones({3, 4}), at::ones({3, 6})), c10::ValueError,
               "backward: expected a gradient of y alone, as no output of a norm was returned, got "
               "grad_layernorm_output. Leave it out.");
}

TEST(Functional, GroupsAndNormsAndWhatIsRefused) {
  at::manual_seed(3);
  const std::vector<at::Tensor> weights{at::randn({4, 6}), at::randn({4, 6})};
  const GroupedLinearArguments arguments{
      .x = at::randn({5, 6}), .m_splits = at::tensor({2, 3}), .weights = weights};
  const Results results = forward(arguments);
  EXPECT_TRUE(results.y.slice(0, 0, 2).allclose(arguments.x.slice(0, 0, 2).mm(weights[0].t())));
  Context context = setup_context(arguments, results);
  const Gradients gradients = backward(context, at::ones({5, 4}));
  EXPECT_TRUE(gradients.at("weight1").allclose(at::ones({4, 3}).mm(arguments.x.slice(0, 2, 5))));

  const auto forward_of = [&](std::vector<at::Tensor> of, std::vector<at::Tensor> biases) {
    return forward(GroupedLinearArguments{.x = arguments.x,
                                          .m_splits = arguments.m_splits,
                                          .weights = std::move(of),
                                          .biases = std::move(biases)});
  };
  EXPECT_ERROR(forward_of({}, {}), c10::ValueError,
               "grouped_linear: expected weights to be one matrix for each group, got none. Pass "
               "one for each of m_splits.");
  EXPECT_ERROR(forward_of(weights, {at::zeros({4})}), c10::ValueError,
               "grouped_linear: expected biases to be as many as weights, 2, or none, got 1. Pass "
               "one for each group.");

  const LayerNormLinearArguments normed{.x = at::randn({3, 6}),
                                        .layer_norm_weight = at::ones({6}),
                                        .layer_norm_bias = at::zeros({6}),
                                        .weight = weights[0],
                                        .options = {.return_layernorm_output = true}};
  const Results outputs = forward(normed);
  EXPECT_TRUE(outputs.y.allclose(outputs.layernorm_output.mm(weights[0].t())));
  Results others = outputs;
  others.saved.pop_back();
  EXPECT_ERROR(setup_context(normed, others), c10::ValueError, "setup_context: expected the ",
               "tensors that forward of these arguments saves");
}

}  // namespace
}  // namespace tandem::testing::front_functional
