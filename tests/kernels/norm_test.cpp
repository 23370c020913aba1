#include "kernels/norm.h"

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>
#include <ostream>

#include "support/matrix.h"
#include "support/targets.h"
#include "support/thread_pool.h"
#include "support/ulp.h"

namespace tandem::testing::kernels_norm {
namespace {

using kernels::ConstRows;
using kernels::ConstVector;
using kernels::Element;
using kernels::cpu::NormOptions;

struct Case {
  int64_t target;
  bool centered;
  Element x, weight, y;
  size_t rows, hidden, gap;
  bool zero_centered_gamma = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << target_name(c.target) << (c.centered ? "_layer_" : "_rms_") << name_of(c.x) << "_"
             << name_of(c.weight) << "_" << name_of(c.y) << "_" << c.rows << "x" << c.hidden
             << "_gap" << c.gap << (c.zero_centered_gamma ? "_zero_centered" : "");
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t target : all_targets()) {
    for (const bool centered : {false, true}) {
      for (const Element element : kElements) {
        for (const size_t rows : {0, 1, 3, 17}) {
          for (const size_t hidden : {1, 7, 8, 15, 16, 17, 33, 1024, 4097}) {
            all.push_back({target, centered, element, Element::float32, element, rows, hidden,
                           rows == 3 ? size_t{5} : size_t{0}});
          }
        }
      }
      for (const Element x : kElements) {
        for (const Element weight : kElements) {
          for (const Element y : kElements)
            all.push_back({target, centered, x, weight, y, 37, 129, 3, weight == x});
        }
      }
    }
  }
  return all;
}

/// What the cases share: operands and the float64 results.
struct Problem {
  explicit Problem(const Case& c, float offset = 0.0f)
      : x(Matrix::random(c.x, c.rows, c.hidden, c.gap, 1)),
        weight(Matrix::random(c.weight, 1, c.hidden, 0, 2)),
        bias(Matrix::random(c.weight, 1, c.hidden, 0, 3)),
        grad_y(Matrix::random(c.y, c.rows, c.hidden, c.gap, 4)),
        grad_residual(Matrix::random(c.x, c.rows, c.hidden, c.gap, 5)),
        options{1e-5, c.zero_centered_gamma},
        mean(c.rows, -7.0f),
        inv_norm(c.rows, -7.0f) {
    if (offset != 0.0f) {
      for (size_t i = 0; i < x.size(); ++i) x.set(i, x.at(i) + offset);
    }
  }

  double gamma(size_t c) const {
    return static_cast<double>(weight.at(c)) + (options.zero_centered_gamma ? 1.0 : 0.0);
  }

