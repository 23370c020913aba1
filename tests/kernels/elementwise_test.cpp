#include "kernels/elementwise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "kernels/philox.h"
#include "tests/support/matrix.h"
#include "tests/support/targets.h"
#include "tests/support/thread_pool.h"
#include "tests/support/ulp.h"

namespace tandem::testing::kernels_elementwise {
namespace {

using kernels::Element;

constexpr size_t kRowCases[] = {0, 1, 3, 17};
constexpr size_t kColumnCases[] = {1, 7, 8, 15, 16, 17, 33, 1000};

struct Elements {
  Element a, b, out;
};
constexpr Elements kMixes[] = {
    {Element::float32, Element::float32, Element::float32},
    {Element::bfloat16, Element::bfloat16, Element::bfloat16},
    {Element::float16, Element::float16, Element::float16},
    {Element::bfloat16, Element::float32, Element::bfloat16},
    {Element::float32, Element::bfloat16, Element::float32},
    {Element::float16, Element::float32, Element::bfloat16},
};

class ElementwiseKernel : public OnEachTarget {
 protected:
  /// Calls `body(rows, cols, gap, elements)` for every shape and mix.
  template <typename Body>
  void for_each_case(Body body) {
    for (const Elements& mix : kMixes) {
      for (const size_t rows : kRowCases) {
        for (const size_t cols : kColumnCases) {
          for (const size_t gap : {size_t{0}, size_t{5}}) {
            SCOPED_TRACE(::testing::Message()
                         << rows << " x " << cols << ", gap " << gap << ", elements "
                         << name_of(mix.a) << ", " << name_of(mix.b) << ", " << name_of(mix.out));
            ASSERT_NO_FATAL_FAILURE(body(rows, cols, gap, mix));
          }
        }
      }
    }
  }

