// MXFP8 against the scalar reference, bitwise, on every target; and the reference against the
// numerics page.
#include "kernels/mxfp8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>

#include "support/block_codes.h"
#include "support/matrix.h"
#include "support/targets.h"
#include "support/thread_pool.h"
#include "support/ulp.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tandem::testing::kernels_mxfp8 {
namespace {

using kernels::ConstRows;
using kernels::Element;
using kernels::Fp8Format;
using kernels::Fp8Scaling;
using kernels::MxDirection;

using Quantized = BlockCodes<uint8_t, 2>;  // row, column

/// Runs `quantize` with both outputs, the row's alone (1) or the column's alone (2).
template <typename Function>
Quantized run(Function&& quantize, ConstRows x, const Fp8Scaling& scaling, int wanted = 3) {
  Quantized result;
  kernels::Mxfp8Output outputs[2];
  for (const int i : {0, 1}) {
    if ((wanted & (1 << i)) == 0) continue;
    const auto shape = kernels::mx_scale_shape(static_cast<MxDirection>(i), x.rows, x.cols);
    result.codes[i].assign(x.rows * x.cols, kUnwritten);
    result.scales[i].assign(shape.size(), kUnwritten);
    outputs[i] = {result.codes[i].data(), result.scales[i].data()};
  }
  quantize(x, scaling, outputs[0], outputs[1], &result.amax);
  return result;
}

Quantized quantize(ConstRows x, const Fp8Scaling& scaling, int wanted = 3) {
  return run(kernels::cpu::mxfp8_quantize, x, scaling, wanted);
}

Quantized reference(ConstRows x, const Fp8Scaling& scaling, int wanted = 3) {
  return run(kernels::mxfp8_quantize_reference, x, scaling, wanted);
}

TEST(E8m0, EdgeCases) {
  const std::pair<float, int> edges[] = {
      {0.0f, 0x00},      {FLT_TRUE_MIN, 0x00},
      {0x1p-127f, 0x00}, {std::nextafter(0x1p-127f, 1.0f), 0x01},
      {0x1p-126f, 0x01}, {std::nextafter(0x1p-126f, 1.0f), 0x02},
      {1.0f, 0x7F},      {std::nextafter(1.0f, 2.0f), 0x80},
      {0x1p127f, 0xFE},  {FLT_MAX, 0xFE},
      {kInfinity, 0xFE}, {kNan, 0xFF},
      {-kNan, 0xFF},
  };
  for (const auto& [value, code] : edges) EXPECT_EQ(kernels::e8m0_from_float(value), code) << value;
}

TEST(E8m0, ValuesAndReciprocalsAreExact) {
  for (int code = 0; code < 255; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    EXPECT_EQ(kernels::float_from_e8m0(byte), std::ldexp(1.0, code - 127)) << code;
    EXPECT_EQ(kernels::reciprocal_of_e8m0(byte), std::ldexp(1.0, 127 - code)) << code;
    EXPECT_EQ(kernels::e8m0_from_float(kernels::float_from_e8m0(byte)), code);
  }
  EXPECT_TRUE(std::isnan(kernels::float_from_e8m0(0xFF)));
  EXPECT_TRUE(std::isnan(kernels::reciprocal_of_e8m0(0xFF)));
}

TEST(MxScaleShape, IsPadded) {
  const auto shape = [](MxDirection direction, size_t rows, size_t cols) {
    const auto s = kernels::mx_scale_shape(direction, rows, cols);
    return std::pair(s.rows, s.cols);
  };
  EXPECT_EQ(shape(MxDirection::row, 40, 50), std::pair(size_t{128}, size_t{4}));
  EXPECT_EQ(shape(MxDirection::row, 129, 129), std::pair(size_t{256}, size_t{8}));
  EXPECT_EQ(shape(MxDirection::column, 40, 50), std::pair(size_t{4}, size_t{128}));
  EXPECT_EQ(shape(MxDirection::column, 129, 129), std::pair(size_t{8}, size_t{256}));
  EXPECT_EQ(kernels::mx_scale_shape(MxDirection::row, 0, 50).size(), 0u);
  EXPECT_EQ(kernels::mx_scale_shape(MxDirection::column, 50, 0).size(), 0u);
}

class Mxfp8Example : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(Cpu, Mxfp8Example, ::testing::ValuesIn(all_targets()), Mxfp8Example::name);

TEST_P(Mxfp8Example, OfTheNumericsPage) {
  const Fp8Format format = Fp8Format::e4m3;
  struct Example {
    std::vector<float> x;
    int scale;
    std::vector<int> codes;
    std::vector<float> y;
  };
  const Example examples[] = {
      {{0.0f, -0.0f}, 0x00, {0x00, 0x80}, {0.0f, -0.0f}},
      {{448.0f}, 0x7F, {0x7E}, {448.0f}},
      {{449.0f}, 0x80, {0x76}, {448.0f}},
      {{kInfinity, 1.0f, -kInfinity}, 0xFE, {0x7E, 0x00, 0xFE}, {kInfinity, 0.0f, -kInfinity}},
      {{kNan, 1.0f}, 0x77, {0x7F, 0x78}, {kNan, 1.0f}},
      {{1e-40f, -1e-40f},
       0x00,
       {0x09, 0x89},
       {std::bit_cast<float>(0x00012000u), std::bit_cast<float>(0x80012000u)}},
  };
  for (const Example& example : examples) {
    std::vector<float> x = example.x;
    x.resize(32, 0.0f);
    const Quantized got = quantize(one_row(x), {format}, 1);
    EXPECT_EQ(got.scales[0][0], example.scale) << x[0];
    std::vector<float> y(x.size());
    kernels::cpu::mxfp8_dequantize(got.codes[0].data(), got.scales[0].data(), format,
                                   MxDirection::row, {y.data(), Element::float32, 1, 32, 32});
    for (size_t i = 0; i < example.codes.size(); ++i) {
      EXPECT_EQ(got.codes[0][i], example.codes[i]) << x[0] << " at " << i;
      if (std::isnan(example.y[i])) {
        EXPECT_TRUE(std::isnan(y[i]));
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(example.y[i])) << y[i];
      }
    }
  }
}

