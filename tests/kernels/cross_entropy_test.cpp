#include "kernels/cross_entropy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/matrix.h"
#include "tests/support/targets.h"

namespace tandem::testing::kernels_cross_entropy {
namespace {

using kernels::Element;
using kernels::cpu::CrossEntropyOptions;

class CrossEntropy : public ::testing::TestWithParam<int64_t> {
 protected:
  CrossEntropy() : target_(GetParam()) {}
  ScopedTarget target_;
};

/// The loss and gradient of a row by the formula, in float64.
struct Expected {
  Expected(const Matrix& logits, size_t r, const Matrix& bias, size_t target,
           const std::vector<float>& weights, const CrossEntropyOptions& options) {
    const size_t cols = logits.cols();
    std::vector<double> z(cols), slope(cols, 1);
    for (size_t c = 0; c < cols; ++c) {
      z[c] = static_cast<double>(logits.at(r * cols + c)) + bias.at(c);
      if (options.soft_cap == 0) continue;
      const double share = std::tanh(z[c] / options.soft_cap);
      z[c] = options.soft_cap * share;
      slope[c] = 1 - share * share;
    }
    const double largest = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (const double each : z) sum += std::exp(each - largest);
    const double all = largest + std::log(sum), e = options.label_smoothing;
    loss = (1 - e) * weights[target] * (all - z[target]) + options.z_loss * all * all;
    double on_all = (1 - e) * weights[target] + 2 * options.z_loss * all;
    for (size_t c = 0; c < cols; ++c) {
      loss += e / static_cast<double>(cols) * weights[c] * (all - z[c]);
      on_all += e / static_cast<double>(cols) * weights[c];
    }
    for (size_t c = 0; c < cols; ++c) {
      double of_z = std::exp(z[c] - all) * on_all - e / static_cast<double>(cols) * weights[c];
      if (c == target) of_z -= (1 - e) * weights[target];
      gradients.push_back(of_z * slope[c]);
    }
    best = static_cast<int64_t>(std::max_element(z.begin(), z.end()) - z.begin());
  }
  double loss;
  std::vector<double> gradients;
  int64_t best;
};

double ulp_of(Element element) {
  return element == Element::float32 ? 0 : element == Element::bfloat16 ? 0x1p-8 : 0x1p-11;
}

TEST_P(CrossEntropy, MatchesFloat64) {
  constexpr size_t kRows = 5;
  const CrossEntropyOptions kOptions[] = {
      {}, {.label_smoothing = 0.3}, {.soft_cap = 2}, {.z_loss = 0.1}, {0.2, 3, 0.05}};
  for (const Element element : kElements)
    for (const size_t cols : {1, 7, 16, 33, 255, 256, 257, 1000})
      for (const CrossEntropyOptions& options : kOptions)
        for (const bool in_place : {true, false}) {
          SCOPED_TRACE(::testing::Message()
                       << name_of(element) << ", " << cols << " columns, smoothing "
                       << options.label_smoothing << ", cap " << options.soft_cap << ", z "
                       << options.z_loss << (in_place ? ", in place" : ""));
          const Matrix logits = Matrix::random(element, kRows, cols, 3, cols),
                       bias = Matrix::random(Element::bfloat16, 1, cols, 0, 2);
          Matrix own = logits, other(element, kRows, cols, 1);
          std::vector<float> weights(cols), losses(kRows);
          std::vector<int64_t> targets(kRows), best(kRows);
          for (size_t c = 0; c < cols; ++c) weights[c] = 0.5f + static_cast<float>(c % 3);
          for (size_t r = 0; r < kRows; ++r) targets[r] = static_cast<int64_t>(r * 37 % cols);
          targets[3] = -1;
          const std::vector<float> factors{1, -2, 0.5f, 1, 0};
          Matrix& made = in_place ? own : other;
          kernels::cpu::cross_entropy({.logits = own.view(),
                                       .bias = bias.parameter(),
                                       .targets = targets.data(),
                                       .class_weight = weights.data(),
                                       .factors = factors.data(),
                                       .options = options,
                                       .losses = losses.data(),
                                       .gradients = made.view(),
                                       .best = best.data()});
          EXPECT_TRUE(made.gaps_untouched());
          for (size_t r = 0; r < kRows; ++r) {
            const bool counts = targets[r] >= 0;
            const Expected expected(logits, r, bias, counts ? static_cast<size_t>(targets[r]) : 0,
                                    weights, options);
            ASSERT_EQ(best[r], expected.best);
            ASSERT_NEAR(losses[r], counts ? expected.loss : 0, 0x1p-20 * 8) << "row " << r;
            for (size_t c = 0; c < cols; ++c) {
              const double want = counts ? factors[r] * expected.gradients[c] : 0;
              ASSERT_NEAR(
                  made.at(r * cols + c), want,
                  0x1p-20 * 4 * std::abs(factors[r]) + ulp_of(element) * std::abs(want) + 0x1p-25)
                  << "row " << r << ", column " << c;
            }
          }
        }
}

TEST_P(CrossEntropy, ExtremeLogits) {
  Matrix logits(Element::float32, 4, 20), made = logits;
  for (size_t i = 0; i < logits.size(); ++i) logits.set(i, 1);
  logits.set(0, 3e38f);           // row 0: one class has everything
  logits.set(20 + 5, -INFINITY);  // row 1: one class has nothing
  logits.set(40 + 6, NAN);
  logits.set(60 + 7, INFINITY);
  const std::vector<int64_t> targets{0, 1, 1, 1};
  std::vector<float> losses(4);
  kernels::cpu::cross_entropy({.logits = logits.view(),
                               .targets = targets.data(),
                               .losses = losses.data(),
                               .gradients = made.view()});
  EXPECT_EQ(losses[0], 0);
  for (size_t c = 0; c < 20; ++c) EXPECT_EQ(made.at(c), 0) << c;
  EXPECT_NEAR(losses[1], std::log(19.0), 1e-6);
  EXPECT_EQ(made.at(20 + 5), 0);
  EXPECT_NEAR(made.at(20 + 6), 1 / 19.0, 1e-7);
  for (const size_t row : {2, 3}) {
    EXPECT_TRUE(std::isnan(losses[row]));
    for (size_t c = 0; c < 20; ++c) EXPECT_TRUE(std::isnan(made.at(row * 20 + c)));
  }
}

INSTANTIATE_TEST_SUITE_P(All, CrossEntropy, ::testing::ValuesIn(all_targets()),
                         [](const ::testing::TestParamInfo<int64_t>& info) {
                           return target_name(info.param);
                         });

}  // namespace
}  // namespace tandem::testing::kernels_cross_entropy
