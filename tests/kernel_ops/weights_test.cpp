// The codes of weights: when they are made and when they are found.
#include "kernel_ops/weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
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
  bool refresh(bool backward, const char* quantizer = "fp8_e4m3") {
    const int64_t before = refresh_counts().made;
    refresh_weight(weight_, {codes_, dequant_scale_, {}, {}, {}, {}, amax_, stamp_},
                   tandem::quantizer(quantizer), backward);
    return refresh_counts().made != before;
  }
  bool forward() { return refresh(false); }
  bool backward() { return refresh(true); }
  ::testing::AssertionResult is_current() {
    const auto fresh =
        dispatch<Quantize>(weight_.detach(), std::optional<at::Tensor>(),
                           tandem::quantizer("fp8_e4m3"), std::array{true, true, true});
    if (auto codes = same(codes_, fresh[0]); !codes) return codes;
    if (auto scale = same(dequant_scale_, fresh[1]); !scale) return scale;
    return same(amax_, fresh[group_amax]);
  }

  at::Tensor weight_ = random({8, 6});
  at::Tensor codes_ = at::empty({8, 6}, at::kByte), dequant_scale_ = at::empty({}, at::kFloat),
             amax_ = at::empty({}, at::kFloat), stamp_ = at::zeros({kStampSize}, at::kLong);
};

/// An autocast region of this thread; one inside another is the same.
struct Region {
  Region() {
    if (outer == 0) set_region(new_region());
  }
  ~Region() { set_region(outer); }
  const int64_t outer = current_region();
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

TEST_F(RefreshWeight, AnotherTensorAtTheSameAddressIsSeen) {
  const Region region;
  alignas(64) float memory[48];
  for (float factor : {1.0f, 2.0f, 3.0f, 4.0f, 5.0f}) {
    std::fill(std::begin(memory), std::end(memory), 0.0f);
    weight_ = at::Tensor();  // its objects are free for the next one
    memory[3] = factor;
    weight_ = at::from_blob(memory, {8, 6}, at::kFloat);
    EXPECT_TRUE(forward()) << factor;
    EXPECT_TRUE(is_current());
    EXPECT_FALSE(forward());
  }
}

TEST_F(RefreshWeight, AnotherVersionCounterOfTheSameMemoryIsSeen) {
  const Region region;
  forward();
  const at::Tensor other = weight_.variable_data();
  other.mul_(2);  // moves a counter of its own
  weight_ = weight_.variable_data();
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, ATensorThatSharesTheCounterIsNotAnotherOne) {
  const Region region;
  forward();
  weight_ = weight_.detach();
  EXPECT_FALSE(forward());
  weight_.mul_(2);
  EXPECT_TRUE(forward());
}

TEST_F(RefreshWeight, AnotherLayoutOrDtypeOfTheSameMemoryIsSeen) {
  weight_ = random({8, 8});
  codes_ = at::empty({8, 8}, at::kByte);
  const Region region;
  forward();
  weight_ = weight_.t();
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  weight_ = random({8, 8}, at::kBFloat16);
  forward();
  weight_ = weight_.view(at::kHalf);
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, NoDeadWeightIsKeptAlive) {
  const Region region;
  for (int i = 0; i < 1000; ++i) {
    weight_ = random({8, 6}, at::kFloat, static_cast<uint64_t>(i));
    EXPECT_TRUE(forward());
    EXPECT_EQ(weight_.storage().use_count(), 1u);
    EXPECT_EQ(weight_.use_count(), 1u);
  }
}

TEST_F(RefreshWeight, AStampElsewhereThanOnTheCpuIsRefused) {
  stamp_ = at::zeros({kStampSize}, at::kInt);
  EXPECT_THAT([&] { forward(); }, ThrowsText<c10::ValueError>(
                                      "refresh_weight_: expected stamp of shape [8], Long, on cpu",
                                      "got CPUIntType of shape [8]"));
}

TEST_F(RefreshWeight, OtherArgumentsAreSeen) {
  const Region region;
  forward();
  const int64_t made = refresh_counts().made;
  refresh(false, "fp8_e4m3:current:eps=1");
  refresh(false, "fp8_e4m3:current:pow2=1");
  EXPECT_EQ(refresh_counts().made, made + 2) << "epsilon 1 is not powers of two";
  EXPECT_TRUE(refresh(false, "fp8_e4m3:current:eps=100"));
  EXPECT_TRUE(refresh(true));
}

TEST_F(RefreshWeight, CodesAreMadeAgainWhenWritesWereSaid) {
  const Region region;
  forward();
  EXPECT_FALSE(forward());
  weights_changed();
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, AWriteThatMovesNoVersionIsSeen) {
  const Region region;
  forward();
  weight_.mutable_data_ptr<float>()[7] = 1000;
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  weight_.mutable_data_ptr<float>()[7] = -1000;
  EXPECT_TRUE(backward());
  EXPECT_TRUE(is_current());
  EXPECT_FALSE(forward());
}

TEST_F(RefreshWeight, AWeightWithGapsIsNeverTakenForTheSame) {
  weight_ = random({8, 12}).slice(1, 0, 12, 2);
  const Region region;
  EXPECT_TRUE(forward());
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
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
              ThrowsText<c10::ValueError>(
                  "refresh_weight_: expected row_codes of shape [8, 7], Byte",
                  "got CPUByteType of shape [8, 6]", "Allocate the workspace again"));
}

TEST_F(RefreshWeight, ANegatedWeightIsAnotherOne) {
  const Region region;
  forward();
  EXPECT_FALSE(forward());
  weight_.set_data(at::_neg_view(weight_.data()));
  EXPECT_TRUE(weight_.is_neg());
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, ANegatedOrConjugateWorkspaceIsRefusedAndNotReleasedTwice) {
  const auto refuses = [&](at::Tensor& part, const char* name, const at::Tensor& view,
                           const char* got) {
    const at::Tensor before = std::exchange(part, view);
    EXPECT_THAT([&] { forward(); },
                ThrowsText<c10::ValueError>("refresh_weight_: expected ", name, got));
    EXPECT_EQ(weight_.use_count(), 1u);
    part = before;
  };
  const char* negated =
      " as it lies in memory, got a negated view (is_neg). Allocate the workspace by itself.";
  refuses(codes_, "row_codes", at::_neg_view(codes_), negated);
  refuses(dequant_scale_, "row_scale", at::_neg_view(dequant_scale_), negated);
  refuses(amax_, "amax", at::_neg_view(amax_), negated);
  refuses(stamp_, "stamp", at::_neg_view(stamp_), negated);
  refuses(amax_, "amax", at::complex(at::zeros({}), at::zeros({})).conj(),
          " of shape [], Float, on cpu, as the weight's workspace, got CPUComplexFloatType");
}

TEST_F(RefreshWeight, WithoutMemoryAllPartsAreOrNone) {
  const auto meta = [](const at::Tensor& tensor) { return tensor.to(at::kMeta); };
  for (at::Tensor* one : {&weight_, &codes_, &dequant_scale_, &amax_, &stamp_}) {
    const at::Tensor before = std::exchange(*one, meta(*one));
    EXPECT_THAT([&] { forward(); },
                ThrowsText<c10::ValueError>("refresh_weight_: expected ",
                                            ", as the weight's workspace, got "));
    *one = before;
  }
  for (at::Tensor* one : {&weight_, &codes_, &dequant_scale_, &amax_}) *one = meta(*one);
  EXPECT_FALSE(forward()) << "a stamp stays on the CPU";
  stamp_ = meta(stamp_);
  EXPECT_FALSE(forward());
}

}  // namespace
}  // namespace tandem::testing