class Mxfp8 : public ::testing::TestWithParam<std::tuple<int64_t, Fp8Format>> {
 protected:
  Fp8Format format() const { return std::get<1>(GetParam()); }

 private:
  ScopedTarget target_{std::get<0>(GetParam())};
};

TEST_P(Mxfp8, EveryPatternOfSixteenBits) {
  std::vector<uint16_t> x(65536);
  std::iota(x.begin(), x.end(), uint16_t{0});
  for (const Element element : {Element::bfloat16, Element::float16}) {
    for (const size_t cols : {256, 2048}) {
      const ConstRows view{x.data(), element, x.size() / cols, cols, cols};
      EXPECT_TRUE(same(quantize(view, {format()}), reference(view, {format()})));
    }
  }
}

TEST_P(Mxfp8, RandomFloat32Patterns) {
  std::mt19937 engine(20241);
  std::vector<float> x(100 * 1100);
  for (float& value : x) value = std::bit_cast<float>(static_cast<uint32_t>(engine()));
  const ConstRows view{x.data(), Element::float32, 100, 1100, 1100};
  EXPECT_TRUE(same(quantize(view, {format()}), reference(view, {format()})));
  for (float& value : x) {  // finite, so that nothing is clamped; and within 2^16 of each other
    value = std::bit_cast<float>((std::bit_cast<uint32_t>(value) & 0x87FFFFFFu) | 0x38000000u);
  }
  EXPECT_TRUE(same(quantize(view, {format()}), reference(view, {format()})));
  for (float& value : x) value *= 0x1p-125f;
  EXPECT_TRUE(same(quantize(view, {format()}), reference(view, {format()}))) << "subnormal";
}

TEST_P(Mxfp8, AmaxesNextToWhereTheScaleChanges) {
  std::vector<float> x;  // a block each
  for (int exponent = -150; exponent <= 120; ++exponent) {
    const float amax = std::ldexp(kernels::fp8_max(format()), exponent);
    for (const float value : {amax, std::nextafter(amax, 0.0f), std::nextafter(amax, kInfinity)}) {
      x.push_back(value);
      x.resize((x.size() + 31) / 32 * 32, 0.0f);
    }
  }
  EXPECT_TRUE(same(quantize(one_row(x), {format()}), reference(one_row(x), {format()})));
}

