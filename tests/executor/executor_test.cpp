// The executor: dead buffers serve again, nobody else's memory does.
#include "executor/executor.h"

#include <ATen/TensorOperators.h>

#include <set>

#include "autograd/call.h"
#include "planner/program.h"
#include "support/memory.h"
#include "support/plans.h"

namespace tandem::testing::executor_executor {
namespace {

constexpr int64_t kRows = 256, kCols = 128;  // 128 KiB: above what is worth keeping

std::vector<const void*> written;  // where each step's results were, in order

/// y = x + 1, noting where y lies.
void plus_one(Call& call) {
  at::Tensor y = call.frame().allocate(call.in(0).sizes(), at::kFloat, call.in(0));
  y.copy_(call.in(0)).add_(1);
  written.push_back(y.const_data_ptr());
  call.out(0, std::move(y));
}
void pass_on(Call& call) {
  at::Tensor grad = call.frame().allocate(call.in(0).sizes(), at::kFloat, call.in(0));
  grad.copy_(call.in(0));
  written.push_back(grad.const_data_ptr());
  call.out(0, std::move(grad));
}

const OpDef kPlusOne{
    .name = "test_plus_one",
    .formula = "y = x + 1",
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = plus_one}},
    .backward = {{.name = "backward", .reads = {"grad_y"}, .writes = {"grad_x"}, .run = pass_on}},
};
TANDEM_REGISTER_OP(kPlusOne);

const OpDef kPlusOneKept{
    .name = "test_plus_one_kept",
    .formula = "y = x + 1, whose backward reads y",
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = plus_one}},
    .backward =
        {{.name = "backward", .reads = {"grad_y", "y"}, .writes = {"grad_x"}, .run = pass_on}},
};
TANDEM_REGISTER_OP(kPlusOneKept);

class ExecutorMemory : public ::testing::Test {
 protected:
  void SetUp() override { written.clear(); }
  size_t distinct() const { return std::set<const void*>(written.begin(), written.end()).size(); }
  at::Tensor x_ = random({kRows, kCols});
  CachedMemory cached_;
};

TEST_F(ExecutorMemory, ServesAgainInAChain) {
  const Ops ops(6, "test_plus_one");
  const RunResult result = run(ops, {x_}, {});
  EXPECT_TRUE(near(result.outputs[0], x_ + 6));
  EXPECT_EQ(written.size(), 6u);
  EXPECT_EQ(distinct(), 2u) << "a value is dead when the one after it is written";
}

TEST_F(ExecutorMemory, OfArgumentsIsNeverTaken) {
  const at::Tensor before = x_.clone();
  run(Ops(6, "test_plus_one"), {x_}, {});
  EXPECT_TRUE(same(x_, before));
  for (const void* memory : written) EXPECT_NE(memory, x_.const_data_ptr());
}

TEST_F(ExecutorMemory, OfOutputsIsNeverTaken) {
  const RunResult result =
      run({"test_plus_one", "make_extra_output", "test_plus_one", "test_plus_one", "test_plus_one"},
          {x_}, {});
  EXPECT_TRUE(near(result.outputs[1], x_ + 1));
  EXPECT_TRUE(near(result.outputs[0], x_ + 4));
}

TEST_F(ExecutorMemory, OfKeptValuesIsNeverTaken) {
  x_.requires_grad_(true);
  run({"test_plus_one_kept", "test_plus_one_kept", "test_plus_one_kept", "test_plus_one"}, {x_},
      {});
  ASSERT_EQ(written.size(), 8u);
  EXPECT_EQ(std::set<const void*>(written.begin(), written.begin() + 4).size(), 4u);
}

TEST_F(ExecutorMemory, ServesAgainInBackwardButGradientsGivenAndReturnedStay) {
  x_.requires_grad_(true);
  const RunResult result = run(Ops(6, "test_plus_one"), {x_}, {});
  EXPECT_TRUE(same(result.gradients[0], random({kRows, kCols}, at::kFloat, 51)));
  EXPECT_EQ(std::set<const void*>(written.begin() + 6, written.end()).size(), 2u);
}

TEST_F(ExecutorMemory, OfAReshapedValueIsNotTaken) {
  const RunResult result = run({"test_plus_one", R"(reshape {"options": {"shape": [-1]}})",
                                R"(reshape {"options": {"shape": [256, 128]}})", "test_plus_one",
                                "make_extra_output", "test_plus_one"},
                               {x_}, {});
  EXPECT_TRUE(near(result.outputs[0], x_ + 3));
  EXPECT_TRUE(near(result.outputs[1], x_ + 2));
}

TEST(Executor, TakesWhatTheCallerCouldNotHaveKept) {
  // Two calls in turn give equal results: nothing of the first is left in the memory of the second.
  const Ops ops = {"rms_norm", "basic_linear", "bias", "gelu", "basic_linear", "bias"};
  const Tensors inputs{leaf({200, 128})},
      params{leaf({128}), leaf({256, 128}), leaf({256}), leaf({128, 256}), leaf({128})};
  const auto first = run(ops, inputs, params), second = run(ops, inputs, params);
  for (size_t i = 0; i < first.gradients.size(); ++i)
    EXPECT_TRUE(same(first.gradients[i], second.gradients[i]));
  EXPECT_TRUE(same(first.outputs[0], second.outputs[0]));
}

}  // namespace
}  // namespace tandem::testing::executor_executor
