// Gated units: those with numbers against float64, a and b by turns against halves, and a number
// per row against float64.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "kernels/activation.h"
#include "tests/kernels/activation_reference.h"
#include "tests/support/matrix.h"
#include "tests/support/targets.h"
#include "tests/support/thread_pool.h"

namespace tandem::testing::kernels_gated_unit {
namespace {

using kernels::Activation;
using kernels::Element;
using kernels::Function;

/// A factor and its derivative.
struct Factor {
  double value, slope;
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
Factor bounded(double x, double beta) {
  const double t = std::tanh(x / beta);
  return {beta * t, 1 - t * t};
}
/// x sigmoid(rate x)
Factor linear_gate(double x, double rate) {
  const double on = sigmoid(rate * x), off = sigmoid(-rate * x);
  return {x * on, on == 0 ? 0 : on + rate * x * on * off};
}

Factor gate_of(const Function& f, double a) {
  if (f.activation == Activation::situglu) {
    const Factor t = bounded(a, f.numbers[0]);
    const double on = sigmoid(a), off = sigmoid(-a);
    return {t.value * on, t.slope * on + t.value * on * off};
  }
  if (f.activation == Activation::clamped_swiglu) {
    const Factor gate = linear_gate(std::min(a, f.numbers[0]), f.numbers[1]);
    return {gate.value, a <= f.numbers[0] ? gate.slope : 0};
  }
  return {activation_reference(f.activation, a), activation_slope_reference(f.activation, a)};
}
Factor other_of(const Function& f, double b) {
  if (f.activation == Activation::situglu) return bounded(b, f.numbers[1]);
  if (f.activation == Activation::clamped_swiglu)
    return {std::clamp(b, -f.numbers[0], f.numbers[0]) + f.numbers[2],
            std::fabs(b) <= f.numbers[0] ? 1.0 : 0.0};
  return {b, 1};
}

/// Where a and b of column c of y lie in a row of z.
std::pair<size_t, size_t> columns_of(const Function& f, size_t cols, size_t c) {
  if (f.interleave == 0) return {c, cols + c};
  const size_t a = c / f.interleave * 2 * f.interleave + c % f.interleave;
  return {a, a + f.interleave};
}

Function with(Activation activation, kernels::UnitNumbers numbers, size_t interleave = 0) {
  Function function(activation, /*gated=*/true);
  function.numbers = numbers;
  function.interleave = interleave;
  return function;
}

std::vector<Function> units() {
  return {with(Activation::situglu, {4, 25}),
          with(Activation::situglu, {0.5, 1.5}, 1),
          with(Activation::situglu, {1000, 1e-3}, 32),
          with(Activation::clamped_swiglu, {7, 1.702, 1}),
          with(Activation::clamped_swiglu, {1.25, 1, 0}, 4),
          with(Activation::clamped_swiglu, {100, 0.3, -0.5}, 16),
          with(Activation::clamped_swiglu, {5, -1.1, 2}),
          with(Activation::clamped_swiglu, {5, 0, 2})};
}

/// Before the rounding to the element: of |expected|, and of what is below float32 itself.
double bound_of(double expected, Element element, double factor) {
  const double share = element == Element::float32 ? 8 * 0x1p-23 : 0x1p-15;
  return share * std::fabs(expected) + 0x1p-121 * std::max(1.0, std::fabs(factor));
}

class UnitAccuracy : public OnEachTarget {
 protected:
  void expect_all(const Function& f, const Matrix& z, const Matrix& grad_y) {
    const size_t rows = z.rows(), cols = grad_y.cols();
    Matrix y(z.element(), rows, cols), y_again = y, grad_z(z.element(), rows, 2 * cols);
    kernels::cpu::activation_forward(f, z.view(), {}, z.element(), {}, y.view());
    kernels::cpu::activation_backward(f, grad_y.view(), z.view(), grad_z.view(), {},
                                      y_again.view());
    EXPECT_EQ(y.bits(), y_again.bits()) << "y of backward differs from y of forward";
    const double share = z.element() == Element::float32 ? 0x1p-20 : 0x1p-14;
    for (size_t r = 0; r < rows; ++r)
      for (size_t c = 0; c < cols; ++c) {
        const auto [at_a, at_b] = columns_of(f, cols, c);
        const double a = value(z, r, at_a), b = value(z, r, at_b), g = value(grad_y, r, c);
        const Factor gate = gate_of(f, a), other = other_of(f, b);
        const double expected = gate.value * other.value;
        ASSERT_TRUE(is_near(expected, value(y, r, c), bound_of(expected, z.element(), other.value),
                            z.element(), r, c))
            << "a = " << a << ", b = " << b;
        const double grad_a = g * other.value * gate.slope, grad_b = g * gate.value * other.slope;
        ASSERT_TRUE(is_near(grad_a, value(grad_z, r, at_a),
                            share * std::max(std::fabs(g * other.value), std::fabs(grad_a)),
                            z.element(), r, at_a))
            << "a = " << a << ", b = " << b << ", grad_y = " << g;
        ASSERT_TRUE(is_near(grad_b, value(grad_z, r, at_b),
                            share * std::fabs(g * gate.value) + 0x1p-121 * std::fabs(g),
                            z.element(), r, at_b))
            << "a = " << a << ", b = " << b << ", grad_y = " << g;
      }
  }
};
INSTANTIATE_TEST_SUITE_P(All, UnitAccuracy, ::testing::ValuesIn(all_targets()), UnitAccuracy::name);

TEST_P(UnitAccuracy, MatchesFloat64) {
  for (const Function& f : units())
    for (const Element element : kElements)
      for (const size_t rows : {0, 1, 5})
        for (const size_t blocks : {1, 3, 21}) {
          const size_t cols = blocks * std::max<size_t>(f.interleave, 1);
          SCOPED_TRACE(::testing::Message()
                       << static_cast<int>(f.activation) << " by turns of " << f.interleave << ", "
                       << name_of(element) << ", " << rows << " x " << cols);
          ASSERT_NO_FATAL_FAILURE(expect_all(f, Matrix::random(element, rows, 2 * cols, 3, 1),
                                             Matrix::random(element, rows, cols, 0, 2)));
        }
}

TEST_P(UnitAccuracy, Sweep) {
  constexpr size_t kCount = 60003;
  for (Function f : units()) {
    f.interleave = 0;
    for (const Element element : {Element::float32, Element::bfloat16}) {
      Matrix z(element, 1, 2 * kCount), grad_y(element, 1, kCount);
      for (size_t c = 0; c < kCount; ++c) {
        const double share = static_cast<double>(c) / kCount;
        put(z, 0, c,
            c % 3 == 0   ? 24 * share - 12
            : c % 3 == 1 ? 220 * share - 110
                         : (c % 2 ? 1 : -1) * std::exp(60 * share - 55));
        put(z, 0, kCount + c, (c % 5 ? 3 : 40) * std::sin(static_cast<double>(c)));
        put(grad_y, 0, c, 1 + share);
      }
      ASSERT_NO_FATAL_FAILURE(expect_all(f, z, grad_y)) << static_cast<int>(f.activation);
    }
  }
}

TEST_P(UnitAccuracy, InfinitiesAndNan) {
  for (const Element element : kElements)
    for (const double other : {1.0, double{INFINITY}, -double{INFINITY}, double{NAN}}) {
      constexpr size_t kCols = 37;
      const double specials[] = {INFINITY, -INFINITY, NAN, 0.0, -0.0, 6e4, -6e4};
      Matrix z(element, 1, 2 * kCols), y(element, 1, kCols), grad_z(element, 1, 2 * kCols),
          grad_y(element, 1, kCols);
      for (size_t c = 0; c < kCols; ++c) {
        put(z, 0, c, specials[c % std::size(specials)]);
        put(z, 0, kCols + c, other);
        put(grad_y, 0, c, 1);
      }
      for (const Function& f :
           {with(Activation::situglu, {4, 25}), with(Activation::clamped_swiglu, {7, 1.702, 1})}) {
        kernels::cpu::activation_forward(f, z.view(), {}, element, {}, y.view());
        kernels::cpu::activation_backward(f, grad_y.view(), z.view(), grad_z.view(), {}, {});
        for (size_t c = 0; c < kCols; ++c) {
          const double a = value(z, 0, c);
          const bool is_limit = std::isinf(a) && a < 0;  // -infinity times 0, as in torch
          const double gate = std::isnan(a)                         ? a
                              : f.activation == Activation::situglu ? (a > 0 ? 4 : 0)
                              : is_limit                            ? NAN
                                                                    : gate_of(f, a).value;
          if (std::isfinite(a) && std::fabs(a) < 1) continue;
          const double expected = gate * other_of(f, other).value;
          ASSERT_TRUE(
              is_near(expected, value(y, 0, c), bound_of(expected, element, 30), element, 0, c))
              << "a = " << a << ", b = " << other;
          // What is cut off has no gradient, at NaN neither.
          if (f.activation == Activation::clamped_swiglu) {
            if (!(a <= 7)) {
              EXPECT_EQ(value(grad_z, 0, c), 0) << "a = " << a << ", b = " << other;
            }
            if (!(std::fabs(other) <= 7)) {
              EXPECT_EQ(value(grad_z, 0, kCols + c), 0) << "a = " << a << ", b = " << other;
            }
          }
        }
      }
    }
}

using Param = std::tuple<int64_t, Activation>;

std::vector<Activation> all_gates() {
  std::vector<Activation> all;
  for (size_t i = 0; i < std::size(kernels::kActivationNames) + std::size(kernels::kNumberedUnits);
       ++i)
    all.push_back(static_cast<Activation>(i));
  return all;
}
std::string case_name(const ::testing::TestParamInfo<Param>& info) {
  const auto at = static_cast<size_t>(std::get<1>(info.param));
  const size_t plain = std::size(kernels::kActivationNames);
  return target_name(std::get<0>(info.param)) + "_" +
         std::string(at < plain ? kernels::kActivationNames[at]
                                : kernels::kNumberedUnits[at - plain].name);
}

class GatedUnit : public ::testing::TestWithParam<Param> {
 protected:
  Function function(size_t interleave) const {
    const Activation activation = std::get<1>(GetParam());
    return with(activation,
                activation == Activation::situglu ? kernels::UnitNumbers{4, 25, 0}
                                                  : kernels::UnitNumbers{7, 1.702, 1},
                interleave);
  }