TEST_P(Mxfp8, EveryNumberBelowAmaxesOfEveryExponent) {
  const std::vector<uint16_t> x = bfloat16_below_amaxes();
  const ConstRows view{x.data(), Element::bfloat16, x.size() / kColsBelowAmaxes, kColsBelowAmaxes,
                       kColsBelowAmaxes};
  EXPECT_TRUE(same(quantize(view, {format()}), reference(view, {format()})));
}

TEST_P(Mxfp8, EveryShapeAroundABlockAndStride) {
  uint32_t seed = 0;
  for (const Element element : kElements) {
    for (const size_t rows : {1, 2, 31, 32, 33, 65}) {
      for (const size_t cols : {1, 7, 8, 16, 31, 32, 33, 63, 64, 65, 95, 130, 1023, 1024, 1030}) {
        const Matrix x = Matrix::random(element, rows, cols, seed % 2 * 3, seed);
        ++seed;
        for (const bool square : {false, true}) {
          EXPECT_TRUE(same(quantize(x.view(), {format(), {.square_blocks = square}}),
                           reference(x.view(), {format(), {.square_blocks = square}})))
              << rows << "x" << cols << (square ? " square " : " ") << name_of(element);
        }
      }
    }
  }
}

TEST_P(Mxfp8, OneDirectionAlone) {
  const Matrix x = Matrix::random(Element::bfloat16, 70, 90, 2, 9);
  for (const int wanted : {0, 1, 2}) {
    for (const bool square : {false, true}) {
      EXPECT_TRUE(same(quantize(x.view(), {format(), {.square_blocks = square}}, wanted),
                       reference(x.view(), {format(), {.square_blocks = square}}, wanted)))
          << wanted;
    }
  }
  kernels::cpu::mxfp8_quantize(x.view(), {format()}, {}, {}, nullptr);
}

TEST_P(Mxfp8, ASpecialValueInEveryLane) {
  for (const Element element : kElements) {
    for (const float special : {kNan, -kNan, -kInfinity, -0.0f}) {
      for (size_t at = 0; at < 70; ++at) {
        Matrix x = Matrix::random(element, 34, 70, 0, 7);
        x.set(at * 71 % (34 * 70), special);
        for (const bool square : {false, true}) {
          EXPECT_TRUE(same(quantize(x.view(), {format(), {.square_blocks = square}}),
                           reference(x.view(), {format(), {.square_blocks = square}})))
              << special << " at " << at;
        }
      }
    }
  }
}

TEST_P(Mxfp8, NothingAndZerosAndNanAlone) {
  for (const auto& [rows, cols] : {std::pair<size_t, size_t>{0, 5}, {5, 0}, {0, 0}}) {
    const Quantized empty = quantize({nullptr, Element::float32, rows, cols, cols}, {format()});
    EXPECT_EQ(std::bit_cast<uint32_t>(empty.amax), 0u);
  }
  for (const float value : {-0.0f, kNan, FLT_TRUE_MIN, FLT_MAX}) {
    const std::vector<float> x(40 * 40, value);
    const ConstRows view{x.data(), Element::float32, 40, 40, 40};
    EXPECT_TRUE(same(quantize(view, {format()}), reference(view, {format()}))) << value;
  }
}

TEST_P(Mxfp8, AnyNumberOfThreadsGivesTheSameBits) {
  const Matrix x = Matrix::random(Element::bfloat16, 300, 2100, 1, 8);
  const Quantized serial = quantize(x.view(), {format()});
  for (const int threads : {1, 2, 3}) {
    const ScopedThreadPool pool(threads);
    EXPECT_TRUE(same(quantize(x.view(), {format()}), serial)) << threads;
  }
}

