// What callers get: flags, objects and histories of outputs and of the tensors that were passed in.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>

#include "pipeline/pipeline.h"
#include "support/plans.h"

namespace tandem::testing::autograd_outputs {
namespace {

Outputs call(const Ops& ops, const Tensors& inputs, const Tensors& params = {}) {
  return Pipeline(ops_json(ops))(inputs, params, /*training=*/true);
}

/// A tensor with a history.
at::Tensor non_leaf() { return leaf({2, 4}) * 2; }

TEST(Outputs, WithoutGradARenameIsTheTensorItself) {
  const at::Tensor x = random({2, 4});
  const Outputs outputs = call({"identity", "make_extra_output"}, {x});
  EXPECT_TRUE(outputs[0].is_same(x));
  EXPECT_TRUE(outputs[1].is_same(x));
}

TEST(Outputs, UnderNoGradNoFlagIsTouched) {
  const at::Tensor x = non_leaf();
  const auto node = x.grad_fn();
  const c10::AutoGradMode no_grad(false);
  const Outputs outputs = call({"identity"}, {x});
  EXPECT_TRUE(outputs[0].is_same(x));
  EXPECT_TRUE(x.requires_grad());
  EXPECT_EQ(x.grad_fn(), node);
  EXPECT_FALSE(call({"gelu"}, {x})[0].requires_grad());
}

TEST(Outputs, InInferenceModeAreInferenceTensors) {
  const at::Tensor weight = leaf({3, 4});
  const c10::InferenceMode inference;
  const at::Tensor x = random({2, 4});
  EXPECT_TRUE(call({"identity"}, {x})[0].is_same(x));
  const at::Tensor y = call({"basic_linear"}, {x}, {weight})[0];
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(y.is_inference());
}

TEST(Outputs, WithGradARenameIsANewObjectOnTheSameMemory) {
  const at::Tensor x = non_leaf();
  const auto node = x.grad_fn();
  const Outputs outputs = call({"identity", "make_extra_output"}, {x});
  EXPECT_FALSE(outputs[0].is_same(x));
  EXPECT_FALSE(outputs[0].is_same(outputs[1]));
  EXPECT_TRUE(outputs[0].is_alias_of(x));
  EXPECT_EQ(x.grad_fn(), node) << "the caller's tensor keeps its history";
  EXPECT_EQ(outputs[0].grad_fn()->name(), "TandemPipelineBackward");
  EXPECT_EQ(outputs[0].grad_fn(), outputs[1].grad_fn()) << "one node for all of it";
  const auto version = x._version();
  outputs[0].detach().add_(1);
  EXPECT_EQ(x._version(), version + 1) << "one version counter";
}

TEST(Outputs, ThatRequireNoGradAreNotMarked) {
  // The extra output comes before anything that requires grad.
  const at::Tensor x = random({2, 4}), weight = leaf({3, 4});
  const Outputs outputs = call({"make_extra_output", "basic_linear"}, {x}, {weight});
  EXPECT_TRUE(outputs[0].requires_grad());
  EXPECT_FALSE(outputs[1].requires_grad());
  EXPECT_EQ(outputs[1].grad_fn(), nullptr);
}

TEST(Outputs, AParameterThatIsFrozenBetweenCallsTakesEffect) {
  Pipeline pipeline(ops_json({"basic_linear", "bias"}));
  const Tensors inputs{random({2, 4})}, params{leaf({3, 4}), leaf({3})};
  const auto gradients = [&](const Tensors& requested) {
    const Outputs outputs = pipeline(inputs, params, true);
    const Tensors grad{random({2, 3})};
    return gradients_of(outputs, requested, grad);
  };
  EXPECT_TRUE(gradients({params[0], params[1]})[0].defined());
  params[0].set_requires_grad(false);
  EXPECT_TRUE(gradients({params[1]})[0].defined());
  EXPECT_EQ(pipeline.saved_bytes(), 0);
  params[1].set_requires_grad(false);
  EXPECT_FALSE(pipeline(inputs, params, true)[0].requires_grad());
  params[0].set_requires_grad(true);
  EXPECT_TRUE(gradients({params[0]})[0].defined());
}

TEST(Outputs, UnderAutocastHaveItsDtype) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor y = call({"basic_linear", "bias"}, {leaf({2, 4})}, {leaf({3, 4}), leaf({3})})[0];
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_EQ(
      call({"basic_linear", "bias"}, {leaf({2, 4})}, {leaf({3, 4}), leaf({3})})[0].scalar_type(),
      at::kFloat);
}

TEST(Outputs, UndefinedGradientsStayUndefined) {
  const at::Tensor x = leaf({2, 4}), bias = leaf({4});
  const Outputs outputs = call({"make_extra_output", "bias"}, {x}, {bias});
  const Tensors one{outputs[1]}, requested{x, bias}, grad{random({2, 4})};
  const auto gradients = gradients_of(one, requested, grad);
  EXPECT_TRUE(same(gradients[0], grad[0]));
  EXPECT_FALSE(gradients[1].defined());
}

TEST(Outputs, AnIntegerOutputIsNotDifferentiable) {
  const at::Tensor x = random({2, 4}).to(at::kLong), y = leaf({2, 4});
  const Outputs outputs = call({"make_extra_output", "add_extra_input"}, {x, y});
  EXPECT_FALSE(outputs[1].requires_grad());
  EXPECT_TRUE(outputs[0].requires_grad());
}

TEST(Outputs, GradientsFlowIntoWhatCameBefore) {
  const at::Tensor x = leaf({2, 4});
  const Outputs first = call({"gelu"}, {x * 2});
  const Outputs second = call({"silu"}, {first[0]});
  second[0].sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

}  // namespace
}  // namespace tandem::testing::autograd_outputs
