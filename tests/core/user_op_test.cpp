// A user's op in C++: a table entry, two functions, options from JSON. It plans, keeps and differentiates as a built-in one.
#include <ATen/TensorOperators.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/relu.h>

#include <nlohmann/json.hpp>

#include "core/call.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

struct ShiftedReluOptions {
  double shift = 0;
};

Options parse_shifted_relu(const nlohmann::json& options) {
  ShiftedReluOptions parsed{options.value("shift", 0.0)};
  TORCH_CHECK_VALUE(parsed.shift >= 0, "shifted_relu: expected shift >= 0, got ", parsed.shift,
                    ". Turn its sign.");
  return std::make_shared<ShiftedReluOptions>(parsed);
}

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
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = shifted_relu_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "y"},
                  .writes = {"grad_x"},
                  .run = shifted_relu_backward}},
    .context = {"y"},
    .parse = parse_shifted_relu,
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
  EXPECT_THAT(
      [] { parse_description(description_of({R"(shifted_relu {"options": {"shift": -1}})"})); },
      ThrowsText<c10::ValueError>("shifted_relu: expected shift >= 0, got -1"));
}

}  // namespace
}  // namespace tandem::testing
