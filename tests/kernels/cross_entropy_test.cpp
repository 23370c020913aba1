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

class CrossEntropy : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(All, CrossEntropy, ::testing::ValuesIn(all_targets()), CrossEntropy::name);

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

/// What four shards of the columns give, each by itself, is what the whole gives.
void check_shards(const CrossEntropyOptions& options) {
  using kernels::cpu::LogitsSums;
  constexpr size_t kRows = 6, kCols = 77, kEnds[] = {0, 5, 40, 41, kCols};
  Matrix logits = Matrix::random(Element::float32, kRows, kCols, 0, 1),
         whole(Element::float32, kRows, kCols);
  for (size_t c = 0; c < 40; ++c) logits.set(4 * kCols + c, -INFINITY);  // a mask over two shards
  logits.set(5 * kCols + 50, NAN);
  std::vector<float> weights(kCols), losses(kRows), shard_losses(kRows);
  for (size_t c = 0; c < kCols; ++c) weights[c] = 0.5f + static_cast<float>(c % 3);
  const std::vector<int64_t> targets{3, 40, -1, 76, 60, 7};
  const std::vector<float> factors{1, -2, 0.5f, 1, 1, 1};
  std::vector<int64_t> best(kRows), shard_best(kRows);
  kernels::cpu::cross_entropy({.logits = logits.view(),
                               .targets = targets.data(),
                               .class_weight = weights.data(),
                               .factors = factors.data(),
                               .options = options,
                               .losses = losses.data(),
                               .gradients = whole.view(),
                               .best = best.data()});
  std::vector<Matrix> parts;
  std::vector<LogitsSums> all(kRows), own(kRows);
  const auto part_of = [&](size_t shard) {
    std::vector<int64_t> local;
    const auto first = static_cast<int64_t>(kEnds[shard]),
               count = static_cast<int64_t>(kEnds[shard + 1]) - first;
    for (const int64_t target : targets) {
      const bool is_here = target >= first && target < first + count;
      local.push_back(target < 0 ? -1 : is_here ? target - first : count);
    }
    return local;
  };
  double all_weights = 0;
  for (const float weight : weights) all_weights += weight;
  for (size_t shard = 0; shard < 4; ++shard) {
    Matrix part(Element::float32, kRows, kEnds[shard + 1] - kEnds[shard]);
    for (size_t i = 0; i < part.size(); ++i)
      part.set(i, logits.at(i / part.cols() * kCols + kEnds[shard] + i % part.cols()));
    const std::vector<int64_t> local = part_of(shard);
    kernels::cpu::logits_sums({.logits = part.view(),
                               .targets = local.data(),
                               .class_weight = weights.data() + kEnds[shard],
                               .options = options,
                               .best = shard_best.data()},
                              own.data());
    for (size_t r = 0; r < kRows; ++r)
      all[r] = shard == 0 ? own[r] : joined(all[r], own[r], static_cast<double>(kEnds[shard]));
    parts.push_back(std::move(part));
  }
  const kernels::cpu::ClassShard of_all{kCols, all_weights, all.data()};
  for (size_t shard = 0; shard < 4; ++shard) {
    Matrix& part = parts[shard];
    const std::vector<int64_t> local = part_of(shard);
    kernels::cpu::cross_entropy({.logits = part.view(),
                                 .targets = local.data(),
                                 .class_weight = weights.data() + kEnds[shard],
                                 .factors = factors.data(),
                                 .options = options,
                                 .losses = shard_losses.data(),
                                 .gradients = part.view(),
                                 .best = shard_best.data(),
                                 .shard = &of_all});
    EXPECT_EQ(shard_best, best);
    for (size_t r = 0; r < kRows; ++r) {
      EXPECT_EQ(std::isnan(shard_losses[r]), r == 5) << r;
      if (r == 5) continue;
      EXPECT_NEAR(shard_losses[r], losses[r], 1e-6 * (1 + std::abs(losses[r])));
    }
    for (size_t i = 0; i < part.size(); ++i) {
      const float want = whole.at(i / part.cols() * kCols + kEnds[shard] + i % part.cols());
      ASSERT_EQ(std::isnan(part.at(i)), std::isnan(want));
      if (std::isnan(want)) continue;
      ASSERT_NEAR(part.at(i), want, 1e-6);
    }
  }
}

TEST_P(CrossEntropy, ShardsOfTheColumnsGiveWhatTheWholeGives) {
  check_shards({});
  check_shards({0.2, 3, 0.05});
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

}  // namespace
}  // namespace tandem::testing::kernels_cross_entropy