  /// Every element of `out` is `expected(i)`, rounded to its element, to the bit.
  template <typename Expected>
  static void expect_exactly(const Matrix& out, Expected expected) {
    for (size_t i = 0; i < out.size(); ++i) {
      const float want = rounded(expected(i), out.element());
      ASSERT_EQ(std::bit_cast<uint32_t>(want), std::bit_cast<uint32_t>(out.at(i)))
          << "element " << i << ": expected " << want << ", got " << out.at(i);
    }
    EXPECT_TRUE(out.gaps_untouched());
  }
};
INSTANTIATE_TEST_SUITE_P(All, ElementwiseKernel, ::testing::ValuesIn(all_targets()),
                         ElementwiseKernel::name);

TEST_P(ElementwiseKernel, AddBias) {
  for_each_case([](size_t rows, size_t cols, size_t gap, Elements mix) {
    const Matrix x = Matrix::random(mix.a, rows, cols, gap, 3),
                 bias = Matrix::random(mix.b, 1, cols, 0, 4);
    const Matrix extra = Matrix::random(mix.out, rows, cols, gap, 5);
    Matrix out(mix.out, rows, cols, gap);
    kernels::cpu::add_bias(x.view(), bias.parameter(), extra.view(), out.view());
    expect_exactly(out, [&](size_t i) { return x.at(i) + bias.at(i % cols) + extra.at(i); });
    kernels::cpu::add_bias(x.view(), bias.parameter(), {}, out.view());
    expect_exactly(out, [&](size_t i) { return x.at(i) + bias.at(i % cols); });
    kernels::cpu::add_bias(x.view(), {}, extra.view(), out.view());
    expect_exactly(out, [&](size_t i) { return x.at(i) + extra.at(i); });
    kernels::cpu::add_bias(x.view(), {}, {}, out.view());
    expect_exactly(out, [&](size_t i) { return x.at(i); });
  });
}

TEST_P(ElementwiseKernel, MultiplyTwice) {
  for_each_case([](size_t rows, size_t cols, size_t gap, Elements mix) {
    const Matrix x = Matrix::random(mix.a, rows, cols, gap, 6);
    Matrix out(mix.out, rows, cols, 2 * gap);
    kernels::cpu::multiply_twice(x.view(), 1e-25f, 1e25f, out.view());
    expect_exactly(out, [&](size_t i) { return x.at(i) * 1e-25f * 1e25f; });
  });
}

TEST_P(ElementwiseKernel, MultiplyTwiceKeepsFactorsApart) {
  Matrix x(Element::float32, 1, 20), out = x;
  for (size_t i = 0; i < 20; ++i) x.set(i, 1e30f + static_cast<float>(i) * 1e29f);
  kernels::cpu::multiply_twice(x.view(), 1e-30f, 1e-30f, out.view());
  expect_exactly(out, [&](size_t i) { return x.at(i) * 1e-30f * 1e-30f; });
  EXPECT_GT(out.at(0), 0) << "1e-30 squared is 0, 1e30 times it, twice, is not";
}

TEST_P(ElementwiseKernel, InPlace) {
  Matrix x = Matrix::random(Element::bfloat16, 5, 37, 0, 7);
  const Matrix before = x;
  kernels::cpu::multiply_twice(x.view(), 1.7f, 0.3f, x.view());
  expect_exactly(x, [&](size_t i) { return before.at(i) * 1.7f * 0.3f; });
}

TEST_P(ElementwiseKernel, NanAndInfinity) {
  Matrix a(Element::float32, 1, 20), b(Element::float32, 1, 20), out(Element::bfloat16, 1, 20);
  const float specials[] = {NAN, INFINITY, -INFINITY, 3.4e38f};
  for (size_t i = 0; i < 20; ++i) a.set(i, specials[i % 4]), b.set(i, i < 4 ? -INFINITY : 1.0f);
  kernels::cpu::add_bias(a.view(), {}, b.view(), out.view());
  for (size_t i = 0; i < 20; ++i) {
    const float want = rounded(a.at(i) + b.at(i), Element::bfloat16);
    EXPECT_TRUE(std::isnan(want) ? std::isnan(out.at(i)) : want == out.at(i))
        << i << ": expected " << want << ", got " << out.at(i);
  }
}

/// Any bits at all, among them whole vectors and single lanes of denormals, which processors have
/// instructions for that round all else.
TEST_P(ElementwiseKernel, RoundsAnyBitsToBFloat16) {
  constexpr size_t kRows = 64, kCols = 16411;
  Matrix x(Element::float32, kRows, kCols), out(Element::bfloat16, kRows, kCols);
  auto* bits = static_cast<uint32_t*>(x.view().data);
  std::mt19937 draw(13);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t row = i / kCols;
    bits[i] = static_cast<uint32_t>(draw());
    if (row % 4 == 1) bits[i] &= 0x807FFFFFu;                   // denormals and zeros alone
    if (row % 4 == 2 && draw() % 64 != 0) bits[i] |= 1u << 30;  // few that are small
    if (row % 4 == 3) bits[i] = (bits[i] & 0xFFFF0000u) | (0x7FFFu + draw() % 3);  // beside ties
  }
  kernels::cpu::add_bias(x.view(), {}, {}, out.view());
  for (size_t i = 0; i < x.size(); ++i) {
    const uint32_t expected = round_to_bits(std::bit_cast<float>(bits[i]), Element::bfloat16);
    ASSERT_EQ(out.bits_at(i), expected) << std::hex << bits[i];
  }
}

TEST_P(ElementwiseKernel, SumRows) {
  for_each_case([](size_t rows, size_t cols, size_t gap, Elements mix) {
    const Matrix x = Matrix::random(mix.a, rows, cols, gap, 8);
    Matrix sums(mix.out, 1, cols);
    kernels::cpu::sum_rows(x.view(), sums.vector());
    // Fewer than 32 rows are one block, summed in order.
    expect_exactly(sums, [&](size_t c) {
      float sum = 0;
      for (size_t r = 0; r < rows; ++r) sum += x.at(r * cols + c);
      return sum;
    });
  });
}

TEST_P(ElementwiseKernel, SumRowsOfManyBlocks) {
  const Matrix x = Matrix::random(Element::float32, 3001, 19, 2, 9);
  Matrix sums(Element::float32, 1, 19);
  kernels::cpu::sum_rows(x.view(), sums.vector());
  std::vector<double> expected(19), magnitudes(19);
  for (size_t i = 0; i < x.size(); ++i)
    expected[i % 19] += x.at(i), magnitudes[i % 19] += std::fabs(x.at(i));
  EXPECT_TRUE(within_ulps(sums.values(), expected, 2, Element::float32, magnitudes));
}

TEST_P(ElementwiseKernel, ThreadsDoNotMatter) {
  for (const Element element : kElements) {
    const Matrix x = Matrix::random(element, 701, 83, 0, 10),
                 bias = Matrix::random(element, 1, 83, 0, 11);
    std::vector<std::vector<uint32_t>> results[3];
    for (int size = 1; size <= 3; ++size) {
      const ScopedThreadPool pool(size);
      Matrix sum(element, 701, 83), dropped = sum, grad_x = sum, sums(Element::float32, 1, 83),
                                    grad_bias = sums;
      kernels::cpu::add_bias(x.view(), bias.parameter(), x.view(), sum.view());
      kernels::cpu::dropout(x.view(), 12, 0.4, dropped.view());
      kernels::cpu::sum_rows(x.view(), sums.vector());
      kernels::cpu::dropout_backward_bias(x.view(), 12, 0.4, grad_x.view(), grad_bias.vector());
      results[size - 1] = {sum.bits(), dropped.bits(), sums.bits(), grad_x.bits(),
                           grad_bias.bits()};
    }
    EXPECT_EQ(results[0], results[1]) << "two threads, " << name_of(element);
    EXPECT_EQ(results[0], results[2]) << "three threads, " << name_of(element);
  }
}

TEST(Philox, KnownAnswers) {
  EXPECT_THAT(kernels::philox4x32_10(0, 0),
              ::testing::ElementsAre(0x6627E8D5u, 0xE169C58Du, 0xBC57AC4Cu, 0x9B00DBD8u));
}

bool is_kept(uint64_t seed, uint64_t index, double p) {
  return (kernels::philox4x32_10(index / 4, seed)[index % 4] >> 8) * 0x1p-24 >= p;
}

TEST_P(ElementwiseKernel, DropoutMask) {
  const double p = 0.3;
  const uint64_t seed = 0x123456789ABCDEF0u;
  for_each_case([&](size_t rows, size_t cols, size_t gap, Elements mix) {
    const Matrix x = Matrix::random(mix.a, rows, cols, gap, 13);
    Matrix out(mix.out, rows, cols, gap);
    kernels::cpu::dropout(x.view(), seed, p, out.view());
    expect_exactly(out, [&](size_t i) {
      return is_kept(seed, i, p) ? x.at(i) * static_cast<float>(1 / (1 - p)) : 0.0f;
    });
  });
}

TEST_P(ElementwiseKernel, DropoutAdd) {
  const double p = 0.3;
  const uint64_t seed = 77;
  const float factor = static_cast<float>(1 / (1 - p));
  for_each_case([&](size_t rows, size_t cols, size_t gap, Elements mix) {
    const Matrix x = Matrix::random(mix.a, rows, cols, gap, 13),
                 bias = Matrix::random(mix.b, 1, cols, 0, 14),
                 extra = Matrix::random(mix.b, rows, cols, gap, 15);
    const auto kept = [&](size_t i, float value) {
      return is_kept(seed, i, p) ? value * factor : 0.0f;
    };
    Matrix out(mix.out, rows, cols, gap);
    kernels::cpu::dropout_add(x.view(), bias.parameter(), seed, p, extra.view(), out.view());
    expect_exactly(out,
                   [&](size_t i) { return kept(i, x.at(i) + bias.at(i % cols)) + extra.at(i); });
    kernels::cpu::dropout_add(x.view(), {}, seed, p, extra.view(), out.view());
    expect_exactly(out, [&](size_t i) { return kept(i, x.at(i)) + extra.at(i); });
  });
}

TEST_P(ElementwiseKernel, DropoutBackwardBias) {
  const double p = 0.3;
  const uint64_t seed = 78;
  for_each_case([&](size_t rows, size_t cols, size_t gap, Elements mix) {
    const Matrix grad_y = Matrix::random(mix.a, rows, cols, gap, 16);
    const auto kept = [&](size_t i) {
      const float value = grad_y.at(i) * static_cast<float>(1 / (1 - p));
      return is_kept(seed, i, p) ? rounded(value, mix.a) : 0.0f;
    };
    for (const bool is_written : {true, false}) {
      Matrix grad_x(mix.a, rows, cols, gap), sums(mix.b, 1, cols);
      kernels::cpu::dropout_backward_bias(
          grad_y.view(), seed, p, is_written ? grad_x.view() : kernels::Rows(), sums.vector());
      if (is_written) expect_exactly(grad_x, kept);
      // Fewer than 32 rows are one block, summed in order.
      expect_exactly(sums, [&](size_t c) {
        float sum = 0;
        for (size_t r = 0; r < rows; ++r) sum += kept(r * cols + c);
        return sum;
      });
    }
  });
}

TEST_P(ElementwiseKernel, DropoutBackwardBiasIsDropoutAndSumRows) {
  for (const Element element : kElements) {
    const Matrix grad_y = Matrix::random(element, 3001, 519, 3, 17);
    Matrix grad_x(element, 3001, 519), expected = grad_x, sums(Element::float32, 1, 519),
                                       expected_sums = sums;
    kernels::cpu::dropout(grad_y.view(), 5, 0.25, expected.view());
    kernels::cpu::sum_rows(expected.view(), expected_sums.vector());
    kernels::cpu::dropout_backward_bias(grad_y.view(), 5, 0.25, grad_x.view(), sums.vector());
    EXPECT_EQ(grad_x.bits(), expected.bits()) << name_of(element);
    EXPECT_EQ(sums.bits(), expected_sums.bits()) << name_of(element);
  }
}

TEST_P(ElementwiseKernel, DropoutExtremes) {
  Matrix x = Matrix::random(Element::float32, 3, 50, 0, 14);
  x.set(5, NAN);
  x.set(6, INFINITY);
  Matrix out(Element::float32, 3, 50);
  kernels::cpu::dropout(x.view(), 1, 0.0, out.view());
  EXPECT_EQ(x.bits(), out.bits()) << "p = 0 keeps everything";
  kernels::cpu::dropout(x.view(), 1, 1.0, out.view());
  EXPECT_EQ(out.bits(), std::vector<uint32_t>(150, 0))
      << "p = 1 gives zeros, of NaN and infinity too";
}

TEST_P(ElementwiseKernel, DropoutKeepsItsShare) {
  constexpr size_t kCount = 200000;
  Matrix x(Element::float32, 1, kCount), out = x;
  for (size_t i = 0; i < kCount; ++i) x.set(i, 1);
  for (const double p : {0.1, 0.5, 0.9}) {
    kernels::cpu::dropout(x.view(), 99, p, out.view());
    size_t kept = 0;
    for (size_t i = 0; i < kCount; ++i) kept += out.at(i) != 0;
    EXPECT_NEAR(kept, (1 - p) * kCount, 4 * std::sqrt(p * (1 - p) * kCount)) << "p = " << p;
  }
}

}  // namespace
}  // namespace tandem::testing::kernels_elementwise
