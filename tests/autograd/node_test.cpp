// The node: what it saves, checks, refuses and lets go.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "pipeline/pipeline.h"
#include "support/memory.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::autograd_node {
namespace {

const Ops kMlp = {"rms_norm", "basic_linear", "swiglu", "basic_linear"};

Tensors mlp_params(int64_t hidden = 8, int64_t features = 12) {
  return {leaf({hidden}), leaf({2 * features, hidden}), leaf({hidden, features})};
}

Outputs call(const Ops& ops, const Tensors& inputs, const Tensors& params = {}) {
  return Pipeline(ops_json(ops))(inputs, params, true);
}

void differentiate(const at::Tensor& y, const Tensors& requested, bool retain = false,
                   bool create = false) {
  torch::autograd::grad({y}, {requested.begin(), requested.end()}, {at::ones_like(y)}, retain,
                        create,
                        /*allow_unused=*/true);
}

TEST(Node, RunsAgainWithRetainGraphOnly) {
  const at::Tensor x = leaf({3, 8});
  const auto params = mlp_params();
  const at::Tensor y = call(kMlp, {x}, params)[0];
  const auto gradient = [&](bool retain) {
    return torch::autograd::grad({y}, {x}, {at::ones_like(y)}, retain, false, true)[0];
  };
  const at::Tensor first = gradient(true);
  EXPECT_TRUE(same(gradient(true), first));
  EXPECT_TRUE(same(gradient(false), first));
  EXPECT_ERROR(gradient(false), c10::Error,
               "pipeline: expected a graph that still holds its saved tensors",
               "got one already used by backward()", "Pass retain_graph=True");
}

TEST(Node, RefusesASecondDerivative) {
  const at::Tensor x = leaf({3, 8});
  const at::Tensor y = call({"gelu"}, {x})[0];
  const at::Tensor gradient =
      torch::autograd::grad({y}, {x}, {at::ones_like(y)}, true, /*create_graph=*/true)[0];
  EXPECT_TRUE(gradient.requires_grad());
  EXPECT_ERROR(gradient.sum().backward(), c10::Error,
               "pipeline: expected at most one backward, got a backward of the backward",
               "torch.func.grad");
}

TEST(Node, FindsAnInPlaceWriteToASavedInput) {
  const at::Tensor x = leaf({3, 8}), base = x * 1;
  const at::Tensor y = call({"gelu"}, {base})[0];
  base.detach().add_(1);
  EXPECT_ERROR(y.sum().backward(), c10::Error, "modified by an inplace operation");
}

TEST(Node, FindsAnInPlaceWriteBehindAReshape) {
  const at::Tensor x = leaf({3, 8}), base = x * 1;
  const at::Tensor y = call({R"(reshape {"options": {"shape": [8, 3]}})", "gelu"}, {base})[0];
  base.detach().add_(1);
  EXPECT_ERROR(y.sum().backward(), c10::Error, "modified by an inplace operation")
      << "a view made below autograd would have a version counter of its own";
}

TEST(Node, FindsAnInPlaceWriteToAParameterAndToAnOutput) {
  const at::Tensor x = leaf({3, 8});
  const auto params = mlp_params();
  const at::Tensor y = call(kMlp, {x}, params)[0];
  params[1].detach().mul_(2);
  EXPECT_ERROR(y.sum().backward(), c10::Error, "modified by an inplace operation");
  const Outputs outputs = call({"gelu", "make_extra_output", "silu"}, {x});
  outputs[1].detach().mul_(2);
  EXPECT_ERROR(outputs[0].sum().backward(), c10::Error, "modified by an inplace operation");
}

TEST(Node, ReshapedInputsAreViewedAgainInBackward) {
  const Ops ops = {R"(reshape {"options": {"shape": [8, 3]}})", "gelu"};
  EXPECT_TRUE(gradients_match(function_of(ops), {leaf({3, 8}, at::kDouble)}));
  EXPECT_EQ(run(ops, {leaf({3, 8})}, {}).saved_bytes, 0) << "the argument itself is saved";
}

TEST(Node, OneTensorInTwoPlacesServesBoth) {
  const at::Tensor x = leaf({3, 4}, at::kDouble), weight = leaf({4, 4}, at::kDouble, 2);
  const Tensors params{weight, weight};
  const at::Tensor y = call({"basic_linear", "gelu", "basic_linear"}, {x}, params)[0];
  const Tensors apart{weight.detach().clone().requires_grad_(),
                      weight.detach().clone().requires_grad_()};
  const at::Tensor expected = call({"basic_linear", "gelu", "basic_linear"}, {x}, apart)[0];
  const Tensors grad{random({3, 4}, at::kDouble, 3)}, found{x, weight},
      parts{x, apart[0], apart[1]}, outputs{expected};
  const auto by_part = gradients_of(outputs, parts, grad);
  for (const bool retain : {true, true, false}) {
    const auto gradients = torch::autograd::grad({y}, found, grad, retain, false, true);
    EXPECT_TRUE(near(gradients[0], by_part[0]));
    EXPECT_TRUE(near(gradients[1], by_part[1] + by_part[2]));
  }
}

TEST(Node, LetsGoOfEveryActivationAfterBackward) {
  const at::Tensor x = leaf({64, 8});
  const auto params = mlp_params();
  Pipeline pipeline(ops_json(kMlp));
  const Tensors inputs{x};
  pipeline(inputs, params, true)[0].sum().backward();  // gradients and plans exist from now on
  const LiveBytes live;
  {
    const at::Tensor y = pipeline(inputs, params, true)[0];
    EXPECT_EQ(live.bytes(), pipeline.saved_bytes() + static_cast<int64_t>(y.nbytes()));
    differentiate(y, {x});
    EXPECT_EQ(live.bytes(), static_cast<int64_t>(y.nbytes())) << "y still has its node";
  }
  EXPECT_EQ(live.bytes(), 0);
}

TEST(Node, LetsGoOfEverythingWithTheOutput) {
  const LiveBytes live;
  {
    const auto params = mlp_params();
    const at::Tensor y = call(kMlp, {leaf({64, 8})}, params)[0];
  }
  EXPECT_EQ(live.bytes(), 0);
}

TEST(Node, DoesNotHoldItselfByAnOutputThatItSaves) {
  const Tensors inputs{leaf({64, 8})};
  const LiveBytes live;
  {
    const Outputs outputs = call({"gelu", "make_extra_output", "silu"}, inputs);
    const auto output = static_cast<int64_t>(outputs[1].nbytes());
    EXPECT_EQ(live.bytes(), 2 * output) << "what silu saves is the extra output itself";
  }
  EXPECT_EQ(live.bytes(), 0);
}

TEST(Node, RetainedActivationsStay) {
  const at::Tensor x = leaf({64, 8});
  const auto params = mlp_params();
  const LiveBytes live;
  const at::Tensor y = call(kMlp, {x}, params)[0];
  const int64_t held = live.bytes();
  differentiate(y, {x}, /*retain=*/true);
  EXPECT_EQ(live.bytes(), held) << "neither more nor less";
  differentiate(y, {x});
  EXPECT_EQ(live.bytes(), static_cast<int64_t>(y.nbytes()));
}

TEST(Node, GradientsAccumulateOverCalls) {
  const at::Tensor x = leaf({3, 8});
  const auto params = mlp_params();
  Pipeline pipeline(ops_json(kMlp));
  const Tensors inputs{x};
  pipeline(inputs, params, true)[0].sum().backward();
  const at::Tensor once = params[1].grad().clone();
  pipeline(inputs, params, true)[0].sum().backward();
  EXPECT_TRUE(near(params[1].grad(), once * 2));
}

/// A backward that writes NaN.
const OpDef kNotANumber{
    .name = "test_not_a_number",
    .formula = "y = x, whose gradient is NaN",
    .forward = {{.name = "forward",
                 .reads = {"x"},
                 .writes = {"y"},
                 .run = [](Call& call) { call.out(0, call.in(0).clone()); }}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y"},
                  .writes = {"grad_x"},
                  .run = [](Call& call) { call.out(0, call.in(0) * NAN); }}},
};
TANDEM_REGISTER_OP(kNotANumber);

TEST(Node, AnomalyModeNamesTheStepThatWritesNaN) {
  const at::Tensor y = call({"identity", "test_not_a_number", "gelu"}, {leaf({2})})[0];
  torch::autograd::AnomalyMode::set_enabled(true, /*check_nan=*/true);
  EXPECT_ERROR(
      y.sum().backward(), c10::Error,
      "pipeline: expected finite gradients, got NaN from step test_not_a_number.backward of op 1",
      "which writes grad of x");
  torch::autograd::AnomalyMode::set_enabled(false);
}

TEST(Node, WrongNumberOfWorkspaces) {
  const Tensors inputs{random({2, 4})}, params{random({4, 4})}, one{random({1})};
  const Planned planned({"basic_linear"}, inputs, params);
  EXPECT_ERROR(run_pipeline(planned.shared_plan(), {inputs, params, one}, Path::direct),
               c10::ValueError, "pipeline: expected 0 workspace tensors, got 1",
               "Allocate them for the weights of this pipeline");
}

}  // namespace
}  // namespace tandem::testing::autograd_node
