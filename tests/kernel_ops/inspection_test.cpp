// Statistics of quantizing against what they say they are.
#include "quantization/inspection.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "kernel_ops/quantize/quantize.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/tensors.h"

namespace tandem::testing::kernel_ops_inspection {
namespace {

QuantizationStatistics statistics(const at::Tensor& x, const std::string& text,
                                  std::optional<at::Tensor> given = {}) {
  const Quantizer& quantizer = tandem::quantizer(text);
  if (!given) given = given_for(quantizer);
  const Codes codes = codes_in(
      kernel_ops::Quantize::reference(
          {.x = x, .given = given, .quantizer = quantizer, .output_mask = {true, false, false}}),
      quantizer, /*row=*/true, /*column=*/false);
  return statistics_of(x, codes.in(Direction::row));
}

TEST(QuantizationStatistics, OfNumbersThatAreCodes) {
  const auto found = statistics(at::tensor({448.0f, -224.0f, 0.0f, 1.0f}), "fp8_e4m3:current");
  EXPECT_EQ(found.amax, 448);
  EXPECT_EQ(found.least_scale, 1);
  EXPECT_EQ(found.largest_scale, 1);
  EXPECT_EQ(found.underflow, 0);
  EXPECT_EQ(found.saturation, 0);
  EXPECT_EQ(found.signal_to_noise, std::numeric_limits<double>::infinity());
  EXPECT_EQ(found.not_finite, 0);
}

TEST(QuantizationStatistics, WhatIsLost) {
  // Of amax 448 the least number that is not rounded to 0 is above 2^-10.
  const auto small =
      statistics(at::tensor({448.0f, 0x1p-11f, -0x1p-12f, 0.0f}), "fp8_e4m3:current");
  EXPECT_EQ(small.underflow, 0.5);
  EXPECT_EQ(small.saturation, 0);
  EXPECT_NEAR(small.signal_to_noise, 10 * std::log10((448.0 * 448 + 5 * 0x1p-24) / (5 * 0x1p-24)),
              1e-9);

  // A scale of the past, 1: what is beyond 448 stays there.
  const auto large = statistics(at::tensor({448.0f, 500.0f, -1000.0f, 460.0f}), "fp8_e4m3:delayed",
                                at::full({1}, 1.0f));
  EXPECT_EQ(large.saturation, 0.5);
  EXPECT_EQ(large.amax, 1000);
  EXPECT_NEAR(
      large.signal_to_noise,
      10 * std::log10((448.0 * 448 + 500 * 500 + 1e6 + 460 * 460) / (52.0 * 52 + 552 * 552 + 144)),
      1e-9);
}

TEST(QuantizationStatistics, OfNumbersThatAreNotFinite) {
  const auto found =
      statistics(at::tensor({NAN, INFINITY, 1.0f, 2.0f}), "fp8_e4m3:delayed", at::full({1}, 1.0f));
  EXPECT_EQ(found.not_finite, 2);
  EXPECT_EQ(found.amax, 2);
  EXPECT_EQ(found.saturation, 0);
  EXPECT_EQ(statistics(at::full({3}, NAN), "fp8_e4m3:delayed", at::full({1}, 1.0f)).not_finite, 3);
  EXPECT_EQ(statistics(at::empty({0, 4}), "fp8_e4m3:current").amax, 0);
}

TEST(QuantizationStatistics, ABlockWhoseScaleIsZeroUnderflows) {
  at::Tensor x = at::full({1, 32}, 1e6f);
  x.slice(1, 16).fill_(1e-3f);
  const auto found = statistics(x, "nvfp4");
  EXPECT_EQ(found.underflow, 0.5);
  EXPECT_EQ(found.saturation, 0);
}

class StatisticsOf : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Formats, StatisticsOf, ::testing::ValuesIn(quantizer_texts()),
                         [](const auto& info) { return word_of(info.param); });

TEST_P(StatisticsOf, RandomNumbersAreWhatTheirBitsAllow) {
  const at::Tensor x = random({37, 75});
  const auto found = statistics(x, GetParam());
  EXPECT_EQ(found.amax, x.abs().max().item<double>());
  EXPECT_EQ(found.not_finite, 0);
  EXPECT_GT(found.signal_to_noise, 12) << "even four bits leave this";
  EXPECT_LT(found.signal_to_noise, 60);
  EXPECT_GT(found.least_scale, 0);
  EXPECT_LE(found.least_scale, found.largest_scale);
}

TEST(WatchedQuantizations, AreTakenOnce) {
  take_watched();
  keep_watched({.pipeline = 3, .op = 1, .role = "input"});
  const auto taken = take_watched();
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].pipeline, 3);
  EXPECT_EQ(taken[0].group, -1) << "no group";
  EXPECT_TRUE(take_watched().empty());
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_inspection