TEST_P(Mxfp8, DequantizesEveryCodeUnderEveryScale) {
  // Column c has code c, row r the scale r; by column, a band of 32 rows has scale 8 * band + c %
  // 8.
  std::vector<uint8_t> codes(256 * 256);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i % 256);
  for (const MxDirection direction : {MxDirection::row, MxDirection::column}) {
    const auto shape = kernels::mx_scale_shape(direction, 256, 256);
    const auto scale_at = [&](size_t r, size_t c) {
      return static_cast<uint8_t>(direction == MxDirection::row ? r : r / 32 * 32 + c % 32);
    };
    std::vector<uint8_t> scales(shape.size());
    for (size_t r = 0; r < 256; ++r) {
      for (size_t c = 0; c < 256; ++c) {
        const size_t at =
            direction == MxDirection::row ? r * shape.cols + c / 32 : r / 32 * shape.cols + c;
        scales[at] = scale_at(r, c);
      }
    }
    for (const Element element : kElements) {
      Matrix expected(element, 256, 256), got(element, 256, 256, 5);
      for (size_t i = 0; i < codes.size(); ++i) {
        expected.set(i, kernels::float_from_fp8(codes[i], format()) *
                            kernels::float_from_e8m0(scale_at(i / 256, i % 256)));
      }
      kernels::cpu::mxfp8_dequantize(codes.data(), scales.data(), format(), direction, got.view());
      for (size_t i = 0; i < codes.size(); ++i) {
        if (std::isnan(expected.at(i)) && std::isnan(got.at(i))) continue;
        ASSERT_EQ(got.bits_at(i), expected.bits_at(i))
            << "code " << int{codes[i]} << " at " << i << ": expected " << expected.at(i)
            << ", got " << got.at(i);
      }
      EXPECT_TRUE(got.gaps_untouched());
    }
  }
}

TEST_P(Mxfp8, DequantizesEveryShape) {
  for (const Element element : kElements) {
    for (const size_t rows : {1, 33, 64}) {
      for (const size_t cols : {1, 15, 32, 45, 131}) {
        const Matrix x = Matrix::random(element, rows, cols, 0, static_cast<uint32_t>(cols));
        const Quantized q = quantize(x.view(), {format()});
        for (const MxDirection direction : {MxDirection::row, MxDirection::column}) {
          const auto i = static_cast<size_t>(direction);
          const size_t stride = kernels::mx_scale_shape(direction, rows, cols).cols;
          Matrix y(element, rows, cols, 3), expected(element, rows, cols);
          for (size_t at = 0; at < y.size(); ++at) {
            const size_t r = at / cols, c = at % cols;
            const uint8_t scale = q.scales[i][i == 0 ? r * stride + c / 32 : r / 32 * stride + c];
            expected.set(at, kernels::float_from_fp8(q.codes[i][at], format()) *
                                 kernels::float_from_e8m0(scale));
          }
          kernels::cpu::mxfp8_dequantize(q.codes[i].data(), q.scales[i].data(), format(), direction,
                                         y.view());
          EXPECT_TRUE(same_bits<uint32_t>(y.bits(), expected.bits())) << rows << "x" << cols;
          EXPECT_TRUE(y.gaps_untouched());
        }
      }
    }
  }
  kernels::cpu::mxfp8_dequantize(nullptr, nullptr, format(), MxDirection::row,
                                 {nullptr, Element::float32, 0, 5, 5});
}

#if defined(__x86_64__)
TEST_P(Mxfp8, IgnoresFlushToZeroOfTheCaller) {
  const std::vector<float> x = denormals();
  const ConstRows view{x.data(), Element::float32, 40, 30, 30};
  const Quantized expected = reference(view, {format()});
  std::vector<float> expected_y, y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    expected_y.push_back(kernels::float_from_fp8(expected.codes[0][i], format()) *
                         kernels::float_from_e8m0(expected.scales[0][i / 30 * 4]));
  }
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  const Quantized got = quantize(view, {format()}), got_reference = reference(view, {format()});
  kernels::cpu::mxfp8_dequantize(expected.codes[0].data(), expected.scales[0].data(), format(),
                                 MxDirection::row, {y.data(), Element::float32, 40, 30, 30});
  const unsigned during = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(during & 0x8040, 0x8040u) << "the caller's mode has to return";
  EXPECT_TRUE(same(got, expected));
  EXPECT_TRUE(same(got_reference, expected));
  EXPECT_TRUE(same_bits<float>(y, expected_y));
}
#endif

INSTANTIATE_TEST_SUITE_P(Cpu, Mxfp8,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::Values(Fp8Format::e4m3, Fp8Format::e5m2)),
                         [](const auto& info) {
                           return target_name(std::get<0>(info.param)) + "_" +
                                  kernels::traits_of(std::get<1>(info.param)).name;
                         });

}  // namespace
}  // namespace tandem::testing::kernels_mxfp8
