// Delayed scaling: what an update does to a history and a scale.
#include "kernels/delayed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tandem::testing::kernels_delayed {
namespace {

using kernels::AmaxAlgorithm;
using kernels::DelayedScaling;
using kernels::Fp8Format;
using ::testing::ElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One slot.
struct Slot {
  std::vector<float> history;
  float quant_scale = 1.0f;

  void update(const DelayedScaling& scaling = {}, const float* reduced_amax = nullptr) {
    kernels::update_delayed({history.data(), &quant_scale, history.size(), 1}, scaling,
                            reduced_amax);
  }
};

TEST(Delayed, ExampleOfTheNumericsPage) {
  Slot slot{{3, 1, 2, 5}};
  slot.update();
  EXPECT_THAT(slot.history, ElementsAre(0, 2, 5, 3));
  EXPECT_EQ(std::bit_cast<uint32_t>(slot.quant_scale), 0x42B33333u);
  slot.update();
  EXPECT_THAT(slot.history, ElementsAre(0, 2, 5, 3)) << "a slot that was not used forgets nothing";
  EXPECT_EQ(std::bit_cast<uint32_t>(slot.quant_scale), 0x42B33333u);
  slot.history[0] = kInfinity;
  slot.update();
  EXPECT_THAT(slot.history, ElementsAre(0, 5, 3, kInfinity));
  EXPECT_EQ(std::bit_cast<uint32_t>(slot.quant_scale), 0x42B33333u);
  for (int step = 0; step < 3; ++step) {
    slot.history[0] = 7;
    slot.update();
    EXPECT_EQ(std::bit_cast<uint32_t>(slot.quant_scale), 0x42B33333u) << step;
  }
  EXPECT_THAT(slot.history, ElementsAre(0, 7, 7, 7))
      << "infinity counted in this window and has left it";
  slot.history[0] = 7;
  slot.update();
  EXPECT_EQ(slot.quant_scale, 64.0f);
}

TEST(Delayed, TheOldestValueStillCountsAsItLeaves) {
  Slot slot{{1, 100, 2, 3}};
  slot.update();
  EXPECT_EQ(slot.quant_scale, 4.48f);
  EXPECT_THAT(slot.history, ElementsAre(0, 2, 3, 1));
}

TEST(Delayed, MostRecentLooksAtRowZeroAlone) {
  Slot slot{{4, 100, 2, kNan}};
  slot.update({Fp8Format::e5m2, 0, AmaxAlgorithm::most_recent});
  EXPECT_EQ(slot.quant_scale, 14336.0f);
  slot.history[0] = kNan;
  slot.update({Fp8Format::e5m2, 0, AmaxAlgorithm::most_recent});
  EXPECT_EQ(slot.quant_scale, 14336.0f);
  EXPECT_TRUE(std::isnan(slot.history[3]));
}

TEST(Delayed, MaxSkipsNan) {
  Slot slot{{4, kNan, -kNan, 7}};
  slot.update();
  EXPECT_EQ(slot.quant_scale, 64.0f);
  Slot nothing_else{{kNan, kNan, 0, 0}, 3.0f};
  nothing_else.update();
  EXPECT_EQ(nothing_else.quant_scale, 3.0f);
  EXPECT_EQ(nothing_else.history[0], 0.0f);
  EXPECT_TRUE(std::isnan(nothing_else.history[3]));
}

TEST(Delayed, ShortHistories) {
  Slot one{{3.5f}};
  one.update();
  EXPECT_THAT(one.history, ElementsAre(0));
  EXPECT_EQ(one.quant_scale, 128.0f);
  Slot two{{3.5f, 7}};
  two.update();
  EXPECT_THAT(two.history, ElementsAre(0, 3.5f));
  EXPECT_EQ(two.quant_scale, 64.0f);
}

TEST(Delayed, MarginAndOverflow) {
  Slot slot{{7, 0}};
  slot.update({Fp8Format::e4m3, 2});
  EXPECT_EQ(slot.quant_scale, 16.0f);
  Slot tiny{{FLT_TRUE_MIN, 0}};
  tiny.update();
  EXPECT_EQ(tiny.quant_scale, FLT_MAX);
  Slot negative{{7, 0}};
  negative.update({Fp8Format::e4m3, -3});
  EXPECT_EQ(negative.quant_scale, 512.0f);
}

TEST(Delayed, ReducedAmaxCountsWhereItIsNotZero) {
  const float larger = 14.0f, zero = 0.0f;
  Slot slot{{7, 0}};
  slot.update({}, &larger);
  EXPECT_THAT(slot.history, ElementsAre(0, 14));
  EXPECT_EQ(slot.quant_scale, 32.0f);
  Slot unused_here{{0, 1}};
  unused_here.update({}, &larger);
  EXPECT_THAT(unused_here.history, ElementsAre(0, 14));
  Slot own{{7, 0}};
  own.update({}, &zero);
  EXPECT_THAT(own.history, ElementsAre(0, 7));
  EXPECT_EQ(own.quant_scale, 64.0f);
}

TEST(Delayed, SlotsAreColumns) {
  std::vector<float> history = {7, 0, 14, 1, 2, 3};
  std::vector<float> quant_scale = {1, 5, 1};
  kernels::update_delayed({history.data(), quant_scale.data(), 2, 3}, {});
  EXPECT_THAT(history, ElementsAre(0, 0, 0, 7, 2, 14));
  EXPECT_THAT(quant_scale, ElementsAre(64, 5, 32));
}

#if defined(__x86_64__)
TEST(Delayed, IgnoresFlushToZeroOfTheCaller) {
  Slot got{{FLT_TRUE_MIN, 0, 0x1p-140f}}, scaled{{1.0f, 0}};
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  got.update();
  scaled.update({Fp8Format::e4m3, 140});
  const unsigned during = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(during & 0x8040, 0x8040u) << "the caller's mode has to return";
  EXPECT_EQ(got.quant_scale, FLT_MAX);
  EXPECT_THAT(got.history, ElementsAre(0, 0x1p-140f, FLT_TRUE_MIN));
  EXPECT_EQ(scaled.quant_scale, 448 * 0x1p-140f);
}
#endif

}  // namespace
}  // namespace tandem::testing::kernels_delayed