 private:
  ScopedTarget target_{std::get<0>(GetParam())};
};
/// Of gates whose formula the reference knows.
class KnownGatedUnit : public GatedUnit {};
std::vector<Activation> known_gates() {
  std::vector<Activation> known(std::begin(kKnownActivations), std::end(kKnownActivations));
  for (size_t i = 0; i < std::size(kernels::kNumberedUnits); ++i)
    known.push_back(kernels::numbered_unit(i));
  return known;
}
INSTANTIATE_TEST_SUITE_P(Known, KnownGatedUnit,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::ValuesIn(known_gates())),
                         case_name);
INSTANTIATE_TEST_SUITE_P(All, GatedUnit,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::ValuesIn(all_gates())),
                         case_name);

/// The same numbers with a and b by turns.
Matrix by_turns(const Matrix& halves, const Function& f) {
  Matrix turned(halves.element(), halves.rows(), halves.cols());
  for (size_t r = 0; r < halves.rows(); ++r)
    for (size_t c = 0; c < halves.cols() / 2; ++c) {
      const auto [a, b] = columns_of(f, halves.cols() / 2, c);
      put(turned, r, a, value(halves, r, c));
      put(turned, r, b, value(halves, r, halves.cols() / 2 + c));
    }
  return turned;
}

TEST_P(GatedUnit, TurnsAreHalves) {
  struct Elements {
    Element x, z, y;
  };
  for (const Elements& mix : {Elements{Element::float32, Element::float32, Element::float32},
                              Elements{Element::bfloat16, Element::bfloat16, Element::bfloat16},
                              Elements{Element::float16, Element::float16, Element::float16},
                              Elements{Element::bfloat16, Element::float32, Element::float32}})
    for (const size_t block : {1, 5, 32, 300}) {
      const Function turns = function(block), halves = function(0);
      constexpr size_t kRows = 37;
      const size_t cols = 3 * block;
      SCOPED_TRACE(::testing::Message() << block << ", " << name_of(mix.x));
      const Matrix x = Matrix::random(mix.x, kRows, 2 * cols, 0, 1),
                   bias = Matrix::random(mix.x, 1, 2 * cols, 0, 2),
                   grad_y = Matrix::random(mix.y, kRows, cols, 0, 3);
      const auto run = [&](const Function& f, const Matrix& from, const Matrix& with_bias) {
        Matrix z(mix.z, kRows, 2 * cols), y(mix.y, kRows, cols),
            y_again = y, grad_z(mix.x, kRows, 2 * cols), grad_bias(Element::float32, 1, 2 * cols);
        kernels::cpu::activation_forward(f, from.view(), with_bias.parameter(), mix.z, z.view(),
                                         y.view());
        kernels::cpu::activation_backward(f, grad_y.view(), z.view(), grad_z.view(),
                                          grad_bias.vector(), y_again.view());
        return std::array{z, y, y_again, grad_z, grad_bias};
      };
      const auto expected = run(halves, x, bias);
      const auto got = run(turns, by_turns(x, turns), by_turns(bias, turns));
      EXPECT_EQ(got[0].bits(), by_turns(expected[0], turns).bits()) << "z";
      EXPECT_EQ(got[1].bits(), expected[1].bits()) << "y";
      EXPECT_EQ(got[2].bits(), expected[1].bits()) << "y of backward";
      EXPECT_EQ(got[3].bits(), by_turns(expected[3], turns).bits()) << "grad_z";
      EXPECT_EQ(got[4].bits(), by_turns(expected[4], turns).bits()) << "grad_bias";
    }
}

TEST_P(KnownGatedUnit, TimesANumberPerRow) {
  const bool has_numbers = function(0).activation >= kernels::numbered_unit(0);
  for (const bool is_gated : {false, true}) {
    if (!is_gated && has_numbers) continue;
    for (const Element element : kElements)
      for (const Element of_factors : {Element::float32, element})
        for (const size_t cols : {1, 20, 333}) {
          SCOPED_TRACE(::testing::Message() << is_gated << name_of(element) << cols);
          Function f = function(is_gated && cols % 20 == 0 ? 5 : 0);
          f.is_gated = is_gated;
          constexpr size_t kRows = 150;
          const size_t wide = is_gated ? 2 * cols : cols;
          const Matrix x = Matrix::random(element, kRows, wide, 3, 1),
                       grad_y = Matrix::random(element, kRows, cols, 1, 2),
                       factors = Matrix::random(of_factors, 1, kRows, 0, 3);
          std::vector<std::vector<uint32_t>> results[2];
          Matrix y(element, kRows, cols), y_again = y, grad_x(element, kRows, wide),
                                          grad_factors(of_factors, 1, kRows);
          for (int threads = 1; threads <= 2; ++threads) {
            const ScopedThreadPool pool(threads);
            kernels::cpu::scaled_forward(f, x.view(), factors.parameter(), y.view());
            kernels::cpu::scaled_backward(f, grad_y.view(), x.view(), factors.parameter(),
                                          grad_x.view(), grad_factors.vector(), y_again.view());
            results[threads - 1] = {y.bits(), y_again.bits(), grad_x.bits(), grad_factors.bits()};
          }
          EXPECT_EQ(results[0], results[1]) << "two threads";
          EXPECT_EQ(y.bits(), y_again.bits()) << "y of backward differs from y of forward";
          const double share = element == Element::float32 ? 0x1p-20 : 0x1p-14;
          for (size_t r = 0; r < kRows; ++r) {
            const double factor = value(factors, 0, r);
            double sum = 0, magnitude = 0;
            for (size_t c = 0; c < cols; ++c) {
              const auto [at_a, at_b] = columns_of(f, cols, c);
              const double a = value(x, r, at_a), b = is_gated ? value(x, r, at_b) : 1,
                           g = value(grad_y, r, c);
              const Factor gate = gate_of(f, a), other = is_gated ? other_of(f, b) : Factor{1, 0};
              const double expected = gate.value * other.value;
              ASSERT_TRUE(is_near(expected * factor, value(y, r, c),
                                  share * std::fabs(expected * factor) + 0x1p-120, element, r, c));
              const double outer = g * factor * other.value;
              ASSERT_TRUE(is_near(outer * gate.slope, value(grad_x, r, at_a),
                                  share * std::fabs(outer) * std::max(1.0, std::fabs(gate.slope)),
                                  element, r, at_a));
              if (is_gated) {
                ASSERT_TRUE(is_near(g * factor * gate.value * other.slope, value(grad_x, r, at_b),
                                    share * std::fabs(g * factor * gate.value) + 0x1p-120, element,
                                    r, at_b));
              }
              sum += g * expected;
              magnitude += std::fabs(g * expected);
            }
            ASSERT_TRUE(is_near(sum, value(grad_factors, 0, r), 4 * share * magnitude + 0x1p-120,
                                of_factors, 0, r));
          }
        }
  }
}

}  // namespace
}  // namespace tandem::testing::kernels_gated_unit
