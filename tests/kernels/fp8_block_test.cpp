// FP8 in blocks of 128 against the scalar reference, bitwise, on every target; and the reference
// against the numerics page.
#include "kernels/fp8_block.h"

#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "kernels/quantize.h"
#include "support/block_codes.h"
#include "support/matrix.h"
#include "support/targets.h"
#include "support/thread_pool.h"
#include "support/ulp.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tandem::testing::kernels_fp8_block {
namespace {

using kernels::ConstRows;
using kernels::Element;
using kernels::Fp8BlockShape;
using kernels::Fp8Format;
using kernels::Fp8Scaling;

constexpr Fp8BlockShape kShapes[] = {Fp8BlockShape::row, Fp8BlockShape::column,
                                     Fp8BlockShape::square};

using Quantized = BlockCodes<float, 3>;

/// Runs `quantize` for the shapes whose bits are set in `wanted`: of rows 1, of columns 2, of
/// squares 4.
template <typename Function>
Quantized run(Function&& quantize, ConstRows x, const Fp8Scaling& scaling, int wanted) {
  Quantized result;
  kernels::Fp8BlockOutput outputs[3];
  for (const int i : {0, 1, 2}) {
    if ((wanted & (1 << i)) == 0) continue;
    result.codes[i].assign(x.rows * x.cols, kUnwritten);
    result.scales[i].assign(kernels::fp8_block_scales(kShapes[i], x.rows, x.cols).size(), -1.0f);
    outputs[i] = {result.codes[i].data(), result.scales[i].data()};
  }
  quantize(x, scaling, outputs[0], outputs[1], outputs[2], &result.amax);
  return result;
}

::testing::AssertionResult is_right(ConstRows x, const Fp8Scaling& scaling, int wanted) {
  const Quantized got = run(kernels::cpu::fp8_block_quantize, x, scaling, wanted),
                  expected = run(kernels::fp8_block_quantize_reference, x, scaling, wanted);
  return same(got, expected);
}

TEST(Fp8BlockScales, ArePadded) {
  const auto shape = [](Fp8BlockShape of, size_t rows, size_t cols) {
    const auto scales = kernels::fp8_block_scales(of, rows, cols);
    return std::pair(scales.rows, scales.cols);
  };
  EXPECT_EQ(shape(Fp8BlockShape::row, 33, 129), std::pair(size_t{2}, size_t{36}));
  EXPECT_EQ(shape(Fp8BlockShape::column, 33, 129), std::pair(size_t{1}, size_t{132}));
  EXPECT_EQ(shape(Fp8BlockShape::square, 33, 129), std::pair(size_t{1}, size_t{4}));
  EXPECT_EQ(shape(Fp8BlockShape::square, 300, 640), std::pair(size_t{3}, size_t{8}));
  EXPECT_EQ(kernels::fp8_block_scales(Fp8BlockShape::row, 0, 50).size(), 0u);
}

class Fp8Block : public ::testing::TestWithParam<std::tuple<int64_t, Fp8Format, bool>> {
 protected:
  void SetUp() override { target_.emplace(std::get<0>(GetParam())); }
  Fp8Scaling scaling(float eps = 0) const {
    return {std::get<1>(GetParam()), {eps, std::get<2>(GetParam())}};
  }
  void expect_right(ConstRows x, float eps = 0) {
    for (const int wanted : {3, 4}) EXPECT_TRUE(is_right(x, scaling(eps), wanted)) << wanted;
  }
  std::optional<ScopedTarget> target_;
};
INSTANTIATE_TEST_SUITE_P(Cpu, Fp8Block,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::Values(Fp8Format::e4m3, Fp8Format::e5m2),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return target_name(std::get<0>(info.param)) + "_" +
                                  kernels::traits_of(std::get<1>(info.param)).name +
                                  (std::get<2>(info.param) ? "_pow2" : "");
                         });

TEST_P(Fp8Block, EveryPatternOfSixteenBits) {
  std::vector<uint16_t> x(65536);
  std::iota(x.begin(), x.end(), uint16_t{0});
  for (const Element element : {Element::bfloat16, Element::float16})
    expect_right({x.data(), element, 128, 512, 512});
}

TEST_P(Fp8Block, RandomFloat32Patterns) {
  std::mt19937 engine(20245);
  std::vector<float> x(200 * 300);
  for (float& value : x) value = std::bit_cast<float>(static_cast<uint32_t>(engine()));
  const ConstRows view{x.data(), Element::float32, 200, 300, 300};
  expect_right(view);
  for (float& value : x)  // finite, so that nothing is clamped
    value = std::bit_cast<float>((std::bit_cast<uint32_t>(value) & 0x87FFFFFFu) | 0x38000000u);
  expect_right(view);
  expect_right(view, 1e-3f);
  for (float& value : x) value *= 0x1p-125f;
  expect_right(view);
  expect_right(view, FLT_TRUE_MIN);
}

