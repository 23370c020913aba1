// Vector quantization against the scalar reference, bitwise, on every target.
#include "kernels/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>

#include "support/matrix.h"
#include "support/targets.h"
#include "support/thread_pool.h"
#include "support/ulp.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tandem::testing::kernels_quantize {
namespace {

using kernels::ConstRows;
using kernels::Element;
using kernels::Fp8Format;
using kernels::Fp8Scaling;

struct Quantized {
  std::vector<uint8_t> codes;
  float dequant_scale = -1.0f, amax = -1.0f;
};

Quantized quantize(ConstRows x, const Fp8Scaling& scaling) {
  Quantized result;
  result.codes.resize(x.rows * x.cols);
  kernels::cpu::quantize_current(x, scaling,
                                 {result.codes.data(), &result.dequant_scale, &result.amax});
  return result;
}

/// The definition, element by element.
Quantized scalar_quantize(const std::vector<float>& x, const Fp8Scaling& scaling) {
  Quantized result;
  result.amax = 0.0f;
  for (const float value : x) {
    if (!std::isnan(value)) result.amax = std::max(result.amax, std::abs(value));
  }
  const float scale = kernels::scale_from_amax(result.amax, scaling, FLT_MAX);
  result.dequant_scale = 1.0f / scale;
  for (const float value : x)
    result.codes.push_back(kernels::fp8_from_float(value * scale, scaling.format));
  return result;
}

Quantized quantize_given(ConstRows x, Fp8Format format, float quant_scale) {
  Quantized result;
  result.codes.resize(x.rows * x.cols);
  kernels::cpu::quantize_delayed(x, format, quant_scale,
                                 {result.codes.data(), &result.dequant_scale, &result.amax});
  return result;
}

Quantized scalar_quantize_given(const std::vector<float>& x, Fp8Format format, float quant_scale) {
  Quantized result{{}, 1.0f / quant_scale, 0.0f};
  for (const float value : x) {
    if (!std::isnan(value)) result.amax = std::max(result.amax, std::abs(value));
    result.codes.push_back(kernels::fp8_from_float(value * quant_scale, format));
  }
  return result;
}

::testing::AssertionResult same(const Quantized& got, const Quantized& expected) {
  if (std::bit_cast<uint32_t>(got.amax) != std::bit_cast<uint32_t>(expected.amax)) {
    return ::testing::AssertionFailure()
           << "amax: expected " << expected.amax << ", got " << got.amax;
  }
  if (std::bit_cast<uint32_t>(got.dequant_scale) !=
      std::bit_cast<uint32_t>(expected.dequant_scale)) {
    return ::testing::AssertionFailure()
           << "dequant_scale: expected " << expected.dequant_scale << ", got " << got.dequant_scale;
  }
  return same_bits<uint8_t>(got.codes, expected.codes);
}

ConstRows one_row(const std::vector<float>& x) {
  return {x.data(), Element::float32, 1, x.size(), x.size()};
}

std::string name_of(Fp8Format format) { return kernels::traits_of(format).name; }

class Quantize : public ::testing::TestWithParam<std::tuple<int64_t, Fp8Format>> {
 protected:
  Fp8Format format() const { return std::get<1>(GetParam()); }

