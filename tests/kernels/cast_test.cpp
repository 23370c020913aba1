// Public casts against the scalar reference, bitwise, on every target; and stochastic rounding
// against its definition.
#include "kernels/cast.h"

#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/philox.h"
#include "support/matrix.h"
#include "support/targets.h"
#include "support/thread_pool.h"
#include "support/ulp.h"

namespace tandem::testing::kernels_cast {
namespace {

using kernels::CastFormat;
using kernels::ConstRows;
using kernels::Element;
using kernels::Rounding;

constexpr CastFormat kFormats[] = {CastFormat::e4m3, CastFormat::e5m2, CastFormat::e2m1,
                                   CastFormat::e8m0};
const char* name_of(CastFormat format) {
  constexpr const char* kNames[] = {"e4m3", "e5m2", "e2m1", "e8m0"};
  return kNames[static_cast<size_t>(format)];
}

std::vector<kernels::Cast> casts_to(CastFormat format) {
  std::vector<kernels::Cast> casts{{format}, {format, false}};
  if (format == CastFormat::e8m0) return casts;
  for (const bool saturates : {true, false})
    casts.push_back({format, saturates, Rounding::stochastic, 0x0123456789ABCDEF, 3});
  return casts;
}

/// The index of the first code that is not the reference's, or nothing.
::testing::AssertionResult is_right(ConstRows x, const std::vector<float>& values,
                                    const kernels::Cast& cast) {
  std::vector<uint8_t> got(values.size(), 0xA5), expected(values.size());
  kernels::cpu::cast_to_codes(x, cast, got.data());
  for (size_t i = 0; i < values.size(); ++i)
    expected[i] = kernels::cast_reference(values[i], cast, i);
  return same_bits<uint8_t>(got, expected);
}

class Cast : public ::testing::TestWithParam<std::tuple<int64_t, CastFormat>> {
 protected:
  void SetUp() override { target_.emplace(std::get<0>(GetParam())); }
  CastFormat format() const { return std::get<1>(GetParam()); }
  std::optional<ScopedTarget> target_;
};
INSTANTIATE_TEST_SUITE_P(Cpu, Cast,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::ValuesIn(kFormats)),
                         [](const auto& info) {
                           return target_name(std::get<0>(info.param)) + "_" +
                                  name_of(std::get<1>(info.param));
                         });

TEST_P(Cast, EveryPatternOfSixteenBits) {
  for (const Element element : {Element::bfloat16, Element::float16}) {
    std::vector<uint16_t> x(65536);
    std::vector<float> values;
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<uint16_t>(i);
      values.push_back(value_of_bits(x[i], element));
    }
    for (const kernels::Cast& cast : casts_to(format()))
      EXPECT_TRUE(is_right({x.data(), element, 64, 1024, 1024}, values, cast));
  }
}

TEST_P(Cast, TenMillionPatternsOfFloat32) {
  std::mt19937_64 engine(20243);
  constexpr size_t kRows = 100, kCols = 1000;
  std::vector<float> x(kRows * kCols);
  for (int round = 0; round < 100; ++round) {
    for (float& value : x) value = std::bit_cast<float>(static_cast<uint32_t>(engine()));
    const auto casts = casts_to(format());
    EXPECT_TRUE(is_right({x.data(), Element::float32, kRows, kCols, kCols}, x,
                         casts[static_cast<size_t>(round) % casts.size()]));
    EXPECT_TRUE(is_right({x.data(), Element::float32, kRows, kCols, kCols}, x, casts[0]));
  }
}

TEST_P(Cast, EveryWidthAndStride) {
  for (const Element element : kElements)
    for (const size_t cols : {1, 3, 4, 7, 8, 9, 16, 31, 33, 1023, 1025, 2049}) {
      const Matrix x = Matrix::random(element, 3, cols, 5, static_cast<uint32_t>(cols));
      for (const kernels::Cast& cast : casts_to(format()))
        EXPECT_TRUE(is_right(x.view(), x.values(), cast)) << cols;
    }
  kernels::cpu::cast_to_codes({nullptr, Element::float32, 0, 4, 4}, {format()}, nullptr);
}

TEST_P(Cast, AnyNumberOfThreadsGivesTheSameBits) {
  const Matrix x = Matrix::random(Element::bfloat16, 90, 1100, 1, 8);
  const std::vector<float> values = x.values();
  for (const int threads : {1, 2, 3}) {
    const ScopedThreadPool pool(threads);
    for (const kernels::Cast& cast : casts_to(format()))
      EXPECT_TRUE(is_right(x.view(), values, cast)) << threads;
  }
}

TEST_P(Cast, EveryCodeHasItsValueAndIsItsCast) {
  std::vector<uint8_t> codes(256);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  for (const Element element : kElements) {
    Matrix y(element, 3, 85, 2), expected(element, 3, 85);
    for (size_t i = 0; i < y.size(); ++i)
      expected.set(i, kernels::float_from_code(codes[i], format()));
    kernels::cpu::cast_from_codes(codes.data(), format(), y.view());
    for (size_t i = 0; i < y.size(); ++i) {
      if (std::isnan(expected.at(i)) && std::isnan(y.at(i))) continue;
      ASSERT_EQ(y.bits_at(i), expected.bits_at(i)) << i;
    }
    EXPECT_TRUE(y.gaps_untouched());
  }
  const int count = format() == CastFormat::e2m1 ? 16 : 256;
  for (const kernels::Cast& cast : casts_to(format()))
    for (int code = 0; code < count; ++code) {
      const float value = kernels::float_from_code(static_cast<uint8_t>(code), format());
      if (std::isnan(value) || (std::isinf(value) && cast.saturates)) continue;
      EXPECT_EQ(kernels::cast_reference(value, cast, 5), code) << value;
    }
}

