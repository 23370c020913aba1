// Norms as kernel ops: the CPU kernel is the composite reference, within one rounding.
#include "kernel_ops/norm/norm.h"

#include <ATen/TensorOperators.h>

#include "support/kernel_ops.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_norm {
namespace {

using namespace kernel_ops;
using std::array;
using Optional = std::optional<at::Tensor>;
constexpr double kEps = 1e-5;

/// With a factor of 1 + weight, which RMSNorm multiplies with what it has rounded before, or plain.
class NormOp : public ::testing::TestWithParam<bool> {
 protected:
  bool zero_centered() const { return GetParam(); }
  bool rounds(const Optional& bias) const { return GetParam() && !bias; }
};
INSTANTIATE_TEST_SUITE_P(Gamma, NormOp, ::testing::Bool(), [](const auto& info) {
  return info.param ? "zero_centered_and_rounded" : "plain";
});

/// A norm by the kernel op: of LayerNorm with a bias.
ResultsOf<NormForward> norm(const at::Tensor& x, const at::Tensor& weight,
                            const Optional& bias = {}, bool zero_centered = false,
                            bool rounds = false) {
  return dispatch<NormForward>({.x = x,
                                .weight = weight,
                                .bias = bias,
                                .eps = kEps,
                                .zero_centered_gamma = zero_centered,
                                .rounds_before_weight = rounds});
}

/// Its gradients, as `forward` returned the statistics.
NormBackward::Args gradient(const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight,
                            const Optional& bias, const Optional& mean, const at::Tensor& inv_norm,
                            const Optional& residual = {}, bool zero_centered = false,
                            bool rounds = false) {
  return {.grad_y = grad_y,
          .x = x,
          .weight = weight,
          .bias = bias,
          .mean = mean,
          .inv_norm = inv_norm,
          .grad_residual = residual,
          .zero_centered_gamma = zero_centered,
          .rounds_before_weight = rounds,
          .output_mask = {true, true, !mean || bias, false, mean.has_value()}};
}

TEST_P(NormOp, ForwardMatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    for (const auto dtype : {x.scalar_type(), at::kFloat}) {
      const at::Tensor weight = random({x.size(-1)}, dtype, 8),
                       bias = random({x.size(-1)}, dtype, 9);
      for (const Optional& beta : {Optional(), Optional(bias)})
        EXPECT_TRUE(matches_reference<NormForward>({.x = x,
                                                    .weight = weight,
                                                    .bias = beta,
                                                    .eps = kEps,
                                                    .zero_centered_gamma = zero_centered(),
                                                    .rounds_before_weight = rounds(beta)}));
    }
  });
}

TEST_P(NormOp, ASumBeforeItGivesTheBitsOfBothInTurn) {
  for_every_case(1, [&](const at::Tensor& x) {
    for (const auto dtype : {x.scalar_type(), at::kFloat}) {
      const at::Tensor extra = random(x.sizes(), dtype, 4), sum = x + extra,
                       weight = random({x.size(-1)}, dtype, 8),
                       bias = random({x.size(-1)}, dtype, 9);
      for (const Optional& beta : {Optional(), Optional(bias)})
        for (const bool with_sum : {true, false}) {
          const auto fused = dispatch<NormForward>({.x = x,
                                                    .extra = extra,
                                                    .weight = weight,
                                                    .bias = beta,
                                                    .eps = kEps,
                                                    .zero_centered_gamma = zero_centered(),
                                                    .rounds_before_weight = rounds(beta),
                                                    .output_mask = {with_sum, true}});
          const auto of_sum = norm(sum, weight, beta, zero_centered(), rounds(beta));
          EXPECT_TRUE(same(fused[NormForward::sum], with_sum ? sum : sum.new_empty({0})));
          for (const size_t i : {NormForward::y, NormForward::mean, NormForward::inv_norm})
            EXPECT_TRUE(same(fused[i], of_sum[i])) << i;
          const auto without_y = dispatch<NormForward>({.x = x,
                                                        .extra = extra,
                                                        .weight = weight,
                                                        .bias = beta,
                                                        .eps = kEps,
                                                        .zero_centered_gamma = zero_centered(),
                                                        .rounds_before_weight = rounds(beta),
                                                        .output_mask = {with_sum, false}});
          EXPECT_EQ(without_y[NormForward::y].numel(), 0);
          EXPECT_TRUE(same(without_y[NormForward::inv_norm], of_sum[NormForward::inv_norm]));
        }
    }
  });
}