 private:
  ScopedTarget target_{std::get<0>(GetParam())};
};

TEST_P(Quantize, EveryPatternOfSixteenBits) {
  std::vector<uint16_t> x(65536);
  std::iota(x.begin(), x.end(), uint16_t{0});
  for (const Element element : {Element::bfloat16, Element::float16}) {
    std::vector<float> all, moderate;
    std::vector<uint16_t> moderate_bits;
    for (const uint16_t bits : x) {
      all.push_back(value_of_bits(bits, element));
      if (!(std::abs(all.back()) < 300.0f)) continue;
      moderate.push_back(all.back());
      moderate_bits.push_back(bits);
    }
    // With the infinities the scale is 1; without, it is that of an ordinary tensor.
    EXPECT_TRUE(same(quantize({x.data(), element, 256, 256, 256}, {format()}),
                     scalar_quantize(all, {format()})));
    EXPECT_TRUE(same(
        quantize({moderate_bits.data(), element, 1, moderate_bits.size(), moderate_bits.size()},
                 {format()}),
        scalar_quantize(moderate, {format()})));
  }
}

TEST_P(Quantize, RandomFloat32Patterns) {
  std::mt19937 engine(20240);
  std::vector<float> x(1 << 20);
  for (float& value : x) value = std::bit_cast<float>(static_cast<uint32_t>(engine()));
  EXPECT_TRUE(same(quantize(one_row(x), {format()}), scalar_quantize(x, {format()})));
  // Exponents near the format's own, so that most codes are neither 0 nor the largest: with scale 1
  // (from the infinity), and scaled.
  for (float& value : x)
    value = std::bit_cast<float>((std::bit_cast<uint32_t>(value) & 0x87FFFFFFu) | 0x38000000u);
  EXPECT_TRUE(same(quantize(one_row(x), {format()}), scalar_quantize(x, {format()})));
  EXPECT_TRUE(same(quantize(one_row(x), {format(), {.power_of_two = true}}),
                   scalar_quantize(x, {format(), {.power_of_two = true}})));
  x.push_back(std::numeric_limits<float>::infinity());
  EXPECT_TRUE(same(quantize(one_row(x), {format()}), scalar_quantize(x, {format()})));
}

TEST_P(Quantize, MidpointsAndTheirNeighbours) {
  std::vector<float> x = {kernels::fp8_max(format())};  // makes the scale 1
  const int largest = static_cast<int>(kernels::traits_of(format()).largest);
  for (int code = 0; code < largest; ++code) {
    const float low = kernels::float_from_fp8(static_cast<uint8_t>(code), format());
    const float high = kernels::float_from_fp8(static_cast<uint8_t>(code + 1), format());
    const float midpoint = (low + high) / 2;
    for (const float value :
         {midpoint, std::nextafter(midpoint, 0.0f), std::nextafter(midpoint, high)}) {
      x.push_back(value);
      x.push_back(-value);
    }
  }
  EXPECT_TRUE(same(quantize(one_row(x), {format()}), scalar_quantize(x, {format()})));
}

TEST_P(Quantize, EveryLengthAndStride) {
  for (const Element element : kElements) {
    for (size_t cols = 1; cols <= 70; ++cols) {
      for (const size_t gap : {0, 3}) {
        Matrix x = Matrix::random(element, 5, cols, gap, static_cast<uint32_t>(cols));
        EXPECT_TRUE(same(quantize(x.view(), {format()}), scalar_quantize(x.values(), {format()})))
            << cols << " gap " << gap;
      }
    }
  }
  const Matrix large = Matrix::random(Element::bfloat16, 37, 1111, 0, 6);
  EXPECT_TRUE(
      same(quantize(large.view(), {format()}), scalar_quantize(large.values(), {format()})));
}

TEST_P(Quantize, ASpecialValueInEveryLane) {
  for (const Element element : kElements) {
    for (const float special : {std::numeric_limits<float>::quiet_NaN(),
                                -std::numeric_limits<float>::infinity(), -0.0f}) {
      for (size_t at = 0; at < 133; ++at) {
        Matrix x = Matrix::random(element, 1, 133, 0, 7);
        x.set(at, special);
        EXPECT_TRUE(same(quantize(x.view(), {format()}), scalar_quantize(x.values(), {format()})))
            << special << " at " << at;
      }
    }
  }
}

TEST_P(Quantize, TinyAndHugeAmaxAndEps) {
  for (const float amax : {FLT_TRUE_MIN, 1e-38f, 1e-30f, 1.0f, 1e30f, FLT_MAX}) {
    for (const float eps : {0.0f, 6.0f, std::numeric_limits<float>::infinity()}) {
      for (const bool power_of_two : {false, true}) {
        std::vector<float> x;
        for (int i = -50; i <= 50; ++i) x.push_back(amax / 50 * static_cast<float>(i));
        x.push_back(amax);
        const Fp8Scaling scaling{format(), {eps, power_of_two}};
        EXPECT_TRUE(same(quantize(one_row(x), scaling), scalar_quantize(x, scaling)))
            << amax << " eps " << eps;
      }
    }
  }
}

TEST_P(Quantize, NothingAndZeros) {
  const Quantized empty = quantize({nullptr, Element::float32, 0, 5, 5}, {format()});
  EXPECT_EQ(empty.amax, 0.0f);
  EXPECT_EQ(empty.dequant_scale, 1.0f);
  const std::vector<float> zeros(40, -0.0f);
  EXPECT_TRUE(same(quantize(one_row(zeros), {format()}), scalar_quantize(zeros, {format()})));
}

TEST_P(Quantize, AnyNumberOfThreadsGivesTheSameBits) {
  Matrix x = Matrix::random(Element::float32, 300, 700, 1, 8);
  const Quantized serial = quantize(x.view(), {format()});
  for (const int threads : {1, 2, 3}) {
    const ScopedThreadPool pool(threads);
    EXPECT_TRUE(same(quantize(x.view(), {format()}), serial)) << threads;
  }
}

TEST_P(Quantize, GivenScales) {
  std::mt19937 engine(20242);
  std::vector<float> patterns(70000);
  for (float& value : patterns) value = std::bit_cast<float>(static_cast<uint32_t>(engine()));
  const Matrix normal = Matrix::random(Element::float32, 40, 2000, 0, 11);
  for (const float quant_scale :
       {1.0f, 89.6f, 0x1p-20f, FLT_MAX, FLT_TRUE_MIN, 0.0f, -2.0f, -0.0f,
        std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const auto& x : {patterns, normal.values(), std::vector<float>(3, -0.0f)}) {
      EXPECT_TRUE(same(quantize_given(one_row(x), format(), quant_scale),
                       scalar_quantize_given(x, format(), quant_scale)))
          << quant_scale;
    }
  }
}

TEST_P(Quantize, GivenScaleWithStridesThreadsAndNothing) {
  for (const Element element : kElements) {
    for (const size_t cols : {1, 17, 700, 33000}) {
      const Matrix x = Matrix::random(element, 11, cols, 3, static_cast<uint32_t>(cols));
      const Quantized expected = scalar_quantize_given(x.values(), format(), 120.0f);
      EXPECT_TRUE(same(quantize_given(x.view(), format(), 120.0f), expected)) << cols;
      const ScopedThreadPool pool(3);
      EXPECT_TRUE(same(quantize_given(x.view(), format(), 120.0f), expected)) << cols;
    }
  }
  const Quantized empty = quantize_given({nullptr, Element::float32, 0, 5, 5}, format(), 4.0f);
  EXPECT_EQ(empty.amax, 0.0f);
  EXPECT_EQ(empty.dequant_scale, 0.25f);
}

#if defined(__x86_64__)
TEST_P(Quantize, IgnoresFlushToZeroOfTheCaller) {
  std::vector<float> x;
  for (int i = -100; i <= 100; ++i) x.push_back(static_cast<float>(i) * 1e-40f);
  const Quantized expected = scalar_quantize(x, {format()});
  std::vector<float> expected_y;
  for (const uint8_t code : expected.codes)
    expected_y.push_back(kernels::float_from_fp8(code, format()) * expected.dequant_scale);
  std::vector<float> y(x.size());
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  const Quantized got = quantize(one_row(x), {format()});
  kernels::cpu::dequantize(expected.codes.data(), format(), expected.dequant_scale,
                           {y.data(), Element::float32, 1, y.size(), y.size()});
  const unsigned during = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(during & 0x8040, 0x8040u) << "the caller's mode has to return";
  EXPECT_TRUE(same(got, expected));
  EXPECT_TRUE(same_bits<float>(y, expected_y));
}
#endif

TEST_P(Quantize, DequantizesEveryCode) {
  std::vector<uint8_t> codes(256 * 3);
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  for (const Element element : kElements) {
    for (const float dequant_scale : {1.0f, 0.37f, 0x1p-130f, 1e36f}) {
      Matrix expected(element, 3, 256), got(element, 3, 256, 5);
      for (size_t i = 0; i < codes.size(); ++i)
        expected.set(i, kernels::float_from_fp8(codes[i], format()) * dequant_scale);
      kernels::cpu::dequantize(codes.data(), format(), dequant_scale, got.view());
      for (size_t i = 0; i < codes.size(); ++i) {
        if (std::isnan(expected.at(i)) && std::isnan(got.at(i))) continue;
        EXPECT_EQ(got.bits_at(i), expected.bits_at(i))
            << "code " << int{codes[i]} << ": expected " << expected.at(i) << ", got " << got.at(i);
      }
      EXPECT_TRUE(got.gaps_untouched());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Quantize,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::Values(Fp8Format::e4m3, Fp8Format::e5m2)),
                         [](const auto& info) {
                           return target_name(std::get<0>(info.param)) + "_" +
                                  name_of(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace tandem::testing::kernels_quantize