  Matrix x, weight, bias, grad_y, grad_residual;
  NormOptions options;
  std::vector<float> mean, inv_norm;
};

struct Forward {
  std::vector<double> y, magnitude, mean, inv_norm;
};

Forward float64_forward(const Problem& p, bool centered) {
  const size_t rows = p.x.rows(), hidden = p.x.cols();
  Forward result;
  for (size_t r = 0; r < rows; ++r) {
    double mean = 0.0, square = 0.0, largest = 0.0;
    for (size_t c = 0; centered && c < hidden; ++c) mean += p.x.at(r * hidden + c);
    mean /= static_cast<double>(hidden);
    for (size_t c = 0; c < hidden; ++c) {
      const double v = p.x.at(r * hidden + c) - mean;
      square += v * v;
      largest = std::max(largest, std::abs(static_cast<double>(p.x.at(r * hidden + c))));
    }
    const double inv_norm = 1.0 / std::sqrt(square / static_cast<double>(hidden) + p.options.eps);
    result.mean.push_back(mean);
    result.inv_norm.push_back(inv_norm);
    for (size_t c = 0; c < hidden; ++c) {
      const double gamma = p.gamma(c), bias = centered ? p.bias.at(c) : 0.0;
      result.y.push_back((p.x.at(r * hidden + c) - mean) * inv_norm * gamma + bias);
      // Subtracting the rounded mean and adding the bias cancel: errors are relative to the
      // operands.
      result.magnitude.push_back(centered ? (std::abs(p.x.at(r * hidden + c)) + std::abs(mean)) *
                                                    inv_norm * std::abs(gamma) +
                                                std::abs(bias)
                                          : 0.0);
    }
  }
  return result;
}

void run_forward(Problem& p, bool centered, Matrix& y) {
  kernels::cpu::norm_forward({.x = p.x.view(),
                              .weight = p.weight.parameter(),
                              .bias = p.bias.parameter(),
                              .options = p.options,
                              .y = y.view(),
                              .mean = centered ? p.mean.data() : nullptr,
                              .inv_norm = p.inv_norm.data()});
}

/// Results of one backward; what is not wanted stays empty.
struct Gradients {
  Gradients(const Case& c, Element weight)
      : grad_x(c.x, c.rows, c.hidden, c.gap),
        y(c.y, c.rows, c.hidden, c.gap),
        grad_weight(weight, 1, c.hidden),
        grad_bias(weight, 1, c.hidden) {}
  Matrix grad_x, y, grad_weight, grad_bias;
};

void run_backward(Problem& p, bool centered, bool residual, Gradients& g) {
  kernels::cpu::norm_backward(
      {.grad_y = p.grad_y.view(),
       .x = p.x.view(),
       .weight = p.weight.parameter(),
       .bias = p.bias.parameter(),
       .mean = centered ? p.mean.data() : nullptr,
       .inv_norm = p.inv_norm.data(),
       .options = p.options,
       .grad_residual = residual ? ConstRows(p.grad_residual.view()) : ConstRows{},
       .grad_x = g.grad_x.view(),
       .y = g.y.view()},
      g.grad_weight.vector(), centered ? g.grad_bias.vector() : kernels::Vector());
}

class Norm : public ::testing::TestWithParam<Case> {};

TEST_P(Norm, ForwardStaysWithinEightUlpOfFloat64) {
  const Case c = GetParam();
  const ScopedTarget target(c.target);
  Problem p(c);
  Matrix y(c.y, c.rows, c.hidden, c.gap);
  run_forward(p, c.centered, y);
  const Forward expected = float64_forward(p, c.centered);
  EXPECT_TRUE(within_ulps(p.inv_norm, expected.inv_norm, 8));
  EXPECT_TRUE(within_ulps(y.values(), expected.y, 8, c.y, expected.magnitude));
  EXPECT_TRUE(y.gaps_untouched());
  if (c.centered) {
    const std::vector<double> about_one(c.rows, 1.0);
    EXPECT_TRUE(within_ulps(p.mean, expected.mean, 2, Element::float32, about_one));
  }
}

TEST_P(Norm, BackwardAgreesWithFloat64AndGivesTheSameY) {
  const Case c = GetParam();
  const ScopedTarget target(c.target);
  Problem p(c);
  Matrix y(c.y, c.rows, c.hidden, c.gap);
  run_forward(p, c.centered, y);
  const size_t rows = c.rows, hidden = c.hidden;
  for (const bool residual : {false, true}) {
    Gradients got(c, Element::float32);
    run_backward(p, c.centered, residual, got);
    std::vector<double> grad_x, grad_x_magnitude, grad_weight(hidden), weight_magnitude(hidden),
        grad_bias(hidden), bias_magnitude(hidden);
    for (size_t r = 0; r < rows; ++r) {
      // The statistics are inputs of the backward: as rounded.
      const double mean = c.centered ? p.mean[r] : 0.0, inv_norm = p.inv_norm[r],
                   n = static_cast<double>(hidden);
      double sum_g = 0.0, sum_g_x_hat = 0.0, abs_g = 0.0, abs_g_x_hat = 0.0;
      const auto x_hat = [&](size_t i) { return (p.x.at(r * hidden + i) - mean) * inv_norm; };
      const auto g = [&](size_t i) { return p.grad_y.at(r * hidden + i) * p.gamma(i); };
      for (size_t i = 0; i < hidden; ++i) {
        sum_g += c.centered ? g(i) : 0.0;
        sum_g_x_hat += g(i) * x_hat(i);
        abs_g += c.centered ? std::abs(g(i)) : 0.0;
        abs_g_x_hat += std::abs(g(i) * x_hat(i));
        const double grad_y = p.grad_y.at(r * hidden + i);
        grad_weight[i] += grad_y * x_hat(i);
        weight_magnitude[i] += std::abs(grad_y * x_hat(i));
        grad_bias[i] += grad_y;
        bias_magnitude[i] += std::abs(grad_y);
      }
      for (size_t i = 0; i < hidden; ++i) {
        const double more = residual ? p.grad_residual.at(r * hidden + i) : 0.0;
        grad_x.push_back(inv_norm * (g(i) - sum_g / n - x_hat(i) * sum_g_x_hat / n) + more);
        grad_x_magnitude.push_back(
            inv_norm * (std::abs(g(i)) + abs_g / n + std::abs(x_hat(i)) * abs_g_x_hat / n) +
            std::abs(more));
      }
    }
    EXPECT_TRUE(within_ulps(got.grad_x.values(), grad_x, 8, c.x, grad_x_magnitude))
        << "residual " << residual;
    EXPECT_TRUE(
        within_ulps(got.grad_weight.values(), grad_weight, 8, Element::float32, weight_magnitude));
    if (c.centered) {
      EXPECT_TRUE(
          within_ulps(got.grad_bias.values(), grad_bias, 8, Element::float32, bias_magnitude));
    }
    EXPECT_TRUE(same_bits<uint32_t>(got.y.bits(), y.bits()));
    EXPECT_TRUE(got.grad_x.gaps_untouched());
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Norm, ::testing::ValuesIn(cases()),
                         ::testing::PrintToStringParamName());

class NormTarget : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(Cpu, NormTarget, ::testing::ValuesIn(all_targets()), NormTarget::name);

TEST_P(NormTarget, LongRowsOfEqualValuesKeepTheirPrecision) {
  for (const bool centered : {false, true}) {
    const Case c{GetParam(), centered, Element::float32, Element::float32, Element::float32, 1,
                 16384,      0};
    Problem p(c);
    for (size_t i = 0; i < c.hidden; ++i) p.x.set(i, centered && i % 2 == 1 ? -0.1f : 0.1f);
    Matrix y(c.y, c.rows, c.hidden);
    run_forward(p, centered, y);
    const Forward expected = float64_forward(p, centered);
    EXPECT_TRUE(within_ulps(y.values(), expected.y, 8, c.y, expected.magnitude)) << centered;
  }
}

TEST_P(NormTarget, RoundsBeforeTheWeight) {
  for (const Element x : kElements) {
    for (const Element y : kElements) {
      for (const size_t hidden : {1, 7, 16, 33, 67}) {
        const Case c{GetParam(), false, x, Element::float32, y, 5, hidden, 3};
        Problem p(c), plain(c);
        p.options.rounds_before_weight = true;
        Matrix out(y, c.rows, hidden, c.gap), of_plain(y, c.rows, hidden, c.gap);
        run_forward(p, false, out);
        run_forward(plain, false, of_plain);
        EXPECT_TRUE(same_bits<float>(p.inv_norm, plain.inv_norm));
        Gradients got(c, Element::float32), as_if(c, Element::float32);
        run_backward(p, false, true, got);
        run_backward(plain, false, true, as_if);
        std::vector<float> expected;
        std::vector<double> grad_weight(hidden), magnitude(hidden);
        for (size_t i = 0; i < p.x.size(); ++i) {
          const float factor = rounded(p.x.at(i) * p.inv_norm[i / hidden], x);
          expected.push_back(rounded(factor * p.weight.at(i % hidden), y));
          grad_weight[i % hidden] += static_cast<double>(p.grad_y.at(i)) * factor;
          magnitude[i % hidden] += std::abs(static_cast<double>(p.grad_y.at(i)) * factor);
        }
        EXPECT_TRUE(same_bits<float>(out.values(), expected)) << c;
        EXPECT_TRUE(same_bits<uint32_t>(got.y.bits(), out.bits())) << c;
        EXPECT_TRUE(same_bits<uint32_t>(got.grad_x.bits(), as_if.grad_x.bits())) << c;
        EXPECT_TRUE(
            within_ulps(got.grad_weight.values(), grad_weight, 8, Element::float32, magnitude))
            << c;
        EXPECT_TRUE(out.gaps_untouched() && got.y.gaps_untouched());
      }
    }
  }
}

TEST_P(NormTarget, L2NormAgreesWithFloat64AndGivesTheSameY) {
  constexpr double kEps = 1e-6;
  for (const Element element : kElements) {
    for (const size_t hidden : {1, 7, 16, 33, 1024}) {
      const Case c{GetParam(), false, element, element, element, 5, hidden, 3};
      Problem p(c);
      Matrix y(c.y, c.rows, hidden, c.gap);
      kernels::cpu::norm_forward({.x = p.x.view(),
                                  .options = {.eps = kEps, .sums = true},
                                  .y = y.view(),
                                  .inv_norm = p.inv_norm.data()});
      Gradients got(c, element);
      kernels::cpu::norm_backward({.grad_y = p.grad_y.view(),
                                   .x = p.x.view(),
                                   .inv_norm = p.inv_norm.data(),
                                   .options = {.sums = true},
                                   .grad_x = got.grad_x.view(),
                                   .y = got.y.view()});
      std::vector<double> inv_norms, expected, grad_x, magnitude;
      for (size_t r = 0; r < c.rows; ++r) {
        double square = 0.0, sum = 0.0, abs_sum = 0.0;
        const auto x = [&](size_t i) { return static_cast<double>(p.x.at(r * hidden + i)); };
        for (size_t i = 0; i < hidden; ++i) square += x(i) * x(i);
        inv_norms.push_back(1.0 / std::sqrt(square + kEps));
        const double inv_norm = p.inv_norm[r];  // an input of the backward: as rounded
        for (size_t i = 0; i < hidden; ++i) {
          expected.push_back(x(i) * inv_norms[r]);
          const double product = p.grad_y.at(r * hidden + i) * x(i) * inv_norm;
          sum += product;
          abs_sum += std::abs(product);
        }
        for (size_t i = 0; i < hidden; ++i) {
          const double g = p.grad_y.at(r * hidden + i), x_hat = x(i) * inv_norm;
          grad_x.push_back(inv_norm * (g - x_hat * sum));
          magnitude.push_back(inv_norm * (std::abs(g) + std::abs(x_hat) * abs_sum));
        }
      }
      EXPECT_TRUE(within_ulps(p.inv_norm, inv_norms, 8));
      EXPECT_TRUE(within_ulps(y.values(), expected, 8, element)) << hidden;
      EXPECT_TRUE(within_ulps(got.grad_x.values(), grad_x, 8, element, magnitude)) << hidden;
      EXPECT_TRUE(same_bits<uint32_t>(got.y.bits(), y.bits()));
      EXPECT_TRUE(y.gaps_untouched() && got.grad_x.gaps_untouched());
    }
  }
}

TEST_P(NormTarget, LayerNormOfLargeMeanUsesTwoPasses) {
  const Case c{GetParam(), true, Element::float32, Element::float32, Element::float32, 3, 1000, 0};
  Problem p(c, 3000.0f);
  Matrix y(c.y, c.rows, c.hidden);
  run_forward(p, true, y);
  const Forward expected = float64_forward(p, true);
  EXPECT_TRUE(within_ulps(p.inv_norm, expected.inv_norm, 8));
  EXPECT_TRUE(within_ulps(y.values(), expected.y, 8, c.y, expected.magnitude));
}

TEST_P(NormTarget, NanAndInfinitySpreadOverTheirRowAlone) {
  for (const Element element : kElements) {
    for (const float special :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const size_t at : {0u, 20u, 36u}) {
        for (const bool centered : {false, true}) {
          const Case c{GetParam(), centered, element, Element::float32, element, 3, 37, 0};
          Problem p(c);
          p.x.set(37 + at, special);
          Matrix y(c.y, c.rows, c.hidden);
          run_forward(p, centered, y);
          for (size_t i = 0; i < y.size(); ++i) {
            const bool special_row = i / 37 == 1;
            // The inverse root of an infinite mean is 0: RMSNorm leaves NaN at the infinity and
            // zeros beside it.
            const bool zero = special_row && std::isinf(special) && !centered && i != 37 + at;
            if (zero) {
              EXPECT_EQ(y.at(i), 0.0f) << i;
            } else {
              EXPECT_EQ(std::isnan(y.at(i)), special_row) << i << " got " << y.at(i);
            }
          }
        }
      }
    }
  }
}

TEST_P(NormTarget, ResultsDoNotDependOnTheNumberOfThreads) {
  for (const bool centered : {false, true}) {
    for (const size_t rows : {5, 130, 1000}) {
      const Case c{
          GetParam(), centered, Element::bfloat16, Element::float32, Element::bfloat16, rows,
          333,        0};
      Problem p(c);
      Matrix y(c.y, c.rows, c.hidden);
      Gradients serial(c, Element::float32);
      run_forward(p, centered, y);
      run_backward(p, centered, true, serial);
      for (const int threads : {1, 2, 3}) {
        const ScopedThreadPool pool(threads);
        Problem q(c);
        Matrix other_y(c.y, c.rows, c.hidden);
        Gradients other(c, Element::float32);
        run_forward(q, centered, other_y);
        run_backward(q, centered, true, other);
        EXPECT_TRUE(same_bits<uint32_t>(other_y.bits(), y.bits())) << threads;
        EXPECT_TRUE(same_bits<float>(q.inv_norm, p.inv_norm)) << threads;
        EXPECT_TRUE(same_bits<uint32_t>(other.grad_x.bits(), serial.grad_x.bits())) << threads;
        EXPECT_TRUE(same_bits<uint32_t>(other.grad_weight.bits(), serial.grad_weight.bits()))
            << threads;
        if (centered) {
          EXPECT_TRUE(same_bits<uint32_t>(other.grad_bias.bits(), serial.grad_bias.bits()))
              << threads;
        }
        EXPECT_TRUE(same_bits<uint32_t>(other.y.bits(), y.bits())) << threads;
      }
    }
  }
}

TEST_P(NormTarget, BackwardWritesOnlyWhatIsWanted) {
  const Case c{GetParam(), true, Element::bfloat16, Element::float16, Element::bfloat16, 21, 40, 0};
  Problem p(c);
  Matrix y(c.y, c.rows, c.hidden);
  run_forward(p, true, y);
  Gradients all(c, Element::float16), some(c, Element::float16);
  run_backward(p, true, false, all);
  const auto run = [&](kernels::Rows grad_x, kernels::Vector grad_weight,
                       kernels::Vector grad_bias) {
    kernels::cpu::norm_backward({.grad_y = p.grad_y.view(),
                                 .x = p.x.view(),
                                 .weight = p.weight.parameter(),
                                 .mean = p.mean.data(),
                                 .inv_norm = p.inv_norm.data(),
                                 .options = p.options,
                                 .grad_x = grad_x},
                                grad_weight, grad_bias);
  };
  run(some.grad_x.view(), {}, {});
  EXPECT_TRUE(same_bits<uint32_t>(some.grad_x.bits(), all.grad_x.bits()));
  run({}, some.grad_weight.vector(), {});
  EXPECT_TRUE(same_bits<uint32_t>(some.grad_weight.bits(), all.grad_weight.bits()));
  run({}, {}, some.grad_bias.vector());
  EXPECT_TRUE(same_bits<uint32_t>(some.grad_bias.bits(), all.grad_bias.bits()));
}

TEST_P(NormTarget, NoRowsGiveZeroColumnSums) {
  const Case c{GetParam(), true, Element::float32, Element::float32, Element::float32, 0, 19, 0};
  Problem p(c);
  Gradients got(c, Element::bfloat16);
  run_backward(p, true, false, got);
  for (size_t i = 0; i < 19; ++i) {
    EXPECT_EQ(got.grad_weight.at(i), 0.0f) << i;
    EXPECT_EQ(got.grad_bias.at(i), 0.0f) << i;
  }
}

}  // namespace
}  // namespace tandem::testing::kernels_norm
