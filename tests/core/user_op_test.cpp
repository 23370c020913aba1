// A user's op in C++: a table entry, two functions, a signature. It plans, keeps and differentiates
// as a built-in one.
#include <ATen/TensorOperators.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/relu.h>

#include <nlohmann/json.hpp>

#include "core/call.h"
#include "pipeline/pipeline.h"
#include "planner/registry.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::core_user_op {
namespace {

struct ShiftedReluOptions {
  double shift = 0;
};

void shifted_relu_forward(Call& call) {
  call.out(0, at::relu(call.in(0) - call.options<ShiftedReluOptions>().shift));
}

void shifted_relu_backward(Call& call) {
  enum Read { grad_y, y };
  call.out(0, call.in(grad_y) * (call.in(y) > 0));
}

const OpDef kShiftedRelu{
    .name = "shifted_relu",
    .formula = "y = max(x - shift, 0)",
    .signature = {ShiftedReluOptions{},
                  {{"shift", &ShiftedReluOptions::shift, at_least(0), "what x has to exceed"}}},
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = shifted_relu_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "y"},
                  .writes = {"grad_x"},
                  .run = shifted_relu_backward}},
    .context = {"y"},
};
TANDEM_REGISTER_OP(kShiftedRelu);

const Ops kOps = {"basic_linear", R"(shifted_relu {"options": {"shift": 0.25}})", "basic_linear"};

TEST(UserOp, PlansAsABuiltInOne) {
  const Planned planned(kOps, {random({3, 4})}, {leaf({6, 4}), leaf({2, 6})});
  EXPECT_EQ(planned.forward(),
            "basic_linear: x, 0.basic_linear.weight -> 0.basic_linear.y\n"
            "shifted_relu: 0.basic_linear.y -> 1.shifted_relu.y\n"
            "basic_linear: 1.shifted_relu.y, 2.basic_linear.weight -> 2.basic_linear.y\n");
  EXPECT_THAT(planned.kept(),
              ::testing::UnorderedElementsAre("1.shifted_relu.y", "2.basic_linear.weight", "x"))
      << "the output that both its backward and the product read, once";
}

TEST(UserOp, ComputesAndDifferentiates) {
  EXPECT_TRUE(gradients_match(
      function_of(kOps),
      {leaf({3, 4}, at::kDouble), leaf({6, 4}, at::kDouble, 2), leaf({2, 6}, at::kDouble, 3)}));
  const at::Tensor x = random({3, 4});
  const RunResult result = run({R"(shifted_relu {"options": {"shift": 0.25}})"}, {x}, {});
  EXPECT_TRUE(same(result.outputs[0], at::relu(x - 0.25)));
}

TEST(UserOp, ItsOptionsAreChecked) {
  EXPECT_ERROR(parse_description(description_of({R"(shifted_relu {"options": {"shift": -1}})"})),
               c10::ValueError,
               "shifted_relu: expected option shift to be a finite number >= 0, got -1. shift: "
               "what x has to exceed.");
}

/// y = 2 x, which counts its calls in a tensor of the caller.
const OpDef kCounted{
    .name = "test_counted",
    .formula = "y = 2 x, seen += 1",
    .buffers = {"seen"},
    .forward = {{.name = "forward",
                 .reads = {"x"},
                 .writes = {"y"},
                 .mutates = {"seen"},
                 .run =
                     [](Call& call) {
                       call.mutated(0).add_(1);
                       call.out(0, call.in(0) * 2);
                     }}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y"},
                  .writes = {"grad_x"},
                  .run = [](Call& call) { call.out(0, call.in(0) * 2); }}},
};
TANDEM_REGISTER_OP(kCounted);

const Ops kCountedOps = {R"(test_counted {"buffers": [0]})", R"(test_counted {"buffers": [0]})",
                         "relu"};

TEST(UserOp, MutatesABufferOfTheCallerOncePerCall) {
  const at::Tensor x = leaf({3}), seen = at::zeros({});
  Pipeline pipeline(ops_json(kCountedOps));
  for (int calls = 1; calls <= 2; ++calls) {
    const Outputs y = pipeline(Tensors{x}, {}, true, Buffers::of(Tensors{seen}));
    EXPECT_TRUE(same(y[0], at::relu(4 * x.detach())));
    y[0].sum().backward();
    EXPECT_EQ(seen.item<double>(), 2 * calls) << "two ops, and backward repeats neither";
  }
  EXPECT_ERROR(pipeline(Tensors{x}, {}, true), c10::ValueError,
               "pipeline: expected 1 buffers, got 0", "Pass one tensor for each that an op writes");
}

TEST(UserOp, AFusionPerformsTheMutationsThatItDeclaresAndIsRefusedWithout) {
  const at::Tensor x = leaf({3}), seen = at::zeros({});
  Fusion fusion{.name = "test_counted_relu",
                .pattern = {"test_counted", "relu"},
                .run = {.reads = {{0, "x"}}, .writes = {{0, "y"}, {1, "y"}}, .run = [](Call& call) {
                          if (!call.step().mutates.empty()) call.mutated(0).add_(10);
                          const at::Tensor z = call.in(0) * 2;
                          if (call.wants(0)) call.out(0, z);
                          call.out(1, at::relu(z));
                        }}};
  const auto explained = [&] {
    Pipeline pipeline(ops_json(kCountedOps));
    const Outputs y = pipeline(Tensors{x}, {}, true, Buffers::of(Tensors{seen}));
    EXPECT_TRUE(same(y[0], at::relu(4 * x.detach())));
    return pipeline.explain(ExplainFormat::text);
  };
  {
    FusionHandle handle = register_fusion(fusion);
    EXPECT_THAT(explained(), ::testing::HasSubstr("mutates 1.test_counted.seen, which a fused "));
    EXPECT_EQ(seen.item<double>(), 2);
    handle.remove();
  }
  fusion.run.mutates = {0};
  FusionHandle handle = register_fusion(fusion);
  EXPECT_THAT(explained(), ::testing::HasSubstr("made    test_counted_relu"));
  EXPECT_EQ(seen.item<double>(), 2 + 1 + 10);
  handle.remove();
}

}  // namespace
}  // namespace tandem::testing::core_user_op