TEST(CastEdges, OfTheNumericsPage) {
  struct Edge {
    float value;
    int e4m3, e5m2, e2m1;
  };
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const Edge edges[] = {{-0.0f, 0x80, 0x80, 0x8},
                        {0x1p-10f, 0x00, 0x14, 0x0},
                        {std::nextafter(0x1p-10f, 1.0f), 0x01, 0x14, 0x0},
                        {0x1p-17f, 0x00, 0x00, 0x0},
                        {std::nextafter(0x1p-17f, 1.0f), 0x00, 0x01, 0x0},
                        {3 * 0x1p-10f, 0x02, 0x1A, 0x0},
                        {17, 0x58, 0x4C, 0x7},
                        {19, 0x5A, 0x4D, 0x7},
                        {464, 0x7E, 0x5F, 0x7},
                        {std::nextafter(464.0f, 500.0f), 0x7E, 0x5F, 0x7},
                        {61440, 0x7E, 0x7B, 0x7},
                        {infinity, 0x7E, 0x7B, 0x7},
                        {-infinity, 0xFE, 0xFB, 0xF},
                        {nan, 0x7F, 0x7F, 0x7},
                        {-nan, 0x7F, 0x7F, 0x7}};
  for (const Edge& edge : edges) {
    EXPECT_EQ(kernels::cast_reference(edge.value, {CastFormat::e4m3}, 0), edge.e4m3) << edge.value;
    EXPECT_EQ(kernels::cast_reference(edge.value, {CastFormat::e5m2}, 0), edge.e5m2) << edge.value;
    EXPECT_EQ(kernels::cast_reference(edge.value, {CastFormat::e2m1}, 0), edge.e2m1) << edge.value;
  }
  const std::pair<float, int> four[] = {{0.25f, 0}, {0.75f, 2}, {1.25f, 2}, {1.75f, 4},
                                        {2.5f, 4},  {3.5f, 6},  {5.0f, 6}};
  for (const auto& [value, code] : four)
    EXPECT_EQ(kernels::cast_reference(value, {CastFormat::e2m1}, 0), code) << value;
  const Edge overflowing[] = {
      {464, 0x7E, 0x5F, 0},       {std::nextafter(464.0f, 500.0f), 0x7F, 0x5F, 0},
      {-61440, 0xFF, 0xFC, 0},    {infinity, 0x7F, 0x7C, 0},
      {-infinity, 0xFF, 0xFC, 0}, {-nan, 0x7F, 0x7F, 0}};
  for (const Edge& edge : overflowing) {
    EXPECT_EQ(kernels::cast_reference(edge.value, {CastFormat::e4m3, false}, 0), edge.e4m3);
    EXPECT_EQ(kernels::cast_reference(edge.value, {CastFormat::e5m2, false}, 0), edge.e5m2);
  }
}

TEST(StochasticCast, TakesTheUpperNeighbourAsOftenAsItIsNear) {
  constexpr uint64_t kTries = 20000;
  for (const CastFormat format : {CastFormat::e4m3, CastFormat::e5m2, CastFormat::e2m1})
    for (const float value : {0.1f, -0.3f, 1.2f, 2.9f, -5.5f, 5.9f, 0x1p-16f}) {
      double sum = 0;
      for (uint64_t i = 0; i < kTries; ++i)
        sum += kernels::float_from_code(
            kernels::cast_reference(value, {format, true, Rounding::stochastic, 11, 2}, i), format);
      const double step = format == CastFormat::e2m1 ? 2 : 1;  // at most, where values are above 4
      EXPECT_NEAR(sum / kTries, value, 5 * step / std::sqrt(static_cast<double>(kTries)));
    }
}

TEST(StochasticCast, FollowsItsWords) {
  for (uint64_t index = 0; index < 64; ++index) {
    const auto words = kernels::philox4x32_10(index / 4, 7, {9, 0});
    const bool is_up = static_cast<double>(words[index % 4] >> 8) * 0x1p-24 < 0.25;
    EXPECT_EQ(
        kernels::cast_reference(4.5f, {CastFormat::e2m1, true, Rounding::stochastic, 7, 9}, index),
        is_up ? 7 : 6);
  }
  const kernels::Cast up{CastFormat::e4m3, false, Rounding::stochastic, 1, 0};
  int overflows = 0;
  for (uint64_t i = 0; i < 1000; ++i) overflows += kernels::cast_reference(464, up, i) == 0x7F;
  EXPECT_NEAR(overflows, 500, 80) << "half way to what would be the next number";
  EXPECT_EQ(kernels::cast_reference(480, up, 0), 0x7F);
  EXPECT_EQ(kernels::cast_reference(-FLT_MAX, up, 0), 0xFF);
  EXPECT_EQ(kernels::cast_reference(448, up, 0), 0x7E);
}

}  // namespace
}  // namespace tandem::testing::kernels_cast
