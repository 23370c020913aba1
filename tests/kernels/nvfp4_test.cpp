// NVFP4 against the scalar reference, bitwise, on every target; and the reference against the
// numerics page.
#include "kernels/nvfp4.h"

#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "support/block_codes.h"
#include "support/matrix.h"
#include "support/targets.h"
#include "support/thread_pool.h"
#include "support/ulp.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tandem::testing::kernels_nvfp4 {
namespace {

using kernels::ConstRows;
using kernels::Element;
using kernels::FourOverSix;
using kernels::Fp4Direction;
using kernels::Fp4Scaling;

constexpr Fp4Direction kDirections[] = {Fp4Direction::row, Fp4Direction::column};

const Fp4Scaling kScalings[] = {
    {},
    {.options = {.square_blocks = true}},
    {.options = {.hadamard = true}},
    {.options = {.stochastic_rounding = true}, .seed = 0xFEDCBA9876543210, .offset = 7},
    {.options = {.hadamard = true, .stochastic_rounding = true}, .seed = 5},
    {.options = {.four_over_six = FourOverSix::mae}},
    {.options = {.four_over_six = FourOverSix::mse}, .largest_scale = 256},
    {.options = {.square_blocks = true, .four_over_six = FourOverSix::mae}, .largest_scale = 256},
    {.options = {.square_blocks = true, .four_over_six = FourOverSix::mse}},
    {.options = {.hadamard = true, .four_over_six = FourOverSix::mse}, .largest_scale = 256},
};

using Quantized = BlockCodes<uint8_t, 2>;

/// Runs `quantize` for the directions whose bits are set in `wanted`: rows 1, columns 2.
template <typename Function>
Quantized run(Function&& quantize, ConstRows x, const Fp4Scaling& scaling, int wanted = 3) {
  Quantized result;
  kernels::Fp4Output outputs[2];
  for (const int i : {0, 1}) {
    if ((wanted & (1 << i)) == 0) continue;
    result.codes[i].assign(kernels::fp4_code_shape(kDirections[i], x.rows, x.cols).size() + 1,
                           kUnwritten);
    result.scales[i].assign(kernels::fp4_scale_shape(kDirections[i], x.rows, x.cols).size(),
                            kUnwritten);
    outputs[i] = {result.codes[i].data(), result.scales[i].data(), &result.amaxes[i]};
  }
  quantize(x, scaling, outputs[0], outputs[1], &result.amax);
  return result;
}

::testing::AssertionResult is_right(ConstRows x, const Fp4Scaling& scaling, int wanted = 3) {
  return same(run(kernels::cpu::nvfp4_quantize, x, scaling, wanted),
              run(kernels::nvfp4_quantize_reference, x, scaling, wanted));
}

TEST(Nvfp4Hadamard, UnitVectorAndOnes) {
  float x[16] = {1}, y[16];
  kernels::hadamard(x, y);
  for (const float value : y) EXPECT_EQ(value, 0.25f);
  std::fill(x, x + 16, 1.0f);
  kernels::hadamard(x, y);
  const float expected[] = {-1, 0, 1, 0, 1, 0, -1, 0, 1, 2, 1, 0, 1, 0, 1, -2};
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(y[i], expected[i]) << i;
}

TEST(Nvfp4Hadamard, KeepsProducts) {
  double before = 0, after = 0;
  float a[16], b[16], rotated_a[16], rotated_b[16];
  for (size_t i = 0; i < 16; ++i) {
    a[i] = static_cast<float>(i) - 4;
    b[i] = static_cast<float>(i % 5) * 2 - 3;
    before += a[i] * b[i];
  }
  kernels::hadamard(a, rotated_a);
  kernels::hadamard(b, rotated_b);
  for (size_t i = 0; i < 16; ++i) after += rotated_a[i] * rotated_b[i];
  EXPECT_NEAR(after, before, 0.5) << "but for rounding to bfloat16";
}

class Nvfp4 : public OnEachTarget {
 protected:
  /// Goes over every third scaling, from number `turn` on; over all without.
  void expect_right(ConstRows x, std::optional<size_t> turn = std::nullopt) {
    for (size_t i = turn.value_or(0) % 3; i < std::size(kScalings); i += turn ? 3 : 1) {
      const Fp4Scaling& scaling = kScalings[i];
      EXPECT_TRUE(is_right(x, scaling))
          << scaling.options.square_blocks << scaling.options.hadamard
          << scaling.options.stochastic_rounding << static_cast<int>(scaling.options.four_over_six)
          << " " << scaling.largest_scale;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Cpu, Nvfp4, ::testing::ValuesIn(all_targets()), Nvfp4::name);

TEST_P(Nvfp4, ExamplesOfTheNumericsPage) {
  struct Example {
    std::vector<float> x;
    int scale;
    std::vector<int> bytes;
    std::vector<float> y;
  };
  const auto block = [](std::vector<float> x, float other) {
    x.resize(16, 0.0f);
    x.push_back(other);
    x.resize(32, 0.0f);
    return x;
  };
  const Example examples[] = {
      {block({0.0f, -0.0f}, 0), 0x00, {0x80}, {0.0f, -0.0f}},
      {block({6, 3, 1, -0.5f}, 0), 0x7E, {0x57, 0x92}, {6, 3, 1, -0.5f}},
      {block({6, 5, 2.5f, 0.25f}, 0), 0x7E, {0x67, 0x04}, {6, 4, 2, 0}},
      {block({1e-6f, -1e-6f}, 1000), 0x00, {0xF7}, {0.0f, -0.0f}},
      {block({kInfinity, 1}, 0), 0x7E, {0x07}, {kInfinity, kNan}},
      {block({kNan, 1}, 6), 0x7F, {0x77}, {kNan, kNan}},
  };
  for (const Example& example : examples) {
    const ConstRows x{example.x.data(), Element::float32, 1, 32, 32};
    const Quantized got = run(kernels::cpu::nvfp4_quantize, x, {}, 1);
    EXPECT_EQ(got.scales[0][0], example.scale) << example.x[0];
    std::vector<float> y(32);
    kernels::cpu::nvfp4_dequantize(got.codes[0].data(), got.scales[0].data(), got.amaxes[0], 448,
                                   Fp4Direction::row, {y.data(), Element::float32, 1, 32, 32});
    for (size_t i = 0; i < example.bytes.size(); ++i)
      EXPECT_EQ(got.codes[0][i], example.bytes[i]) << example.x[0] << " at " << i;
    for (size_t i = 0; i < example.y.size(); ++i) {
      if (std::isnan(example.y[i])) {
        EXPECT_TRUE(std::isnan(y[i])) << example.x[0] << " at " << i;
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(example.y[i])) << y[i];
      }
    }
  }
}

TEST_P(Nvfp4, FourOverSixTakesTheScaleThatErrsLess) {
  struct Example {
    std::vector<float> x;
    int scale;
    std::vector<int> bytes;
  };
  // Behind 1536 = 6 * 256 the scale of the tensor is 1, and those of blocks are a sixth or a fourth
  // of their amaxes: 1.25 is 0x3A, 1 is 0x38.
  const Example examples[] = {
      {{5, -3.75f, 2.5f}, 0x3A, {0xD6, 0x04}},  // 4, -3, 2: none errs
      {{6, -3, 1}, 0x38, {0xD7, 0x02}},         // 6, -3, 1: none errs
      {{0.0f, -0.0f}, 0x00, {0x80}},            // equal: to 6
      {{4, 2, 1}, 0x38, {0x46, 0x02}},          // under 1 as under 0.6875 * 1.5
  };
  for (const Example& example : examples) {
    for (const FourOverSix metric : {FourOverSix::mae, FourOverSix::mse}) {
      for (const bool square : {false, true}) {
        std::vector<float> x = example.x;
        x.resize(16, 0.0f);
        x.push_back(1536);
        x.resize(32, 0.0f);
        const Quantized got = run(
            kernels::cpu::nvfp4_quantize, {x.data(), Element::float32, 1, 32, 32},
            {.options = {.square_blocks = square, .four_over_six = metric}, .largest_scale = 256},
            1);
        EXPECT_EQ(got.scales[0][0], example.scale) << example.x[0];
        for (size_t i = 0; i < example.bytes.size(); ++i)
          EXPECT_EQ(got.codes[0][i], example.bytes[i]) << example.x[0] << " at " << i;
      }
    }
  }
}

TEST_P(Nvfp4, FourOverSixErrsLessThanEither) {
  const Matrix x = Matrix::random(Element::float32, 64, 256, 0, 11);
  const auto errors = [&](const Fp4Scaling& scaling, size_t d, double& absolute, double& square) {
    const Quantized q = run(kernels::cpu::nvfp4_quantize, x.view(), scaling);
    Matrix y(Element::float32, 64, 256);
    kernels::cpu::nvfp4_dequantize(q.codes[d].data(), q.scales[d].data(), q.amaxes[d],
                                   scaling.largest_scale, kDirections[d], y.view());
    absolute = square = 0;
    for (size_t k = 0; k < x.size(); ++k) {
      const double error = double{y.at(k)} - x.at(k);
      absolute += std::abs(error);
      square += error * error;
    }
  };
  for (const size_t d : {0, 1}) {
    double absolute[3], square[3];
    for (const FourOverSix metric : {FourOverSix::off, FourOverSix::mae, FourOverSix::mse}) {
      const auto i = static_cast<size_t>(metric);
      errors({.options = {.four_over_six = metric}, .largest_scale = 256}, d, absolute[i],
             square[i]);
    }
    EXPECT_LT(absolute[1], 0.97 * absolute[0]);
    EXPECT_LT(square[2], 0.92 * square[0]);
    EXPECT_LE(absolute[1], absolute[2]);
    EXPECT_LE(square[2], square[1]);
  }
}

TEST_P(Nvfp4, EveryPatternOfSixteenBits) {
  std::vector<uint16_t> x(65536);
  std::iota(x.begin(), x.end(), uint16_t{0});
  for (const Element element : {Element::bfloat16, Element::float16})
    for (const size_t cols : {256, 512})
      expect_right({x.data(), element, x.size() / cols, cols, cols});
}

TEST_P(Nvfp4, RandomFloat32Patterns) {
  std::mt19937 engine(20246);
  std::vector<float> x(100 * 300);
  for (float& value : x) value = std::bit_cast<float>(static_cast<uint32_t>(engine()));
  const ConstRows view{x.data(), Element::float32, 100, 300, 300};
  expect_right(view);
  for (float& value : x)  // finite
    value = std::bit_cast<float>((std::bit_cast<uint32_t>(value) & 0x87FFFFFFu) | 0x38000000u);
  expect_right(view);
  for (float& value : x) value *= 0x1p-125f;
  expect_right(view);
}

TEST_P(Nvfp4, EveryShapeAroundABlockAndStride) {
  uint32_t seed = 0, turn = 0;
  for (const Element element : kElements) {
    ++turn;  // a shape meets other scalings with another element: the count of shapes divides by 3
    for (const size_t rows : {1, 2, 15, 16, 17, 33}) {
      for (const size_t cols : {1, 3, 8, 15, 16, 17, 33, 255, 256, 257, 300}) {
        const Matrix x = Matrix::random(element, rows, cols, seed % 2 * 3, seed);
        ++seed;
        expect_right(x.view(), turn++);
      }
    }
  }
}

TEST_P(Nvfp4, OneDirectionAlone) {
  const Matrix x = Matrix::random(Element::bfloat16, 35, 90, 2, 9);
  for (const Fp4Scaling& scaling : kScalings)
    for (const int wanted : {0, 1, 2}) EXPECT_TRUE(is_right(x.view(), scaling, wanted)) << wanted;
}

TEST_P(Nvfp4, ASpecialValueInEveryLane) {
  size_t turn = 0;
  for (const Element element : kElements) {
    for (const float special : {kNan, -kNan, -kInfinity, -0.0f}) {
      for (size_t at = 0; at < 40; ++at) {
        Matrix x = Matrix::random(element, 18, 40, 0, 7);
        x.set(at * 41 % (18 * 40), special);
        expect_right(x.view(), turn++);
      }
    }
  }
}

TEST_P(Nvfp4, NothingAndZerosAndNanAlone) {
  for (const auto& [rows, cols] : {std::pair<size_t, size_t>{0, 5}, {5, 0}, {0, 0}}) {
    const ConstRows empty{nullptr, Element::float32, rows, cols, cols};
    const Quantized got = run(kernels::cpu::nvfp4_quantize, empty, {});
    EXPECT_EQ(got.amax, 0.0f);
    EXPECT_EQ(got.amaxes[0], 0.0f);
    EXPECT_EQ(got.amaxes[1], 0.0f);
  }
  for (const float value : {-0.0f, kNan, FLT_TRUE_MIN, FLT_MAX}) {
    const std::vector<float> x(20 * 40, value);
    expect_right({x.data(), Element::float32, 20, 40, 40});
  }
}

TEST_P(Nvfp4, AnyNumberOfThreadsGivesTheSameBits) {
  const Matrix x = Matrix::random(Element::bfloat16, 150, 350, 1, 8);
  for (const int threads : {1, 2, 3}) {
    const ScopedThreadPool pool(threads);
    expect_right(x.view());
  }
}

TEST_P(Nvfp4, StochasticCodesAreRightOnAverage) {
  const Matrix x = Matrix::random(Element::float32, 16, 64, 0, 3);
  std::vector<double> sums[2] = {std::vector<double>(x.size()), std::vector<double>(x.size())};
  constexpr int kTries = 400;
  for (int i = 0; i < kTries; ++i) {
    const Quantized q =
        run(kernels::cpu::nvfp4_quantize, x.view(),
            {.options = {.stochastic_rounding = true}, .seed = static_cast<uint64_t>(i)});
    for (const size_t d : {0, 1}) {
      Matrix y(Element::float32, 16, 64);
      kernels::cpu::nvfp4_dequantize(q.codes[d].data(), q.scales[d].data(), q.amaxes[d], 448,
                                     kDirections[d], y.view());
      for (size_t k = 0; k < x.size(); ++k) sums[d][k] += y.at(k);
    }
  }
  // A step is at most a third of a block's largest number, which no row exceeds 4 of.
  for (const size_t d : {0, 1})
    for (size_t k = 0; k < x.size(); ++k)
      ASSERT_NEAR(sums[d][k] / kTries, x.at(k), 0.2) << d << " at " << k;
}

TEST_P(Nvfp4, DequantizesEveryShape) {
  for (const Element element : kElements) {
    for (const auto& [rows, cols, largest] :
         {std::tuple<size_t, size_t, float>{1, 1, 448}, {19, 45, 448}, {32, 300, 256}}) {
      const Matrix x = Matrix::random(element, rows, cols, 0, static_cast<uint32_t>(cols));
      const Quantized q =
          run(kernels::nvfp4_quantize_reference, x.view(), {.largest_scale = largest});
      for (const size_t d : {0, 1}) {
        const bool by_row = d == 0;
        const size_t code_stride = kernels::fp4_code_shape(kDirections[d], rows, cols).cols,
                     scale_stride = kernels::fp4_scale_shape(kDirections[d], rows, cols).cols;
        Matrix y(element, rows, cols, 3), expected(element, rows, cols);
        for (size_t at = 0; at < y.size(); ++at) {
          const size_t r = at / cols, c = at % cols, k = by_row ? c : r;
          const uint8_t byte =
              q.codes[d][by_row ? r * code_stride + c / 2 : r / 2 * code_stride + c];
          const uint8_t code = k % 2 == 0 ? byte & 0xF : byte >> 4;
          const uint8_t scale =
              q.scales[d][by_row ? r * scale_stride + c / 16 : r / 16 * scale_stride + c];
          const float factor =
              kernels::float_from_fp8(scale, kernels::Fp8Format::e4m3) * q.amaxes[d];
          expected.set(at, kernels::float_from_fp8(code, kernels::Fp8Format::e2m1) *
                               (factor * (1.0f / (6 * largest))));
        }
        kernels::cpu::nvfp4_dequantize(q.codes[d].data(), q.scales[d].data(), q.amaxes[d], largest,
                                       kDirections[d], y.view());
        EXPECT_TRUE(same_bits<uint32_t>(y.bits(), expected.bits())) << rows << "x" << cols;
        EXPECT_TRUE(y.gaps_untouched());
      }
    }
  }
}

#if defined(__x86_64__)
TEST_P(Nvfp4, IgnoresFlushToZeroOfTheCaller) {
  const std::vector<float> x = denormals();
  const ConstRows view{x.data(), Element::float32, 40, 30, 30};
  for (const Fp4Scaling& scaling : kScalings) {
    const Quantized expected = run(kernels::nvfp4_quantize_reference, view, scaling);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    const Quantized got = run(kernels::cpu::nvfp4_quantize, view, scaling),
                    got_reference = run(kernels::nvfp4_quantize_reference, view, scaling);
    _mm_setcsr(before);
    EXPECT_TRUE(same(got, expected));
    EXPECT_TRUE(same(got_reference, expected));
  }
}
#endif

}  // namespace
}  // namespace tandem::testing::kernels_nvfp4
