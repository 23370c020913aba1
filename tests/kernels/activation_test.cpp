#include "kernels/activation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "kernels/elementwise.h"
#include "tests/kernels/activation_reference.h"
#include "tests/support/matrix.h"
#include "tests/support/targets.h"
#include "tests/support/thread_pool.h"
#include "tests/support/ulp.h"

namespace tandem::testing::kernels_activation {
namespace {

using kernels::Activation;
using kernels::ConstRows;
using kernels::ConstVector;
using kernels::Element;
using kernels::Rows;
using kernels::Vector;

std::vector<Activation> all_activations() {
  std::vector<Activation> all;
  for (size_t i = 0; i < std::size(kernels::kActivationNames); ++i)
    all.push_back(static_cast<Activation>(i));
  return all;
}

constexpr size_t kRowCases[] = {0, 1, 3, 17};
constexpr size_t kColumnCases[] = {1, 7, 8, 15, 16, 17, 33, 1000};

std::string activation_name(Activation activation) {
  return std::string(kernels::kActivationNames[static_cast<size_t>(activation)]);
}

using Param = std::tuple<int64_t, Activation, bool>;

class ActivationKernel : public ::testing::TestWithParam<Param> {
 protected:
  ActivationKernel()
      : target_(std::get<0>(GetParam())),
        act_(std::get<1>(GetParam())),
        gated_(std::get<2>(GetParam())) {}

  size_t wide(size_t cols) const { return gated_ ? 2 * cols : cols; }
  void forward(ConstRows x, ConstVector bias, Element z_element, Rows z, Rows y) const {
    kernels::cpu::activation_forward({act_, gated_}, x, bias, z_element, z, y);
  }
  void backward(ConstRows grad_y, ConstRows z, Rows grad_z, Vector grad_bias, Rows y) const {
    kernels::cpu::activation_backward({act_, gated_}, grad_y, z, grad_z, grad_bias, y);
  }

  void expect_forward(const Matrix& z, const Matrix& y) const {
    for (size_t r = 0; r < y.rows(); ++r) {
      for (size_t c = 0; c < y.cols(); ++c) {
        const double factor = gated_ ? value(z, r, y.cols() + c) : 1;
        const double expected = activation_reference(act_, value(z, r, c)) * factor;
        const double bound = forward_bound(expected, z.element(), gated_ ? &factor : nullptr);
        ASSERT_TRUE(is_near(expected, value(y, r, c), bound, y.element(), r, c))
            << "z = " << value(z, r, c);
      }
    }
  }

  void expect_backward(const Matrix& grad_y, const Matrix& z, const Matrix& grad_z) const {
    const size_t cols = grad_y.cols();
    for (size_t r = 0; r < grad_y.rows(); ++r) {
      for (size_t c = 0; c < cols; ++c) {
        const double g = value(grad_y, r, c), a = value(z, r, c);
        const double outer = gated_ ? g * value(z, r, cols + c) : g;
        const double expected = outer * activation_slope_reference(act_, a);
        const double share = z.element() == Element::float32 ? 4 * 0x1p-23 : 0x1p-15;
        ASSERT_TRUE(is_near(expected, value(grad_z, r, c),
                            share * std::max(std::fabs(outer), std::fabs(expected)),
                            grad_z.element(), r, c))
            << "z = " << a << ", grad_y = " << g;
        if (!gated_) continue;
        const double other = g * activation_reference(act_, a);
        ASSERT_TRUE(is_near(other, value(grad_z, r, cols + c),
                            forward_bound(other, z.element(), &g), grad_z.element(), r, cols + c))
            << "z = " << a << ", grad_y = " << g;
      }
    }
  }