TEST_P(Fp8Block, AmaxesThatOverflowTheScale) {
  std::vector<float> x;  // a block each
  for (const float amax : {0.0f, 1e-45f, 1e-40f, 1e-38f, 1.32e-36f, 2e-36f, 3.0f, 448.0f, 449.0f,
                           57344.0f, FLT_MAX, kInfinity, kNan}) {
    x.push_back(amax);
    x.resize((x.size() + 127) / 128 * 128, 0.0f);
  }
  expect_right(one_row(x));
  expect_right({x.data(), Element::float32, x.size(), 1, 1});
  expect_right(one_row(x), 6.0f);
}

TEST_P(Fp8Block, EveryNumberBelowAmaxesOfEveryExponent) {
  const std::vector<uint16_t> x = bfloat16_below_amaxes();
  expect_right({x.data(), Element::bfloat16, x.size() / kColsBelowAmaxes, kColsBelowAmaxes,
                kColsBelowAmaxes});
}

TEST_P(Fp8Block, EveryShapeAroundABlockAndStride) {
  uint32_t seed = 0;
  for (const Element element : kElements) {
    for (const size_t rows : {1, 2, 127, 128, 129, 260}) {
      for (const size_t cols : {1, 7, 31, 64, 127, 128, 129, 255, 256, 257, 390}) {
        const Matrix x = Matrix::random(element, rows, cols, seed % 2 * 3, seed);
        ++seed;
        expect_right(x.view());
      }
    }
  }
}

TEST_P(Fp8Block, OneShapeAlone) {
  const Matrix x = Matrix::random(Element::bfloat16, 140, 150, 2, 9);
  for (const int wanted : {0, 1, 2}) EXPECT_TRUE(is_right(x.view(), scaling(), wanted)) << wanted;
}

TEST_P(Fp8Block, ASpecialValueInEveryLane) {
  for (const Element element : kElements) {
    for (const float special : {kNan, -kNan, -kInfinity, -0.0f}) {
      for (size_t at = 0; at < 70; ++at) {
        Matrix x = Matrix::random(element, 5, 150, 0, 7);
        x.set(at * 151 % (5 * 150), special);
        expect_right(x.view());
      }
    }
  }
}

TEST_P(Fp8Block, NothingAndZerosAndNanAlone) {
  for (const auto& [rows, cols] : {std::pair<size_t, size_t>{0, 5}, {5, 0}, {0, 0}}) {
    const ConstRows empty{nullptr, Element::float32, rows, cols, cols};
    EXPECT_EQ(run(kernels::cpu::fp8_block_quantize, empty, scaling(), 3).amax, 0.0f);
  }
  for (const float value : {-0.0f, kNan, FLT_TRUE_MIN, FLT_MAX}) {
    const std::vector<float> x(140 * 140, value);
    expect_right({x.data(), Element::float32, 140, 140, 140});
  }
}

TEST_P(Fp8Block, AnyNumberOfThreadsGivesTheSameBits) {
  const Matrix x = Matrix::random(Element::bfloat16, 300, 700, 1, 8);
  for (const int threads : {1, 2, 3}) {
    const ScopedThreadPool pool(threads);
    expect_right(x.view());
  }
}

TEST_P(Fp8Block, DequantizesEveryShape) {
  for (const Element element : kElements) {
    for (const auto& [rows, cols] : {std::pair<size_t, size_t>{1, 1}, {130, 45}, {7, 300}}) {
      const Matrix x = Matrix::random(element, rows, cols, 0, static_cast<uint32_t>(cols));
      const Quantized q = run(kernels::fp8_block_quantize_reference, x.view(), scaling(), 7);
      for (const int i : {0, 1, 2}) {
        const size_t stride = kernels::fp8_block_scales(kShapes[i], rows, cols).cols;
        Matrix y(element, rows, cols, 3), expected(element, rows, cols);
        for (size_t at = 0; at < y.size(); ++at) {
          const size_t r = at / cols, c = at % cols;
          const size_t place = i == 0   ? c / 128 * stride + r
                               : i == 1 ? r / 128 * stride + c
                                        : r / 128 * stride + c / 128;
          expected.set(
              at, kernels::float_from_fp8(q.codes[i][at], scaling().format) * q.scales[i][place]);
        }
        kernels::cpu::fp8_block_dequantize(q.codes[i].data(), q.scales[i].data(), scaling().format,
                                           kShapes[i], y.view());
        EXPECT_TRUE(same_bits<uint32_t>(y.bits(), expected.bits())) << rows << "x" << cols;
        EXPECT_TRUE(y.gaps_untouched());
      }
    }
  }
}

#if defined(__x86_64__)
TEST_P(Fp8Block, IgnoresFlushToZeroOfTheCaller) {
  const std::vector<float> x = denormals();
  const ConstRows view{x.data(), Element::float32, 40, 30, 30};
  const Quantized expected = run(kernels::fp8_block_quantize_reference, view, scaling(), 3);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  const Quantized got = run(kernels::cpu::fp8_block_quantize, view, scaling(), 3);
  _mm_setcsr(before);
  EXPECT_TRUE(same(got, expected));
}
#endif

}  // namespace
}  // namespace tandem::testing::kernels_fp8_block
