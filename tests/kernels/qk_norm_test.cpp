#include "kernels/qk_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ostream>
#include <vector>

#include "tests/support/matrix.h"
#include "tests/support/targets.h"
#include "tests/support/thread_pool.h"
#include "tests/support/ulp.h"

namespace tandem::testing::kernels_qk_norm {
namespace {

using kernels::Element;

class QkNorm : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(All, QkNorm, ::testing::ValuesIn(all_targets()), QkNorm::name);

struct Case {
  Element element, weight;
  size_t rows, queries, keys, head_dim;
  bool zero_centered_gamma;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << name_of(c.element) << ", weights of " << name_of(c.weight) << ", " << c.rows
             << " rows, " << c.queries << " queries and " << c.keys << " keys of " << c.head_dim
             << (c.zero_centered_gamma ? ", zero-centered" : "");
}

std::vector<Case> cases() {
  constexpr size_t kSizes[][4] = {{3, 1, 1, 1},   {5, 2, 1, 7},    {4, 1, 1, 16},   {3, 4, 2, 33},
                                  {0, 2, 2, 8},   {70, 3, 1, 64},  {1, 32, 8, 128}, {2, 1, 1, 600},
                                  {140, 6, 2, 5}, {20, 32, 8, 128}};
  std::vector<Case> all;
  for (const Element element : kElements)
    for (const auto& [rows, queries, keys, head_dim] : kSizes)
      for (const bool is_float32 : {false, true})
        all.push_back({element, is_float32 ? Element::float32 : element, rows, queries, keys,
                       head_dim, is_float32});
  return all;
}

/// Operands, and the results in float64 from the definition.
struct Problem {
  static constexpr double kEps = 1e-3;

  explicit Problem(const Case& of)
      : c(of),
        x(Matrix::random(c.element, c.rows, (c.queries + 2 * c.keys) * c.head_dim, 3, 1)),
        grad_y(Matrix::random(c.element, c.rows, x.cols(), 5, 2)),
        query_weight(Matrix::random(c.weight, 1, c.head_dim, 0, 3)),
        key_weight(Matrix::random(c.weight, 1, c.head_dim, 0, 4)),
        y(x.size()),
        grad_x(x.size()),
        grad_x_magnitude(x.size()),
        grad_weights(2 * c.head_dim),
        grad_weights_magnitude(2 * c.head_dim) {
    for (size_t start = 0; start < x.size(); start += c.head_dim) compute(start);
  }

  kernels::cpu::QkNorm arguments(const Matrix& from) const {
    return {.x = from.view(),
            .query_weight = query_weight.parameter(),
            .key_weight = key_weight.parameter(),
            .num_heads = c.queries,
            .num_kv_heads = c.keys,
            .options = {.eps = kEps, .zero_centered_gamma = c.zero_centered_gamma}};
  }

  const Case c;
  Matrix x, grad_y, query_weight, key_weight;
  std::vector<double> y, grad_x, grad_x_magnitude, grad_weights, grad_weights_magnitude;