  ScopedTarget target_;
  Activation act_;
  bool gated_;
};

class ActivationAccuracy : public ActivationKernel {};

struct Elements {
  Element x, bias, z, y;
};
constexpr Elements kMixes[] = {
    {Element::float32, Element::float32, Element::float32, Element::float32},
    {Element::bfloat16, Element::bfloat16, Element::bfloat16, Element::bfloat16},
    {Element::float16, Element::float16, Element::float16, Element::float16},
    {Element::bfloat16, Element::float32, Element::bfloat16, Element::bfloat16},
    {Element::float32, Element::bfloat16, Element::bfloat16, Element::float32},
    {Element::float32, Element::float16, Element::bfloat16, Element::bfloat16},
    {Element::float16, Element::float32, Element::float32, Element::bfloat16},
};

TEST_P(ActivationAccuracy, ForwardAndBackwardMatchFloat64) {
  for (const Elements& mix : kMixes) {
    for (const size_t rows : kRowCases) {
      for (const size_t cols : kColumnCases) {
        for (const size_t gap : {size_t{0}, size_t{3}}) {
          SCOPED_TRACE(::testing::Message()
                       << rows << " x " << cols << ", gap " << gap << ", x " << name_of(mix.x)
                       << ", z " << name_of(mix.z) << ", y " << name_of(mix.y));
          const Matrix x = Matrix::random(mix.x, rows, wide(cols), gap, 1);
          const Matrix bias = Matrix::random(mix.bias, 1, wide(cols), 0, 2);
          Matrix z(mix.z, rows, wide(cols), gap), y(mix.y, rows, cols, gap), without_z = y;
          forward(x.view(), bias.parameter(), mix.z, z.view(), y.view());
          for (size_t r = 0; r < rows; ++r) {
            for (size_t c = 0; c < wide(cols); ++c) {
              const double sum = static_cast<float>(value(x, r, c) + value(bias, 0, c));
              ASSERT_EQ(rounded(sum, mix.z), value(z, r, c)) << "at [" << r << ", " << c << "]";
            }
          }
          ASSERT_NO_FATAL_FAILURE(expect_forward(z, y));
          EXPECT_TRUE(z.gaps_untouched() && y.gaps_untouched());
          forward(x.view(), bias.parameter(), mix.z, {}, without_z.view());
          EXPECT_EQ(y.bits(), without_z.bits()) << "z is not wanted, y differs";

          const Matrix grad_y = Matrix::random(mix.y, rows, cols, gap, 3);
          Matrix grad_z(mix.x, rows, wide(cols), gap), grad_bias(mix.bias, 1, wide(cols)),
              y_again(mix.y, rows, cols, gap);
          backward(grad_y.view(), z.view(), grad_z.view(), grad_bias.vector(), y_again.view());
          ASSERT_NO_FATAL_FAILURE(expect_backward(grad_y, z, grad_z));
          EXPECT_TRUE(grad_z.gaps_untouched() && grad_bias.gaps_untouched());
          EXPECT_EQ(y.bits(), y_again.bits()) << "y of backward differs from y of forward";
          for (size_t c = 0; c < wide(cols); ++c) {
            float sum = 0;  // fewer than 32 rows are one block: their order is theirs
            for (size_t r = 0; r < rows; ++r) sum += value(grad_z, r, c);
            ASSERT_EQ(rounded(sum, mix.bias), value(grad_bias, 0, c)) << "at column " << c;
          }
          Matrix grad_z_alone(mix.x, rows, wide(cols), gap);
          backward(grad_y.view(), z.view(), grad_z_alone.view(), {}, {});
          EXPECT_EQ(grad_z.bits(), grad_z_alone.bits())
              << "grad_bias and y are not wanted, grad_z differs";
        }
      }
    }
  }
}

TEST_P(ActivationAccuracy, EveryBfloat16) {
  constexpr size_t kRows = 256, kCols = 256;
  Matrix z(Element::bfloat16, kRows, wide(kCols));
  Matrix grad_y(Element::bfloat16, kRows, kCols);
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t c = 0; c < kCols; ++c) {
      put(z, r, c, std::bit_cast<float>(static_cast<uint32_t>(r * kCols + c) << 16));
      if (gated_) put(z, r, kCols + c, 1.5);
      put(grad_y, r, c, 1);
    }
  }
  Matrix y(Element::bfloat16, kRows, kCols), grad_z(Element::bfloat16, kRows, wide(kCols)),
      y_again = y;
  forward(z.view(), {}, Element::bfloat16, {}, y.view());
  ASSERT_NO_FATAL_FAILURE(expect_forward(z, y));
  backward(grad_y.view(), z.view(), grad_z.view(), {}, y_again.view());
  ASSERT_NO_FATAL_FAILURE(expect_backward(grad_y, z, grad_z));
  EXPECT_EQ(y.bits(), y_again.bits());

  // The same numbers in float32: the bound is far tighter.
  Matrix wide_z(Element::float32, kRows, wide(kCols)), wide_y(Element::float32, kRows, kCols);
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t c = 0; c < wide(kCols); ++c) put(wide_z, r, c, value(z, r, c));
  }
  forward(wide_z.view(), {}, Element::float32, {}, wide_y.view());
  ASSERT_NO_FATAL_FAILURE(expect_forward(wide_z, wide_y));
}

TEST_P(ActivationAccuracy, ForwardFloat32Sweep) {
  constexpr size_t kCount = 200003;
  Matrix z(Element::float32, 1, wide(kCount));
  for (size_t c = 0; c < kCount; ++c) {
    const double share = static_cast<double>(c) / kCount;
    put(z, 0, c,
        c % 3 == 0   ? 24 * share - 12
        : c % 3 == 1 ? 220 * share - 110
                     : (c % 2 ? 1 : -1) * std::exp(60 * share - 55));
    if (gated_) put(z, 0, kCount + c, 0.75 + share);
  }
  Matrix y(Element::float32, 1, kCount);
  forward(z.view(), {}, Element::float32, {}, y.view());
  ASSERT_NO_FATAL_FAILURE(expect_forward(z, y));
  const Matrix grad_y = Matrix::random(Element::float32, 1, kCount, 0, 4);
  Matrix grad_z(Element::float32, 1, wide(kCount));
  backward(grad_y.view(), z.view(), grad_z.view(), {}, {});
  ASSERT_NO_FATAL_FAILURE(expect_backward(grad_y, z, grad_z));
}

