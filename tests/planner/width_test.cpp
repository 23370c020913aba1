// Many of everything: outputs, ops, values.
#include <ATen/TensorOperators.h>

#include <cmath>

#include "planner/planner.h"
#include "support/plans.h"

namespace tandem::testing::planner_width {
namespace {

TEST(Widths, SeventyOutputsDifferentiatedAlone) {
  Ops ops;
  for (size_t i = 0; i < 70; ++i)
    for (const char* op : {"make_extra_output", R"(constant_scale {"options": {"factor": 0.98}})"})
      ops.emplace_back(op);
  const at::Tensor x = leaf({3});
  const auto function = function_of(ops);
  for (const size_t output : {0, 1, 63, 64, 65, 69}) {
    const auto outputs = function({x});
    ASSERT_EQ(outputs.size(), 71u);
    const at::Tensor grad = random({3}, at::kFloat, output);
    const auto got = gradients_of({outputs[output]}, {x}, {grad});
    const double power = output == 0 ? 70 : static_cast<double>(output - 1);
    EXPECT_TRUE(near(got[0], grad * std::pow(0.98, power), 1.0)) << output;
  }
}

TEST(Widths, FortyThousandOpsArePlannedAndRun) {
  const Ops ops(40000, "identity"), scales(40000, R"(constant_scale {"options": {"factor": -1}})");
  const at::Tensor x = leaf({2});
  EXPECT_TRUE(same(function_of(ops)({x})[0].detach(), x.detach()));
  const Planned planned(scales, {x}, {});
  EXPECT_GT(planned.plan().types.size(), 80000u);
  EXPECT_EQ(planned.plan().forward.size(), 40000u);
  EXPECT_EQ(planned.plan().forward.back().covers.front().op, 39999u);
  const auto y = function_of(scales)({x});
  EXPECT_TRUE(same(y[0].detach(), x.detach()));
  EXPECT_TRUE(same(gradients_of(y, {x}, {x.detach()})[0], x.detach()));
}

}  // namespace
}  // namespace tandem::testing::planner_width