TEST_P(NormOp, GradientOfTheOpByItself) {
  for (const bool with_sum : {false, true})
    for (const bool with_bias : {false, true})
      EXPECT_TRUE(gradients_match(
          [&](const Tensors& t) {
            auto r = dispatch<NormForward>({.x = t[0],
                                            .extra = with_sum ? Optional(t[1]) : Optional(),
                                            .weight = t[2],
                                            .bias = with_bias ? Optional(t[3]) : Optional(),
                                            .eps = kEps,
                                            .zero_centered_gamma = zero_centered(),
                                            .rounds_before_weight = zero_centered() && !with_bias,
                                            .output_mask = {with_sum, true}});
            Tensors results;
            for (size_t i = 0; i < 4; ++i)
              if (r[i].numel() != 0) results.push_back(r[i]);
            return results;
          },
          {leaf({5, 6}, at::kDouble), random({5, 6}, at::kDouble, 2).set_requires_grad(with_sum),
           leaf({6}, at::kDouble, 3), random({6}, at::kDouble, 4).set_requires_grad(with_bias)}));
}

/// What cancels in grad_x = statistic * (g - ...).
double magnitude_of(const at::Tensor& statistic, const at::Tensor& grad_y) {
  if (grad_y.numel() == 0) return 0;
  constexpr double kGamma = 4;  // normal numbers, or those and 1
  return statistic.max().item<double>() * grad_y.abs().max().item<double>() * kGamma;
}

TEST_P(NormOp, BackwardMatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    const at::Tensor weight = random({x.size(-1)}, x.scalar_type(), 8),
                     bias = random({x.size(-1)}, x.scalar_type(), 9),
                     grad_y = random(x.sizes(), x.scalar_type(), 4),
                     residual = random(x.sizes(), x.scalar_type(), 5);
    for (const Optional& beta : {Optional(), Optional(bias)}) {
      const auto forward = norm(x, weight, beta, zero_centered(), rounds(beta));
      const Optional mean = beta ? Optional(forward[NormForward::mean]) : Optional();
      const at::Tensor& inv_norm = forward[NormForward::inv_norm];
      for (const Optional& extra : {Optional(), Optional(residual)})
        for (size_t only = 0; only <= 5; ++only) {
          NormBackward::Args args = gradient(grad_y, x, weight, beta, mean, inv_norm, extra,
                                             zero_centered(), rounds(beta));
          for (size_t i = 0; i < 5; ++i)
            args.output_mask[i] = args.output_mask[i] && (only == 5 || only == i);
          EXPECT_TRUE(matches_reference_at<NormBackward>(magnitude_of(inv_norm, grad_y), args));
        }
    }
  });
}

TEST_P(NormOp, GradientOfTheBackwardByItself) {
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        const auto r =
            dispatch<NormBackward>(gradient(t[0], t[1], t[2], {}, {}, t[3], t[4], zero_centered()));
        return Tensors(r.begin(), r.begin() + 3);
      },
      {leaf({3, 5}, at::kDouble), leaf({3, 5}, at::kDouble, 2), leaf({5}, at::kDouble, 3),
       leaf({3}, at::kDouble, 4), leaf({3, 5}, at::kDouble, 5)}));
}

TEST(NormOps, L2MatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    EXPECT_TRUE(matches_reference<L2NormForward>({.x = x, .eps = kEps}));
    const at::Tensor grad_y = random(x.sizes(), x.scalar_type(), 4),
                     inv_norm = L2NormForward::reference({.x = x, .eps = kEps})[1];
    for (const auto& mask : {array{true, true}, array{true, false}, array{false, true}})
      EXPECT_TRUE(matches_reference_at<L2NormBackward>(
          magnitude_of(inv_norm, grad_y),
          {.grad_y = grad_y, .x = x, .inv_norm = inv_norm, .output_mask = mask}));
  });
}

