// What ops say when tensors do not fit them; and dropout and reshape, which depend on more than
// their input.
#include <ATen/TensorOperators.h>

#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::ops_error {
namespace {

TEST(LinearErrors, WeightIsNoMatrix) {
  EXPECT_ERROR(run({"basic_linear"}, {random({2, 4})}, {random({4})}), c10::ValueError,
               "linear: expected weight of shape [out_features, in_features], got [4]",
               "Pass a matrix");
}

TEST(LinearErrors, FeaturesDoNotFit) {
  EXPECT_ERROR(run({"basic_linear"}, {random({2, 5})}, {random({3, 4})}), c10::ValueError,
               "linear: expected x with 4 features in its last dimension, as weight [3, 4] has",
               "got x of shape [2, 5]", "Build the op with in_features=5 or reshape x");
  EXPECT_ERROR(run({"basic_linear", "bias"}, {random({})}, {random({3, 4}), random({3})}),
               c10::ValueError, "got x of shape []");
}

TEST(ReshapeErrors, ElementsDoNotFit) {
  EXPECT_ERROR(run({R"(reshape {"options": {"shape": [3, 3]}})"}, {random({2, 5})}, {}),
               c10::ValueError,
               "reshape: expected x with 9 elements for shape [3, 3], got x of shape [2, 5]",
               "Change the shape or give one size as -1");
  EXPECT_ERROR(run({R"(reshape {"options": {"shape": [3, -1]}})"}, {random({2, 5})}, {}),
               c10::ValueError, "expected x with a multiple of 3 elements");
}

TEST(Reshape, IsAViewWhereItCanBe) {
  const Ops ops = {R"(reshape {"options": {"shape": [-1, 5]}})"};
  const at::Tensor x = random({2, 10});
  EXPECT_TRUE(run(ops, {x}, {}).outputs[0].is_alias_of(x));
  const auto strided = run(ops, {random({10, 2}).t()}, {});
  EXPECT_TRUE(same(strided.outputs[0], random({10, 2}).t().reshape({-1, 5})));
}

TEST(Dropout, OneSeedPerOpAndTheMaskOfForwardInBackward) {
  const at::Tensor ones = random({100, 100}) * 0 + 1;
  const Ops dropout = {R"(dropout {"options": {"p": 0.5}})"};
  const at::Tensor x = ones.clone().requires_grad_(true);
  const auto result = run(dropout, {x}, {});
  const at::Tensor kept = result.outputs[0] != 0;
  EXPECT_TRUE(same(result.gradients[0] != 0, kept));
  const auto twice = run({dropout[0], dropout[0]}, {ones}, {});
  EXPECT_NEAR((twice.outputs[0] != 0).to(at::kDouble).mean().item<double>(), 0.25, 0.03)
      << "two ops draw two masks";
  EXPECT_TRUE(same(run(dropout, {x}, {}).outputs[0], result.outputs[0]))
      << "the generator's state decides";
}

TEST(Dropout, OfEverythingAndOfNothing) {
  const at::Tensor x = random({4, 4});
  EXPECT_TRUE(same(run({R"(dropout {"options": {"p": 0}})"}, {x}, {}).outputs[0], x));
  EXPECT_EQ(run({R"(dropout {"options": {"p": 1}})"}, {x}, {}).outputs[0].abs().max().item<float>(),
            0);
  EXPECT_TRUE(same(run({"dropout"}, {x}, {}, R"({"training": false})").outputs[0], x));
}

}  // namespace
}  // namespace tandem::testing::ops_error