 private:
  /// The head whose first element is number `start` of x.
  void compute(size_t start) {
    const size_t head = start % x.cols() / c.head_dim;
    if (head >= c.queries + c.keys) {
      for (size_t i = start; i < start + c.head_dim; ++i) {
        y[i] = x.at(i);
        grad_x[i] = grad_y.at(i);
      }
      return;
    }
    const bool is_query = head < c.queries;
    const auto gamma = [&](size_t i) {
      return (is_query ? query_weight : key_weight).at(i) + (c.zero_centered_gamma ? 1.0 : 0.0);
    };
    const double n = static_cast<double>(c.head_dim);
    double squares = 0;
    for (size_t i = 0; i < c.head_dim; ++i) squares += std::pow(x.at(start + i), 2);
    const double inv_rms = 1 / std::sqrt(squares / n + kEps);
    double sum = 0, sum_of_sizes = 0;
    for (size_t i = 0; i < c.head_dim; ++i) {
      const double x_hat = x.at(start + i) * inv_rms, grad = grad_y.at(start + i);
      y[start + i] = x_hat * gamma(i);
      sum += grad * gamma(i) * x_hat;
      sum_of_sizes += std::abs(grad * gamma(i) * x_hat);
      const size_t place = (is_query ? 0 : c.head_dim) + i;
      grad_weights[place] += grad * x_hat;
      grad_weights_magnitude[place] += std::abs(grad * x_hat);
    }
    for (size_t i = 0; i < c.head_dim; ++i) {
      const double x_hat = x.at(start + i) * inv_rms, g = grad_y.at(start + i) * gamma(i);
      grad_x[start + i] = inv_rms * (g - x_hat * sum / n);
      grad_x_magnitude[start + i] = inv_rms * (std::abs(g) + std::abs(x_hat) * sum_of_sizes / n);
    }
  }
};

TEST_P(QkNorm, NormsHeads) {
  for (const Case& c : cases())
    for (const bool in_place : {false, true}) {
      SCOPED_TRACE(::testing::Message() << c << (in_place ? ", in place" : ""));
      const Problem p(c);
      Matrix own = p.x, other(c.element, c.rows, own.cols(), 1);
      Matrix& y = in_place ? own : other;
      kernels::cpu::qk_norm_forward(p.arguments(own), y.view());
      EXPECT_TRUE(within_ulps(y.values(), p.y, 8, c.element));
      EXPECT_TRUE(y.gaps_untouched());
    }
}

/// Both gradients of weights, one behind the other.
std::vector<float> joined(const Matrix& query, const Matrix& key) {
  std::vector<float> all = query.values();
  for (const float value : key.values()) all.push_back(value);
  return all;
}

TEST_P(QkNorm, HasTheGradientsOfItsDefinition) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const Problem p(c);
    Matrix grad_x(c.element, c.rows, p.x.cols(), 1), query(c.weight, 1, c.head_dim),
        key(c.weight, 1, c.head_dim);
    kernels::cpu::qk_norm_backward(p.arguments(p.x), p.grad_y.view(), grad_x.view(), query.vector(),
                                   key.vector());
    EXPECT_TRUE(within_ulps(grad_x.values(), p.grad_x, 8, c.element, p.grad_x_magnitude));
    EXPECT_TRUE(
        within_ulps(joined(query, key), p.grad_weights, 8, c.weight, p.grad_weights_magnitude));
    EXPECT_TRUE(grad_x.gaps_untouched());

    // Each alone, and grad_x in the memory of an operand, have the same bits.
    Matrix of_query(c.weight, 1, c.head_dim), of_key(c.weight, 1, c.head_dim);
    kernels::cpu::qk_norm_backward(p.arguments(p.x), p.grad_y.view(), {}, of_query.vector(), {});
    kernels::cpu::qk_norm_backward(p.arguments(p.x), p.grad_y.view(), {}, {}, of_key.vector());
    EXPECT_TRUE(same_bits<uint32_t>(of_query.bits(), query.bits()));
    EXPECT_TRUE(same_bits<uint32_t>(of_key.bits(), key.bits()));
    Matrix grad_y = p.grad_y, x = p.x;
    kernels::cpu::qk_norm_backward(p.arguments(p.x), grad_y.view(), grad_y.view(), {}, {});
    kernels::cpu::qk_norm_backward(p.arguments(x), p.grad_y.view(), x.view(), {}, {});
    EXPECT_TRUE(same_bits<uint32_t>(grad_y.bits(), grad_x.bits()));
    EXPECT_TRUE(same_bits<uint32_t>(x.bits(), grad_x.bits()));
  }
}

TEST_P(QkNorm, ThreadsChangeNoBits) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const Problem p(c);
    const auto run = [&] {
      Matrix y(c.element, c.rows, p.x.cols()), grad_x(c.element, c.rows, p.x.cols()),
          query(Element::float32, 1, c.head_dim), key(Element::float32, 1, c.head_dim);
      kernels::cpu::qk_norm_forward(p.arguments(p.x), y.view());
      kernels::cpu::qk_norm_backward(p.arguments(p.x), p.grad_y.view(), grad_x.view(),
                                     query.vector(), key.vector());
      std::vector<uint32_t> bits;
      for (const Matrix* each : {&y, &grad_x, &query, &key})
        for (const uint32_t one : each->bits()) bits.push_back(one);
      return bits;
    };
    const std::vector<uint32_t> alone = run();
    const ScopedThreadPool pool(3);
    EXPECT_TRUE(same_bits<uint32_t>(run(), alone));
  }
}

}  // namespace
}  // namespace tandem::testing::kernels_qk_norm
