// What is kept and what is written again instead.
#include <gmock/gmock.h>

#include "support/plans.h"

namespace tandem::testing::planner_keep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

TEST(Kept, ANormReadByTheActivationBehindItIsKept) {
  // The norm's backward needs the activation's gradient, which reads y: whoever could write y again
  // comes too late.
  const Planned planned({"rms_norm", "swiglu"}, {leaf({2, 4})}, {leaf({4})});
  EXPECT_THAT(planned.kept(),
              ElementsAre("0.rms_norm.y", "x", "0.rms_norm.weight", "0.rms_norm.inv_rms"));
  EXPECT_THAT(planned.backward(), HasSubstr("-> grad of x, grad of 0.rms_norm.weight\n"));
}

TEST(Kept, AnActivationReadByTheNormBehindItIsKept) {
  const Planned planned({"gelu", "layer_norm"}, {leaf({2, 4})}, {leaf({4}), leaf({4})});
  EXPECT_THAT(planned.kept(),
              UnorderedElementsAre("0.gelu.y", "1.layer_norm.weight", "1.layer_norm.mean",
                                   "1.layer_norm.inv_std", "x"));
}

TEST(Kept, AnOutputIsFreeToKeep) {
  const Planned planned({"gelu", "make_extra_output", "basic_linear"}, {leaf({2, 4})},
                        {leaf({3, 4})});
  EXPECT_THAT(planned.kept(), UnorderedElementsAre("0.gelu.y", "2.basic_linear.weight", "x"))
      << "the caller holds y anyway";
  EXPECT_THAT(planned.backward(), HasSubstr("gelu.backward: grad of 0.gelu.y, x -> grad of x\n"));
}

TEST(Kept, ALayerNormsBiasIsReadOnlyWhereYIsWrittenAgain) {
  const Tensors params{leaf({4}), leaf({4}), leaf({3, 4})};
  const Planned again({"layer_norm", "basic_linear"}, {leaf({2, 4})}, params);
  EXPECT_THAT(again.kept(), ::testing::Contains("0.layer_norm.bias"));
  EXPECT_THAT(again.kept(), Not(::testing::Contains("0.layer_norm.y")));
  const Planned alone({"layer_norm"}, {leaf({2, 4})}, {params[0], params[1]});
  EXPECT_THAT(alone.kept(), UnorderedElementsAre("x", "0.layer_norm.weight", "0.layer_norm.mean",
                                                 "0.layer_norm.inv_std"));
}

TEST(Kept, OneTensorForSeveralReaders) {
  const Planned planned({to_channel(), "gelu", from_channel(), "silu"}, {leaf({2, 4})}, {});
  EXPECT_THAT(planned.kept(), ElementsAre("2.add_extra_input.y", "x"));
}

TEST(Kept, NumbersOfEveryMaskAreThoseOfTheFullBackward) {
  const Ops ops = {"rms_norm", "basic_linear", "swiglu", "basic_linear"};
  const auto tensors = [](unsigned mask) {
    Tensors all{random({3, 4}), random({4}, at::kFloat, 2), random({12, 4}, at::kFloat, 3),
                random({5, 6}, at::kFloat, 4)};
    for (size_t i = 0; i < all.size(); ++i) all[i].set_requires_grad((mask >> i & 1) != 0);
    return all;
  };
  const auto gradients = [&](unsigned mask) {
    const Tensors all = tensors(mask);
    return run(ops, {all[0]}, {all[1], all[2], all[3]}).gradients;
  };
  const auto full = gradients(15);
  for (unsigned mask = 1; mask < 15; ++mask) {
    const auto some = gradients(mask);
    for (size_t i = 0; i < 4; ++i) {
      if ((mask >> i & 1) == 0) continue;
      EXPECT_TRUE(same(some[i], full[i])) << mask << " " << i;
    }
  }
}

TEST(Kept, UnusedResultsOfForwardAreNotWritten) {
  const Planned planned({"gelu"}, {random({2, 4})}, {});
  EXPECT_EQ(planned.forward(), "gelu: x -> 0.gelu.y\n");
  const Planned trained({"reshape {\"options\": {\"shape\": [8]}}"}, {random({2, 4})}, {});
  EXPECT_EQ(trained.forward(), "reshape: x -> 0.reshape.y\n");
}

}  // namespace
}  // namespace tandem::testing::planner_keep
