// Backward programs of masks: only what the gradients that are given and asked for need.
#include <gmock/gmock.h>

#include "planner/planner.h"
#include "support/plans.h"

namespace tandem::testing::planner_slice {
namespace {

const Ops kTwoOutputs = {"gelu", "make_extra_output", "silu"};
const std::string kUnfused = R"({"fuse": false})";

TEST(Slices, AnUndefinedGradientTurnsASumIntoARename) {
  const Planned planned(kTwoOutputs, {leaf({2, 4})}, {}, kUnfused);
  EXPECT_EQ(planned.backward({{true, false}, {true}}),
            "silu.backward: grad of 2.silu.y, 0.gelu.y -> grad of 0.gelu.y\n"
            "gelu.backward: grad of 0.gelu.y, x -> grad of x\n");
  EXPECT_EQ(planned.backward({{false, true}, {true}}),
            "gelu.backward: grad of 0.gelu.y, x -> grad of x\n");
  EXPECT_EQ(planned.backward({{true, true}, {false}}), "");
}

TEST(Slices, WhatReachesNothingIsUndefined) {
  const Planned planned({"make_extra_output", "bias"}, {leaf({2, 4})}, {leaf({4})}, kUnfused);
  const auto extra_only = backward_plan(planned.plan(), {{false, true}, {true, true}});
  EXPECT_TRUE(exists(extra_only->gradients[0]));
  EXPECT_FALSE(exists(extra_only->gradients[1])) << "the bias is not behind the extra output";
  EXPECT_TRUE(extra_only->steps.empty());
}

TEST(Slices, OnlyWhatIsAskedForRuns) {
  const Planned planned({"basic_linear", "bias", "basic_linear"}, {leaf({2, 4})},
                        {leaf({4, 4}), leaf({4}), leaf({4, 4})}, kUnfused);
  EXPECT_EQ(planned.backward({{true}, {false, false, false, true}}),
            "basic_linear.grad_weight: grad of 2.basic_linear.y, 1.bias.y -> grad of "
            "2.basic_linear.weight\n");
  EXPECT_EQ(planned.backward({{true}, {false, false, true, false}}),
            "basic_linear.grad_x: grad of 2.basic_linear.y, 2.basic_linear.weight -> grad of "
            "1.bias.y\n"
            "bias.grad_bias: grad of 1.bias.y -> grad of 1.bias.bias\n");
}

TEST(Slices, AWriteAgainRunsForTheWeightAlone) {
  const Planned planned({"swiglu", "basic_linear"}, {leaf({2, 8})}, {leaf({3, 4})}, kUnfused);
  EXPECT_EQ(planned.backward({{true}, {false, true}}),
            "basic_linear.grad_x: grad of 1.basic_linear.y, 1.basic_linear.weight -> grad of "
            "0.swiglu.y\n"
            "swiglu.backward: grad of 0.swiglu.y, x -> 0.swiglu.y\n"
            "basic_linear.grad_weight: grad of 1.basic_linear.y, 0.swiglu.y -> grad of "
            "1.basic_linear.weight\n");
}

TEST(Slices, AreMadeOncePerMask) {
  const Planned planned(kTwoOutputs, {leaf({2, 4})}, {});
  const BackwardMask mask{{true, false}, {true}};
  EXPECT_EQ(planned.plan().backward_plans.find(mask), nullptr);
  const auto made = backward_plan(planned.plan(), mask);
  EXPECT_EQ(backward_plan(planned.plan(), mask), made);
  EXPECT_EQ(planned.plan().backward_plans.find(mask), made);
  EXPECT_NE(full_backward(planned.plan()), made);
  EXPECT_EQ(planned.plan().backward_plans.insert(mask, std::make_shared<BackwardPlan>()), made)
      << "the first of two threads wins";
}

TEST(Slices, OfManyMasksTheFirstAndTheRecentStay) {
  const Planned planned({"bias", "bias", "bias", "bias", "bias", "bias", "bias"}, {leaf({2, 4})},
                        Tensors(7, leaf({4})), kUnfused);
  const auto mask_of = [](int which) {
    BackwardMask mask{{true}, {}};
    for (int bit = 0; bit < 8; ++bit) mask.requested.push_back((which >> bit & 1) != 0);
    return mask;
  };
  const auto first = backward_plan(planned.plan(), mask_of(0));
  std::weak_ptr<const BackwardPlan> later;
  for (int which = 1; which < 256; ++which) {
    const auto made = backward_plan(planned.plan(), mask_of(which));
    EXPECT_EQ(backward_plan(planned.plan(), mask_of(which)), made);
    if (which == 100) later = made;
  }
  EXPECT_EQ(backward_plan(planned.plan(), mask_of(0)), first);
  EXPECT_TRUE(later.expired());
  EXPECT_EQ(planned.plan().backward_plans.all().size(), 64u);
}

}  // namespace
}  // namespace tandem::testing::planner_slice