TEST_P(ActivationAccuracy, InfinitiesAndNan) {
  const double specials[] = {INFINITY, -INFINITY, NAN, -NAN, 0.0, -0.0, 1e38, -1e38, 1e-40};
  for (const Element element : {Element::float32, Element::bfloat16}) {
    constexpr size_t kCols = 37;
    Matrix z(element, 1, wide(kCols)), y(element, 1, kCols), grad_y(element, 1, kCols),
        grad_z(element, 1, wide(kCols));
    for (size_t c = 0; c < wide(kCols); ++c)
      put(z, 0, c, c < kCols ? specials[c % std::size(specials)] : 1);
    for (size_t c = 0; c < kCols; ++c) put(grad_y, 0, c, 1);
    forward(z.view(), {}, element, {}, y.view());
    ASSERT_NO_FATAL_FAILURE(expect_forward(z, y));
    backward(grad_y.view(), z.view(), grad_z.view(), {}, {});
    for (size_t c = 0; c < kCols; ++c) {
      const double expected = activation_slope_reference(act_, value(z, 0, c));
      ASSERT_TRUE(is_near(expected, value(grad_z, 0, c), 4 * 0x1p-23, element, 0, c))
          << "z = " << value(z, 0, c);
    }
  }
}

TEST_P(ActivationKernel, FusedBiasEqualsUnfused) {
  for (const Element element : kElements) {
    const Matrix x = Matrix::random(element, 9, wide(101), 0, 5),
                 bias = Matrix::random(element, 1, wide(101), 0, 6);
    Matrix fused(element, 9, 101), sum(element, 9, wide(101)), unfused = fused;
    forward(x.view(), bias.parameter(), element, {}, fused.view());
    kernels::cpu::add_bias(x.view(), bias.parameter(), {}, sum.view());
    forward(sum.view(), {}, element, {}, unfused.view());
    EXPECT_EQ(fused.bits(), unfused.bits()) << name_of(element);
  }
}

TEST_P(ActivationKernel, RepeatedRow) {
  const Matrix z = Matrix::random(Element::float32, 1, wide(40), 0, 7),
               grad_y = Matrix::random(Element::float32, 1, 40, 0, 8);
  Matrix y(Element::float32, 5, 40), grad_z(Element::float32, 5, wide(40));
  const ConstRows all_z = {z.view().data, Element::float32, 5, wide(40), 0};
  forward(all_z, {}, Element::float32, {}, y.view());
  backward({grad_y.view().data, Element::float32, 5, 40, 0}, all_z, grad_z.view(), {}, {});
  for (size_t r = 1; r < 5; ++r) {
    for (size_t c = 0; c < wide(40); ++c) {
      ASSERT_EQ(value(grad_z, 0, c), value(grad_z, r, c)) << "at [" << r << ", " << c << "]";
      ASSERT_EQ(value(y, 0, c % 40), value(y, r, c % 40)) << "at [" << r << ", " << c % 40 << "]";
    }
  }
}

TEST_P(ActivationKernel, ThreadsDoNotMatter) {
  for (const Element element : {Element::float32, Element::bfloat16}) {
    const Matrix z = Matrix::random(element, 517, wide(67), 0, 9),
                 grad_y = Matrix::random(element, 517, 67, 0, 10);
    std::vector<std::vector<uint32_t>> results[3];
    for (int size = 1; size <= 3; ++size) {
      const ScopedThreadPool pool(size);
      Matrix y(element, 517, 67), grad_z(element, 517, wide(67)),
          grad_bias(Element::float32, 1, wide(67)), y_again = y;
      forward(z.view(), {}, element, {}, y.view());
      backward(grad_y.view(), z.view(), grad_z.view(), grad_bias.vector(), y_again.view());
      results[size - 1] = {y.bits(), grad_z.bits(), grad_bias.bits(), y_again.bits()};
    }
    EXPECT_EQ(results[0], results[1]) << "two threads, " << name_of(element);
    EXPECT_EQ(results[0], results[2]) << "three threads, " << name_of(element);
  }
}

std::string case_name(const ::testing::TestParamInfo<Param>& info) {
  return target_name(std::get<0>(info.param)) + "_" + activation_name(std::get<1>(info.param)) +
         (std::get<2>(info.param) ? "_gated" : "");
}
INSTANTIATE_TEST_SUITE_P(All, ActivationKernel,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::ValuesIn(all_activations()),
                                            ::testing::Bool()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Known, ActivationAccuracy,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::ValuesIn(kKnownActivations),
                                            ::testing::Bool()),
                         case_name);

}  // namespace
}  // namespace tandem::testing::kernels_activation
