// What is kept within a memory budget. Random pipelines: tests/python/test_memory_budget.py.
#include <gmock/gmock.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "core/call.h"
#include "pipeline/pipeline.h"
#include "support/plans.h"
#include "support/throws.h"
#include "tandem/tandem.h"

namespace tandem::testing::planner_budget {
namespace {

using ::testing::HasSubstr;

std::string within(double bytes_per_row) {
  return nlohmann::json{{"memory_budget", bytes_per_row}}.dump();
}

TEST(MemoryBudget, NumbersAreThoseWithoutOneAndWhatIsKeptFits) {
  const Ops ops = {
      "rms_norm",    "basic_linear", "bias", "swiglu", "dropout {\"options\": {\"p\": 0.5}}",
      "basic_linear"};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Tensors inputs{random({6, 8}, dtype).set_requires_grad(true)},
        params{random({8}, dtype, 2).set_requires_grad(true),
               random({16, 8}, dtype, 3).set_requires_grad(true),
               random({16}, dtype, 4).set_requires_grad(true),
               random({4, 8}, dtype, 5).set_requires_grad(true)};
    const RunResult expected = run(ops, inputs, params);
    for (const double budget : {1e9, 120.0, 64.0, 36.0, 32.0, 4.0, 0.0}) {
      const RunResult found = run(ops, inputs, params, within(budget));
      for (size_t i = 0; i < expected.outputs.size(); ++i)
        EXPECT_TRUE(same(found.outputs[i], expected.outputs[i])) << budget;
      for (size_t i = 0; i < expected.gradients.size(); ++i)
        EXPECT_TRUE(same(found.gradients[i], expected.gradients[i])) << budget << " " << i;
      EXPECT_LE(static_cast<double>(found.saved_bytes), 6 * budget + 8 /* the seed */) << budget;
    }
  }
}

TEST(MemoryBudget, TracedPlansHideWhatRunsAgain) {
  const Ops ops = {"basic_linear", "gelu"};
  const Tensors inputs{leaf({4, 8})}, params{leaf({8, 8})};
  const RunResult expected = run(ops, inputs, params, "{}", Path::dispatch);
  const RunResult found = run(ops, inputs, params, within(0), Path::dispatch);
  EXPECT_EQ(found.saved_bytes, 0);
  for (size_t i = 0; i < expected.gradients.size(); ++i)
    EXPECT_TRUE(same(found.gradients[i], expected.gradients[i])) << i;
}

TEST(MemoryBudget, RegionsNestAndAModuleHasItsOwn) {
  Sequential mlp({ops::linear(8, 16), ops::gelu(), ops::linear(16, 8)});
  const at::Tensor x = leaf({4, 8});
  mlp->forward(x);
  const int64_t whole = mlp->saved_bytes();
  EXPECT_GT(whole, 0);
  {
    const MemoryBudget none(0);
    mlp->forward(x);
    EXPECT_EQ(mlp->saved_bytes(), 0);
    {
      const Autocast fp8(true);
      const MemoryBudget unlimited(std::nullopt);
      mlp->forward(x);
      EXPECT_GT(mlp->saved_bytes(), 0);
    }
    mlp->set_memory_budget(1e6);
    EXPECT_EQ(mlp->memory_budget(), 1e6);
    mlp->forward(x);
    EXPECT_GE(mlp->saved_bytes(), whole);
    EXPECT_TRUE(mlp->verify(x).passed);
  }
  mlp->set_memory_budget(0);
  mlp->forward(x);
  EXPECT_EQ(mlp->saved_bytes(), 0);
  EXPECT_THAT(mlp->explain(), HasSubstr("memory budget: 0 bytes per row, 0 kept"));
  mlp->set_memory_budget(std::nullopt);
  mlp->forward(x);
  EXPECT_EQ(mlp->saved_bytes(), whole);
}

TEST(MemoryBudget, WithoutGradientsThereIsNothingToKeep) {
  const at::NoGradGuard no_grad;
  EXPECT_EQ(run({"basic_linear", "gelu"}, {leaf({4, 8})}, {leaf({8, 8})}, within(0)).saved_bytes,
            0);
}

const OpDef kLooksAtNumbers{
    .name = "budget_test_looks_at_numbers",
    .formula = "y = x",
    .forward = {{.name = "forward",
                 .reads = {"x"},
                 .writes = {"y"},
                 .run =
                     [](Call& call) {
                       TORCH_CHECK(!call.in(0).is_meta(), "no numbers");
                       call.out(0, call.in(0).clone());
                     }}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "x"},
                  .writes = {"grad_x"},
                  .run = [](Call& call) { call.out(0, call.in(0)); }}},
};

TEST(MemoryBudget, AStepWhoseSizesNobodyKnowsIsTold) {
  register_op(kLooksAtNumbers);
  EXPECT_ERROR(run({"budget_test_looks_at_numbers"}, {leaf({4, 8})}, {}, within(8)),
               c10::NotImplementedError,
               "memory_budget: expected steps that run on the meta device, where sizes come from",
               "got budget_test_looks_at_numbers: no numbers", "Leave the budget out");
}

TEST(MemoryBudget, AWrongOneIsRefused) {
  EXPECT_ERROR(MemoryBudget(-1.0), c10::ValueError,
               "memory_budget: expected a finite number of bytes per row that is not negative",
               "got -1");
  Sequential box({ops::gelu()});
  EXPECT_ERROR(box->set_memory_budget(std::numeric_limits<double>::infinity()), c10::ValueError,
               "memory_budget: expected a finite number", "got inf");
}

}  // namespace
}  // namespace tandem::testing::planner_budget