TEST(NormOps, OverTwoDimensionsAreThoseOverOneOfAReshape) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const at::Tensor x = random({3, 2, 40}, dtype), grad_y = random({3, 2, 40}, dtype, 4),
                     weight = random({2, 40}, dtype, 2), bias = random({2, 40}, dtype, 3);
    const auto flat = [](const at::Tensor& t) { return t.flatten(t.dim() == 2 ? 0 : 1); };
    const auto all_same = [&](const auto& got, const auto& expected) {
      for (size_t i = 0; i < got.size() && got[i].defined(); ++i)
        EXPECT_TRUE(same(got[i].reshape(expected[i].sizes()), expected[i])) << dtype << ' ' << i;
    };
    for (const Optional& beta : {Optional(), Optional(bias)}) {
      const auto flat_beta = beta ? Optional(flat(*beta)) : Optional();
      const auto got = norm(x, weight, beta, true);
      EXPECT_EQ(got[NormForward::y].sizes(), x.sizes());
      all_same(got, norm(flat(x), flat(weight), flat_beta, true));
      const Optional mean = beta ? Optional(got[NormForward::mean]) : Optional();
      const at::Tensor &inv_norm = got[NormForward::inv_norm], flat_grad = flat(grad_y),
                       flat_x = flat(x), flat_weight = flat(weight);
      all_same(dispatch<NormBackward>(gradient(grad_y, x, weight, beta, mean, inv_norm, x)),
               dispatch<NormBackward>(
                   gradient(flat_grad, flat_x, flat_weight, flat_beta, mean, inv_norm, flat_x)));
    }
  }
}

TEST(NormOps, RoundBeforeTheWeightAsACastDoes) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor x = leaf({7, 67}, dtype), weight = leaf({67}, dtype, 2),
                     grad_y = random({7, 67}, dtype, 3);
    const auto made = norm(x.detach(), weight.detach(), {}, false, true);
    const at::Tensor inv_rms = made[NormForward::inv_norm].unsqueeze(1),
                     x_hat = x.detach().to(at::kFloat) * inv_rms,
                     y = weight.detach() * x_hat.to(dtype);
    EXPECT_TRUE(same(made[NormForward::y], y)) << dtype;
    const auto got = dispatch<NormBackward>(
        gradient(grad_y, x.detach(), weight.detach(), {}, {}, inv_rms.flatten(), {}, false, true));
    const at::Tensor wide = (grad_y.to(at::kDouble) * x_hat.to(dtype)).sum(0);
    EXPECT_TRUE(near(got[NormBackward::grad_weight], wide.to(dtype)));
    EXPECT_TRUE(same(got[NormBackward::y], y));
  }
}

TEST(NormOpErrors, ALayerNormThatIsToRoundBeforeItsWeight) {
  const at::Tensor x = random({2, 8}), weight = random({8}), rows = random({2});
  const char* const text =
      ": expected rounds_before_weight to be false, as RMSNorm alone has it, got true. Round "
      "behind "
      "a LayerNorm without weight, or leave it out.";
  EXPECT_ERROR(norm(x, weight, weight, false, true), c10::ValueError, "layer_norm", text);
  EXPECT_ERROR(dispatch<NormBackward>(gradient(x, x, weight, weight, rows, rows, {}, false, true)),
               c10::ValueError, "layer_norm_backward", text);
}

TEST(NormOpErrors, WeightOfAnotherLength) {
  EXPECT_ERROR(norm(random({2, 8}), random({7})), c10::ValueError,
               "rms_norm: expected weight of shape [8]", "], the last dimension of x ", "got [7]",
               "Build the op with 8 features");
  EXPECT_ERROR(norm(random({2, 8}), random({8}), random({2, 8})), c10::ValueError,
               "layer_norm: expected bias of shape [8]", "got [2, 8]");
}

