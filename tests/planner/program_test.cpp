// The plan cache: one plan per key, one program per description, found without a lock.
#include "planner/program.h"

#include <gmock/gmock.h>

#include "planner/planner.h"
#include "planner/registry.h"
#include "support/plans.h"

namespace tandem::testing::planner_program {
namespace {

PlanKey key_for(const Tensors& tensors, PlanKey::Call call = {.grad_mode = true}) {
  PlanKey key(call);
  for (const at::Tensor& tensor : tensors) key.add(tensor, call.grad_mode);
  return key;
}

TEST(PlanCache, SameKeySamePlan) {
  Program program(description_of({"gelu"}));
  const int64_t before = Program::plans_made();
  const auto plan = program.plan_for(key_for({leaf({2, 4})}));
  EXPECT_EQ(program.plan_for(key_for({leaf({5, 7})})), plan) << "a plan depends on no size";
  EXPECT_EQ(program.plan_for(key_for({random({4, 2}).t().requires_grad_(true)})), plan)
      << "nor on a stride";
  EXPECT_EQ(Program::plans_made(), before + 1);
}

TEST(PlanCache, WhatAPlanDependsOnIsInItsKey) {
  Program program(description_of({"gelu"}));
  const Tensors tensors{leaf({2, 4})};
  const std::vector<PlanKey> keys = {
      key_for(tensors),
      key_for(tensors, {.grad_mode = false}),
      key_for(tensors, {.grad_mode = true, .traced = true}),
      key_for(tensors, {.grad_mode = true, .autocast_dtype = at::kBFloat16}),
      key_for({random({2, 4})}),
      key_for({leaf({2, 4}, at::kBFloat16)}),
      key_for({leaf({2, 4}, at::kDouble)}),
  };
  std::vector<const Plan*> plans;
  for (const PlanKey& key : keys) {
    EXPECT_THAT(plans, ::testing::Not(::testing::Contains(program.plan_for(key).get())));
    plans.push_back(program.plan_for(key).get());
  }
  for (size_t i = 0; i < keys.size(); ++i)
    EXPECT_EQ(program.plan_for(keys[i]).get(), plans[i]) << "several plans are kept";
  std::vector<const Plan*> listed;
  for (const auto& plan : program.plans()) listed.push_back(plan.get());
  EXPECT_EQ(listed, plans) << "in the order in which they were made";
}

TEST(PlanCache, TheKeyTellsWhatItWasMadeFrom) {
  const PlanKey key = key_for({leaf({2}, at::kHalf), at::Tensor(), random({2}, at::kDouble)});
  EXPECT_EQ(key.tensor_count(), 3u);
  EXPECT_TRUE(key.tensor(0).defined);
  EXPECT_TRUE(key.tensor(0).requires_grad);
  EXPECT_EQ(key.tensor(0).dtype, at::kHalf);
  EXPECT_FALSE(key.tensor(1).defined);
  EXPECT_FALSE(key.tensor(2).requires_grad);
  EXPECT_EQ(key.tensor(2).device, at::Device(at::kCPU));
  EXPECT_TRUE(key.call().grad_mode);
  EXPECT_EQ(key.call().autocast_dtype, at::ScalarType::Undefined);
}

/// One of as many descriptions as there are numbers.
std::string numbered(int number) {
  return description_of(
      {R"(constant_scale {"options": {"factor": )" + std::to_string(number) + "}}"});
}

TEST(PlanCache, ProgramsDieButTheRecentOnes) {
  const int64_t before = Program::alive();
  const std::weak_ptr<Program> first = program_of(numbered(0));
  const auto held = program_of(numbered(1));
  EXPECT_FALSE(first.expired()) << "one of the recent ones";
  for (int i = 2; i < 1000; ++i) program_of(numbered(i));
  EXPECT_TRUE(first.expired());
  EXPECT_LE(Program::alive(), before + static_cast<int64_t>(kRecentPrograms) + 1);
  EXPECT_EQ(program_of(numbered(1)), held) << "one per description, as long as somebody holds it";
  EXPECT_EQ(program_of(numbered(0))->text(), numbered(0)) << "made again";
}

TEST(PlanCache, OfLongDescriptionsFewerStay) {
  const int64_t before = Program::alive();
  for (int i = 0; i < 20; ++i) {
    Ops ops(4000, "relu");
    ops.push_back(R"(constant_scale {"options": {"factor": )" + std::to_string(i) + "}}");
    const std::weak_ptr<Program> program = program_of(description_of(ops));
    EXPECT_FALSE(program.expired()) << "the last one";
  }
  EXPECT_LE(Program::alive(), before + 20);
  const size_t bytes = description_of(Ops(4000, "relu")).size();
  EXPECT_LE(Program::alive(), static_cast<int64_t>(kRecentProgramBytes / bytes) + 2);
}

TEST(PlanCache, ProgramsOfRemovedFusionsDie) {
  const std::weak_ptr<Program> program = program_of(description_of(
      {"gelu"}, R"({"fusions_version": )" + std::to_string(fusions_version() + 1) + "}"));
  bump_fusions_version();
  EXPECT_FALSE(program.expired());
  bump_fusions_version();
  EXPECT_TRUE(program.expired());
}

TEST(PlanCache, PlansOutliveTheirProgram) {
  auto program = std::make_unique<Program>(description_of({"gelu"}));
  const auto plan = program->plan_for(key_for({leaf({2, 4})}));
  program.reset();
  EXPECT_EQ(plan.use_count(), 1);
  EXPECT_FALSE(backward_plan(*plan, {{true}, {true}})->steps.empty());
}

TEST(PlanCache, OfManyKeysTheFirstAndTheRecentStay) {
  Program program(description_of({"bias", "bias", "bias", "bias", "bias", "bias", "bias"}));
  const auto plan_of = [&](int which) {
    Tensors tensors;
    for (int bit = 0; bit < 8; ++bit)
      tensors.push_back(random(bit == 0 ? std::vector<int64_t>{2, 4} : std::vector<int64_t>{4})
                            .requires_grad_((which >> bit & 1) != 0));
    return program.plan_for(key_for(tensors));
  };
  const auto first = plan_of(0);
  const std::weak_ptr<const Plan> recent = plan_of(100);
  for (int i = 1; i < 100; ++i) plan_of(i);
  EXPECT_FALSE(recent.expired()) << "among the first";
  std::weak_ptr<const Plan> later = plan_of(101);
  for (int i = 102; i < 110; ++i) plan_of(i);
  EXPECT_EQ(plan_of(101), later.lock()) << "asked for a short time ago";
  for (int i = 110; i < 256; ++i) plan_of(i);
  EXPECT_TRUE(later.expired());
  EXPECT_EQ(plan_of(0), first);
  EXPECT_EQ(program.plans().size(), 64u);
}

}  // namespace
}  // namespace tandem::testing::planner_program
