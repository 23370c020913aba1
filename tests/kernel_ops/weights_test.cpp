// The codes of weights: when they are made and when they are found.
#include "kernel_ops/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include "kernel_ops/quantize.h"
#include "support/tensors.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

using namespace kernel_ops;

/// A weight with its workspace; `forward` and `backward` say whether codes were made.
class RefreshWeight : public ::testing::Test {
 protected:
  void TearDown() override { set_check_weights(false); }

  bool refresh(bool backward, double epsilon = 0) {
    const int64_t before = refresh_counts().made;
    refresh_weight(weight_, codes_, dequant_scale_, amax_, stamp_, "e4m3", epsilon, false,
                   backward);
    return refresh_counts().made != before;
  }
  bool forward() { return refresh(false); }
  bool backward() { return refresh(true); }
  ::testing::AssertionResult is_current() {
    const auto fresh = dispatch<QuantizeCurrent>(weight_.detach(), "e4m3", 0.0, false);
    if (auto codes = same(codes_, fresh[0]); !codes) return codes;
    if (auto scale = same(dequant_scale_, fresh[1]); !scale) return scale;
    return same(amax_, fresh[2]);
  }

  at::Tensor weight_ = random({8, 6});
  at::Tensor codes_ = at::empty({8, 6}, at::kByte), dequant_scale_ = at::empty({}, at::kFloat),
             amax_ = at::empty({}, at::kFloat), stamp_ = at::zeros({kStampSize}, at::kLong);
};

/// An autocast region of this thread.
struct Region {
  Region() { enter_region(); }
  ~Region() { exit_region(); }
};

TEST_F(RefreshWeight, OutsideAnyRegionForwardAlwaysMakes) {
  EXPECT_EQ(current_region(), 0);
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  EXPECT_TRUE(forward());
}

TEST_F(RefreshWeight, OncePerOutermostRegion) {
  {
    const Region region;
    EXPECT_TRUE(forward());
    const int64_t reused = refresh_counts().reused;
    EXPECT_FALSE(forward());
    EXPECT_EQ(refresh_counts().reused, reused + 1);
    const Region inner;
    EXPECT_FALSE(forward());
  }
  const Region next;
  EXPECT_TRUE(forward());
}

TEST_F(RefreshWeight, BackwardAcceptsAnyRegion) {
  {
    const Region region;
    EXPECT_TRUE(forward());
  }
  EXPECT_FALSE(backward());
  const Region next;
  EXPECT_FALSE(backward());
}

TEST_F(RefreshWeight, AnInPlaceWriteIsSeen) {
  const Region region;
  forward();
  weight_.mul_(3);
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  weight_.add_(1);
  EXPECT_TRUE(backward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, AnotherTensorIsSeen) {
  const Region region;
  forward();
  weight_ = random({8, 6}, at::kFloat, 7);
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, OtherArgumentsAreSeen) {
  const Region region;
  forward();
  EXPECT_TRUE(refresh(false, /*epsilon=*/100.0));
  EXPECT_TRUE(refresh(true, /*epsilon=*/0.0));
}

TEST_F(RefreshWeight, AWriteBehindAutogradsBackIsSeenWhenSaid) {
  const Region region;
  forward();
  weight_.mutable_data_ptr<float>()[0] = 1000;
  EXPECT_FALSE(forward());
  EXPECT_FALSE(is_current());
  weights_changed();
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, TheDebugSwitchFindsStaleCodes) {
  const Region region;
  forward();
  set_check_weights(true);
  EXPECT_NO_THROW(forward());
  weight_.mutable_data_ptr<float>()[0] = 1000;
  EXPECT_THAT([&] { forward(); },
              ThrowsText<c10::ValueError>(
                  "weight codes: expected those of the weight as it is, got stale ones. Something ",
                  "tandem.weights_changed()"));
}

TEST_F(RefreshWeight, TheDebugSwitchKnowsZeros) {
  weight_.select(0, 3).zero_();
  const Region region;
  forward();
  set_check_weights(true);
  EXPECT_NO_THROW(forward());
}

TEST_F(RefreshWeight, InInferenceModeNothingIsFound) {
  const c10::InferenceMode inference;
  weight_ = random({8, 6});
  const Region region;
  EXPECT_TRUE(forward());
  EXPECT_TRUE(forward());
  EXPECT_TRUE(backward());
}

TEST_F(RefreshWeight, DtypesWithoutAKernelUseTheReference) {
  weight_ = random({8, 6}, at::kDouble);
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  weight_ = random({6, 8}, at::kBFloat16).t();
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, AWorkspaceOfAnotherShapeIsRefused) {
  weight_ = random({8, 7});
  EXPECT_THAT([&] { forward(); },
              ThrowsText<c10::ValueError>("refresh_weight_: expected a workspace of shape [8, 7]",
                                          "refresh_weight_: expected a workspace of shape ",
                                          "got [8, 6] and 5", "Allocate the workspace again"));
}

TEST_F(RefreshWeight, RegionsHaveNumbersOfTheirOwn) {
  int64_t first = 0;
  {
    const Region region;
    first = current_region();
    const Region inner;
    EXPECT_EQ(current_region(), first);
  }
  const Region second;
  EXPECT_GT(current_region(), first);
}

}  // namespace
}  // namespace tandem::testing