TEST(NormOpErrors, WeightOfOtherDimensions) {
  EXPECT_ERROR(norm(random({4, 2, 8}), random({4, 8})), c10::ValueError,
               "rms_norm: expected weight of the shape of the last 2 dimensions of x [4, 2, 8], "
               "got [4, 8]. Build the op with their sizes or reshape x.");
  EXPECT_ERROR(norm(random({2, 8}), random({2, 8}), random({8})), c10::ValueError,
               "layer_norm: expected bias of the shape of weight, [2, 8]");
  EXPECT_ERROR(dispatch<L2NormForward>({.x = random({}), .eps = kEps}), c10::ValueError,
               "l2_norm: expected x with at least 1 dimension, got a scalar. Pass x.reshape");
}

TEST(NormOpErrors, OperandsOfAddNorm) {
  const auto with = [](at::IntArrayRef extra, int64_t weight, int64_t bias) {
    dispatch<NormForward>({.x = random({3, 6}),
                           .extra = random(extra),
                           .weight = random({weight}),
                           .bias = random({bias}),
                           .eps = kEps,
                           .zero_centered_gamma = false});
  };
  EXPECT_ERROR(with({3, 5}, 6, 6), c10::ValueError,
               "add_extra_input: expected the extra input of the shape of x, [3, 6], got [3, 5]");
  EXPECT_ERROR(with({3, 6}, 5, 6), c10::ValueError, "add_norm: expected weight of shape [6]");
  EXPECT_ERROR(with({3, 6}, 6, 5), c10::ValueError, "add_norm: expected bias of shape [6]");
}

TEST(NormOpErrors, AScalar) {
  EXPECT_ERROR(norm(random({}), random({1})), c10::ValueError,
               "rms_norm: ", ": expected x with at least 1 dimension, got a scalar. ",
               "Pass x.reshape({1})");
}

TEST(NormOpErrors, GradientOfAnotherShape) {
  EXPECT_ERROR(dispatch<NormBackward>(
                   gradient(random({2, 7}), random({2, 8}), random({8}), {}, {}, random({2}))),
               c10::ValueError, "rms_norm_backward: expected grad_y of the shape of x",
               "[2, 8], got [2, 7]");
  EXPECT_ERROR(dispatch<NormBackward>(gradient(random({2, 7}), random({2, 8}), random({8}), {},
                                               random({2}), random({2}))),
               c10::ValueError, "layer_norm_backward: expected grad_y of the shape of x");
}

TEST(NormOpErrors, ABiasThatIsMissingOrTooMuch) {
  const at::Tensor x = random({2, 8}), weight = random({8}), rows = random({2});
  EXPECT_THAT(
      [&] {
        auto args = gradient(x, x, weight, {}, rows, rows);
        args.output_mask[NormBackward::y] = true;
        dispatch<NormBackward>(args);
      },
      ThrowsText<c10::ValueError>("layer_norm_backward: expected the bias that forward added, "
                                  "which y needs, got none. Pass it, or ask for no y."));
  EXPECT_ERROR(dispatch<NormBackward>(gradient(x, x, weight, weight, {}, rows)), c10::ValueError,
               "rms_norm_backward: expected neither a bias nor its gradient where there is no "
               "mean, as RMSNorm has no bias, got one. Pass the mean that forward returned.");
}

TEST(NormOpErrors, WhatForwardDidNotReturn) {
  EXPECT_ERROR(dispatch<NormBackward>(
                   gradient(random({2, 8}), random({2, 8}), random({7}), {}, {}, random({2}))),
               c10::ValueError, "rms_norm_backward: expected weight of shape [8]", "got [7]");
  EXPECT_ERROR(dispatch<NormBackward>(
                   gradient(random({2, 8}), random({2, 8}), random({8}), {}, {}, random({3}))),
               c10::ValueError, "rms_norm_backward: expected inv_rms with 2 elements",
               " elements, one per row of x ", "[2, 8], got shape [3]",
               "Pass what the forward op returned");
  EXPECT_ERROR(dispatch<NormBackward>(gradient(random({2, 8}), random({2, 8}), random({8}), {}, {},
                                               random({2}), Optional(random({8})))),
               c10::ValueError, "rms_norm_backward: expected grad_residual of the shape of x");
  EXPECT_ERROR(dispatch<NormBackward>(gradient(random({2, 8}), random({2, 8}), random({8}), {},
                                               random({2}), random({1}))),
               c10::ValueError, "layer_norm_backward: expected inv_std with 2 elements");
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_norm
