// The loss computed for some rows at a time against the reference, which has all rows' logits.
// tests/python/test_linear_cross_entropy.py compares the reference with torch.
#include "kernel_ops/loss/linear_cross_entropy.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>

#include <optional>
#include <string_view>
#include <vector>

#include "support/tensors.h"

namespace tandem::testing::kernel_ops_linear_cross_entropy {
namespace {

using kernel_ops::LinearCrossEntropy;

constexpr int64_t kHidden = 5, kClasses = 10, kIgnored = -100;

/// Compares all results for `rows` rows, seven at a time.
void expect_equal_in_pieces(int64_t rows, std::string_view reduction, bool has_factors) {
  seed_torch(static_cast<uint64_t>(rows));
  const auto wide = at::TensorOptions(at::kDouble);
  const at::Tensor x = at::randn({rows, kHidden}, wide),
                   weight = at::randn({kClasses, kHidden}, wide);
  at::Tensor targets = at::randint(kClasses, {rows}, at::kLong);
  if (rows > 3) targets[3] = kIgnored;
  std::optional<at::Tensor> factors;
  if (has_factors) factors = at::rand({rows}, wide);
  const LinearCrossEntropy::Args args{.x = x,
                                      .weight = weight,
                                      .targets = targets,
                                      .bias = at::randn({kClasses}, wide),
                                      .class_weight = at::rand({kClasses}, wide),
                                      .factors = factors,
                                      .reduction = reduction,
                                      .ignore_index = kIgnored,
                                      .label_smoothing = 0.1,
                                      .soft_cap = 3,
                                      .z_loss = 0.01,
                                      .output_mask = {true, true, true, true, true, true}};
  const auto expected = LinearCrossEntropy::reference(args);
  std::vector<at::Tensor> results;
  for (const at::Tensor& each : expected)
    results.push_back(at::empty(each.sizes(), each.options()));
  LinearCrossEntropy::in_pieces(args, results, 7 * kClasses);
  for (size_t i = 0; i < results.size(); ++i)
    EXPECT_TRUE(at::allclose(results[i], expected[i], 1e-12, 1e-12, /*equal_nan=*/true))
        << LinearCrossEntropy::kResults[i] << " of " << rows << " rows, " << reduction;
}

TEST(LinearCrossEntropy, PiecesGiveTheResultsOfTheWhole) {
  for (const int64_t rows : {0, 1, 7, 23})
    for (const std::string_view reduction : {"none", "sum", "mean"})
      for (const bool has_factors : {false, true})
        expect_equal_in_pieces(rows, reduction, has_factors);
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_linear_cross_entropy
