// The scalar conversions: the table of edge cases, every midpoint, and scales.
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "kernels/quantize.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tandem::testing::kernels_fp8 {
namespace {

using kernels::Fp8Format;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Edge {
  float value;
  int e4m3, e5m2;
};

TEST(Fp8FromFloat, EdgeCases) {
  const Edge edges[] = {
      {-0.0f, 0x80, 0x80},
      {0x1p-10f, 0x00, 0x14},
      {std::nextafter(0x1p-10f, 1.0f), 0x01, 0x14},
      {0x1p-17f, 0x00, 0x00},
      {std::nextafter(0x1p-17f, 1.0f), 0x00, 0x01},
      {3 * 0x1p-10f, 0x02, 0x1A},
      {17.0f, 0x58, 0x4C},
      {19.0f, 0x5A, 0x4D},
      {464.0f, 0x7E, 0x5F},
      {std::nextafter(464.0f, 1e9f), 0x7E, 0x5F},
      {61440.0f, 0x7E, 0x7B},
      {-1e-30f, 0x80, 0x80},
      {FLT_MAX, 0x7E, 0x7B},
      {-FLT_TRUE_MIN, 0x80, 0x80},
      {kInfinity, 0x7E, 0x7B},
      {-kInfinity, 0xFE, 0xFB},
      {kNan, 0x7F, 0x7F},
      {-kNan, 0x7F, 0x7F},
  };
  for (const Edge& edge : edges) {
    EXPECT_EQ(kernels::fp8_from_float(edge.value, Fp8Format::e4m3), edge.e4m3) << edge.value;
    EXPECT_EQ(kernels::fp8_from_float(edge.value, Fp8Format::e5m2), edge.e5m2) << edge.value;
  }
}

TEST(Fp8Traits, AreConsistent) {
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    const kernels::Fp8Traits& traits = kernels::traits_of(format);
    const auto value = [&](uint32_t code) {
      return kernels::float_from_fp8(static_cast<uint8_t>(code), format);
    };
    EXPECT_EQ(value(traits.largest), traits.max);
    const float step = traits.max - value(traits.largest - 1);
    EXPECT_EQ(traits.overflow_from, traits.max + step / 2);
    EXPECT_EQ(value(1), std::bit_cast<float>(traits.min_subnormal_bits()));
    EXPECT_EQ(value(1u << traits.mantissa_bits), std::bit_cast<float>(traits.min_normal_bits()));
    EXPECT_EQ(traits.above, traits.largest + 1);
    EXPECT_TRUE(std::isnan(value(traits.first_nan)));
    EXPECT_FALSE(std::isnan(value(traits.first_nan - 1)));
  }
}

TEST(Fp8FromFloat, CodesSurviveTheirValueAndMidpointsGoToTheEvenCode) {
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    const int largest = static_cast<int>(kernels::traits_of(format).largest);
    for (int code = 0; code <= largest; ++code) {
      const float value = kernels::float_from_fp8(static_cast<uint8_t>(code), format);
      EXPECT_EQ(kernels::fp8_from_float(value, format), code);
      EXPECT_EQ(kernels::fp8_from_float(-value, format), code | 0x80);
      if (code == largest) continue;
      const float next = kernels::float_from_fp8(static_cast<uint8_t>(code + 1), format);
      const float midpoint = (value + next) / 2;
      EXPECT_LT(value, next);
      EXPECT_EQ(kernels::fp8_from_float(midpoint, format), code % 2 == 0 ? code : code + 1)
          << midpoint;
      EXPECT_EQ(kernels::fp8_from_float(std::nextafter(midpoint, 0.0f), format), code) << midpoint;
      EXPECT_EQ(kernels::fp8_from_float(std::nextafter(midpoint, kInfinity), format), code + 1)
          << midpoint;
    }
  }
}

uint32_t scale_bits(float amax, bool power_of_two, float big = FLT_MAX, double eps = 0) {
  return std::bit_cast<uint32_t>(
      kernels::scale_from_amax(amax, {Fp8Format::e4m3, {eps, power_of_two}}, big));
}

TEST(ScaleFromAmax, EdgeCases) {
  const float bfloat16_max = std::bit_cast<float>(0x7F7F0000u);
  for (const float unscaled : {0.0f, kInfinity, kNan}) {
    EXPECT_EQ(scale_bits(unscaled, false), 0x3F800000u) << unscaled;
    EXPECT_EQ(scale_bits(unscaled, true), 0x3F800000u) << unscaled;
  }
  EXPECT_EQ(scale_bits(1e-38f, false), 0x7F7FFFFFu);
  EXPECT_EQ(scale_bits(1e-38f, false, bfloat16_max), 0x7F7F0000u);
  EXPECT_EQ(scale_bits(1e-38f, true), 0x7F000000u);
  EXPECT_EQ(scale_bits(1.32e-36f, false), 0x7F7F54E5u);
  EXPECT_EQ(scale_bits(1.32e-36f, true), 0x7F000000u);
  EXPECT_EQ(scale_bits(3.0f, false), 0x43155555u);
  EXPECT_EQ(scale_bits(3.0f, true), 0x43000000u);
  EXPECT_EQ(scale_bits(448.0f, false), 0x3F800000u);
  EXPECT_EQ(scale_bits(449.0f, false), 0x3F7F6E0Au);
  EXPECT_EQ(scale_bits(449.0f, true), 0x3F000000u);
  EXPECT_EQ(scale_bits(FLT_MAX, false), 0x03E00001u);
  EXPECT_EQ(scale_bits(FLT_MAX, true), 0x03800000u);
}

TEST(ScaleFromAmax, EpsBoundsTheAmaxFromBelow) {
  EXPECT_EQ(scale_bits(3.0f, false, FLT_MAX, 6.0f), scale_bits(6.0f, false));
  EXPECT_EQ(scale_bits(0.0f, false, FLT_MAX, 6.0f), scale_bits(6.0f, false));
  EXPECT_EQ(scale_bits(7.0f, false, FLT_MAX, 6.0f), scale_bits(7.0f, false));
  EXPECT_EQ(scale_bits(kNan, false, FLT_MAX, 6.0f), 0x3F800000u);
}

#if defined(__x86_64__)
TEST(ScaleFromAmax, IgnoresFlushToZeroOfTheCaller) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  const uint32_t tiny = scale_bits(std::bit_cast<float>(0x00000001u), false),
                 eps = scale_bits(0.0f, false, FLT_MAX, 0x1p-140f);
  const unsigned during = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(tiny, 0x7F7FFFFFu);
  EXPECT_EQ(eps, 0x7F7FFFFFu);
  EXPECT_EQ(during & 0x8040, 0x8040u) << "the caller's mode has to return";
}
#endif

}  // namespace
}  // namespace tandem::testing::kernels_fp8
