// Norms as kernel ops: the CPU kernel is the composite reference, within one rounding.
#include "kernel_ops/norm/norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>

#include "kernel_ops/quantize/quantize.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_norm {
namespace {

using namespace kernel_ops;
using std::array;
using Optional = std::optional<at::Tensor>;
constexpr double kEps = 1e-5;

class NormOp : public ::testing::TestWithParam<bool> {
 protected:
  bool zero_centered() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Gamma, NormOp, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "zero_centered" : "plain"; });

TEST_P(NormOp, RmsForwardMatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    for (const auto dtype : {x.scalar_type(), at::kFloat})
      EXPECT_TRUE(matches_reference<RmsNormForward>(x, random({x.size(-1)}, dtype, 8), kEps,
                                                    zero_centered()));
  });
}

TEST_P(NormOp, LayerNormForwardMatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    for (const auto dtype : {x.scalar_type(), at::kFloat})
      EXPECT_TRUE(matches_reference<LayerNormForward>(x, random({x.size(-1)}, dtype, 8),
                                                      random({x.size(-1)}, dtype, 9), kEps,
                                                      zero_centered()));
  });
}

TEST_P(NormOp, AddNormGivesTheBitsOfBothInTurn) {
  for_every_case(1, [&](const at::Tensor& x) {
    for (const auto dtype : {x.scalar_type(), at::kFloat}) {
      const at::Tensor extra = random(x.sizes(), dtype, 4), sum = x + extra,
                       weight = random({x.size(-1)}, dtype, 8),
                       bias = random({x.size(-1)}, dtype, 9);
      for (const bool with_sum : {true, false}) {
        const auto rms = dispatch<AddNormForward>(x, extra, weight, Optional(), kEps,
                                                  zero_centered(), array{with_sum});
        const auto rms_of_sum = dispatch<RmsNormForward>(sum, weight, kEps, zero_centered());
        const auto layer = dispatch<AddNormForward>(x, extra, weight, Optional(bias), kEps,
                                                    zero_centered(), array{with_sum});
        const auto layer_of_sum =
            dispatch<LayerNormForward>(sum, weight, bias, kEps, zero_centered());
        for (const auto& results : {rms, layer})
          EXPECT_TRUE(same(results[0], with_sum ? sum : sum.new_empty({0})));
        EXPECT_TRUE(same(rms[1], rms_of_sum[0]));
        EXPECT_TRUE(same(rms[3], rms_of_sum[1]));
        for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(same(layer[i + 1], layer_of_sum[i])) << i;
      }
    }
  });
}

TEST_P(NormOp, GradientOfAddNormByItself) {
  for (const Optional& b : {Optional(), Optional(random({6}, at::kDouble, 4))})
    EXPECT_TRUE(gradients_match(
        [&](const Tensors& t) {
          const auto r =
              dispatch<AddNormForward>(t[0], t[1], t[2], b, kEps, zero_centered(), array{true});
          return Tensors{r[0], r[1]};
        },
        {leaf({5, 6}, at::kDouble), leaf({5, 6}, at::kDouble, 2), leaf({6}, at::kDouble, 3)}));
}

/// What cancels in grad_x = statistic * (g - ...).
double magnitude_of(const at::Tensor& statistic, const at::Tensor& grad_y) {
  if (grad_y.numel() == 0) return 0;
  constexpr double kGamma = 4;  // normal numbers, or those and 1
  return statistic.max().item<double>() * grad_y.abs().max().item<double>() * kGamma;
}

TEST_P(NormOp, RmsBackwardMatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    const at::Tensor weight = random({x.size(-1)}, x.scalar_type(), 8),
                     grad_y = random(x.sizes(), x.scalar_type(), 4),
                     residual = random(x.sizes(), x.scalar_type(), 5);
    const at::Tensor inv_rms = RmsNormForward::reference(x, weight, kEps, zero_centered())[1];
    for (const auto& mask : {array{true, true, true}, array{false, true, false},
                             array{true, false, false}, array{false, false, true}})
      for (const Optional& extra : {Optional(), Optional(residual)})
        EXPECT_TRUE(matches_reference_at<RmsNormBackward>(magnitude_of(inv_rms, grad_y), grad_y, x,
                                                          weight, inv_rms, extra, zero_centered(),
                                                          mask));
  });
}

TEST_P(NormOp, LayerNormBackwardMatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    const at::Tensor weight = random({x.size(-1)}, x.scalar_type(), 8),
                     bias = random({x.size(-1)}, x.scalar_type(), 9),
                     grad_y = random(x.sizes(), x.scalar_type(), 4),
                     residual = random(x.sizes(), x.scalar_type(), 5);
    const auto [y, mean, inv_std] =
        LayerNormForward::reference(x, weight, bias, kEps, zero_centered());
    EXPECT_TRUE(matches_reference_at<LayerNormBackward>(
        magnitude_of(inv_std, grad_y), grad_y, x, weight, Optional(bias), mean, inv_std,
        Optional(residual), zero_centered(), array{true, true, true, true}));
    EXPECT_TRUE(matches_reference_at<LayerNormBackward>(
        magnitude_of(inv_std, grad_y), grad_y, x, weight, Optional(), mean, inv_std, Optional(),
        zero_centered(), array{true, false, true, false}));
  });
}

TEST_P(NormOp, NormAndQuantizeGivesTheBitsOfBothInTurn) {
  for_every_quantizer(quantizers(), 1, [&](const Quantizer& quantizer, const at::Tensor& x) {
    const at::Tensor weight = random({x.size(-1)}, x.scalar_type(), 8),
                     bias = random({x.size(-1)}, x.scalar_type(), 9);
    const Optional given = given_for(quantizer);
    for (const auto& mask : {array{true, true, true, true}, array{false, true, true, true},
                             array{false, true, false, false}, array{true, false, true, false},
                             array{true, false, false, true}}) {
      const array<bool, 3> group{mask[1], mask[2], mask[3]};
      const auto expect = [&](const auto& fused, const auto& norm) {
        const size_t statistics = norm.size();
        if (mask[0]) {
          EXPECT_TRUE(same(fused[0], norm[0]));
        }
        EXPECT_EQ(mask[0] ? x.numel() : 0, fused[0].numel());
        for (size_t i = 1; i < statistics; ++i) EXPECT_TRUE(same(fused[i], norm[i]));
        const auto codes = dispatch<Quantize>(norm[0], given, quantizer, group);
        for (size_t part = 0; part < codes.size(); ++part)
          EXPECT_TRUE(same(fused[statistics + part], codes[part])) << part;
      };
      expect(dispatch<RmsNormQuantize>(x, weight, given, kEps, zero_centered(), quantizer, mask),
             dispatch<RmsNormForward>(x, weight, kEps, zero_centered()));
      expect(dispatch<LayerNormQuantize>(x, weight, bias, given, kEps, zero_centered(), quantizer,
                                         mask),
             dispatch<LayerNormForward>(x, weight, bias, kEps, zero_centered()));
    }
  });
}

TEST_P(NormOp, NormAndQuantizeOfManyBands) {
  for (const Quantizer* quantizer : quantizers())
    for (const auto dtype : kKernelDtypes)
      for (const auto& [rows, cols] :
           {dtype == at::kHalf ? std::pair{600, 131} : std::pair{300, 1100}}) {
        const at::Tensor x = random({rows, cols}, dtype), weight = random({cols}, dtype, 8);
        const Optional given = given_for(*quantizer);
        const auto [y, inv_rms] = dispatch<RmsNormForward>(x, weight, kEps, zero_centered());
        for (const bool keeps_y : {false, true}) {
          const auto fused =
              dispatch<RmsNormQuantize>(x, weight, given, kEps, zero_centered(), *quantizer,
                                        array{keeps_y, true, true, true});
          const auto codes = dispatch<Quantize>(y, given, *quantizer, array{true, true, true});
          EXPECT_TRUE(same(fused[1], inv_rms));
          for (size_t part = 0; part < codes.size(); ++part)
            EXPECT_TRUE(same(fused[2 + part], codes[part])) << quantizer->text << dtype << part;
        }
      }
}

TEST_P(NormOp, NormAndQuantizeInCompositeForm) {
  const at::Tensor x = random({4, 8}, at::kDouble), weight = random({8}, at::kDouble, 2);
  const Quantizer& quantizer = tandem::quantizer("fp8_e4m3");
  const auto rms = dispatch<RmsNormQuantize>(x, weight, Optional(), kEps, zero_centered(),
                                             quantizer, array{false, true, false, true});
  EXPECT_EQ(rms[0].numel(), 0);
  EXPECT_EQ(rms[2].scalar_type(), at::kByte);
  const auto layer =
      dispatch<LayerNormQuantize>(x, weight, weight, Optional(), kEps, zero_centered(), quantizer,
                                  array{true, true, false, true});
  EXPECT_TRUE(
      same(layer[0], LayerNormForward::reference(x, weight, weight, kEps, zero_centered())[0]));
}

TEST_P(NormOp, GradientOfTheOpByItself) {
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        const auto r = dispatch<RmsNormForward>(t[0], t[1], kEps, zero_centered());
        return Tensors(r.begin(), r.end());
      },
      {leaf({3, 5}, at::kDouble), leaf({5}, at::kDouble, 2)}));
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        const auto r = dispatch<LayerNormForward>(t[0], t[1], t[2], kEps, zero_centered());
        return Tensors(r.begin(), r.end());
      },
      {leaf({3, 5}, at::kDouble), leaf({5}, at::kDouble, 2), leaf({5}, at::kDouble, 3)}));
}

TEST_P(NormOp, GradientOfTheBackwardByItself) {
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        const auto r = dispatch<RmsNormBackward>(t[0], t[1], t[2], t[3], Optional(t[4]),
                                                 zero_centered(), array{true, true, true});
        return Tensors(r.begin(), r.end());
      },
      {leaf({3, 5}, at::kDouble), leaf({3, 5}, at::kDouble, 2), leaf({5}, at::kDouble, 3),
       leaf({3}, at::kDouble, 4), leaf({3, 5}, at::kDouble, 5)}));
}

TEST(NormOps, L2MatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    EXPECT_TRUE(matches_reference<L2NormForward>(x, kEps));
    const at::Tensor grad_y = random(x.sizes(), x.scalar_type(), 4),
                     inv_norm = L2NormForward::reference(x, kEps)[1];
    for (const auto& mask : {array{true, true}, array{true, false}, array{false, true}})
      EXPECT_TRUE(matches_reference_at<L2NormBackward>(magnitude_of(inv_norm, grad_y), grad_y, x,
                                                       inv_norm, mask));
  });
}

TEST(NormOps, OverTwoDimensionsAreThoseOverOneOfAReshape) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const at::Tensor x = random({3, 2, 40}, dtype), grad_y = random({3, 2, 40}, dtype, 4),
                     weight = random({2, 40}, dtype, 2), bias = random({2, 40}, dtype, 3);
    const auto flat = [](const at::Tensor& t) { return t.flatten(t.dim() == 2 ? 0 : 1); };
    const auto all_same = [&](const auto& got, const auto& expected) {
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(same(got[i].reshape(expected[i].sizes()), expected[i])) << dtype << ' ' << i;
    };
    const auto rms = dispatch<RmsNormForward>(x, weight, kEps, false);
    EXPECT_EQ(rms[0].sizes(), x.sizes());
    all_same(rms, dispatch<RmsNormForward>(flat(x), flat(weight), kEps, false));
    const array three{true, true, true};
    all_same(dispatch<RmsNormBackward>(grad_y, x, weight, rms[1], Optional(x), false, three),
             dispatch<RmsNormBackward>(flat(grad_y), flat(x), flat(weight), rms[1],
                                       Optional(flat(x)), false, three));
    const auto layer = dispatch<LayerNormForward>(x, weight, bias, kEps, true);
    all_same(layer, dispatch<LayerNormForward>(flat(x), flat(weight), flat(bias), kEps, true));
    const array four{true, true, true, true};
    all_same(dispatch<LayerNormBackward>(grad_y, x, weight, Optional(bias), layer[1], layer[2],
                                         Optional(), true, four),
             dispatch<LayerNormBackward>(flat(grad_y), flat(x), flat(weight), Optional(flat(bias)),
                                         layer[1], layer[2], Optional(), true, four));
  }
}

TEST(NormOps, AreTorchs) {
  const at::Tensor x = random({3, 2, 40}), weight = random({40}, at::kFloat, 2),
                   bias = random({40}, at::kFloat, 3);
  EXPECT_TRUE(near(dispatch<RmsNormForward>(x, weight, kEps, false)[0],
                   at::rms_norm(x, {40}, weight, kEps)));
  EXPECT_TRUE(near(dispatch<LayerNormForward>(x, weight, bias, kEps, false)[0],
                   at::layer_norm(x, {40}, weight, bias, kEps)));
}

TEST(NormOpErrors, WeightOfAnotherLength) {
  EXPECT_THAT(
      [] {
        dispatch<RmsNormForward>(random({2, 8}), random({7}), kEps, false);
      },
      ThrowsText<c10::ValueError>("rms_norm: expected weight of shape [8]",
                                  "], the last dimension of x ", "got [7]",
                                  "Build the op with 8 features"));
  EXPECT_THAT(
      [] {
        dispatch<LayerNormForward>(random({2, 8}), random({8}), random({2, 8}), kEps, false);
      },
      ThrowsText<c10::ValueError>("layer_norm: expected bias of shape [8]", "got [2, 8]"));
}

TEST(NormOpErrors, WeightOfOtherDimensions) {
  EXPECT_THAT(
      [] {
        dispatch<RmsNormForward>(random({4, 2, 8}), random({4, 8}), kEps, false);
      },
      ThrowsText<c10::ValueError>("rms_norm: expected weight of the shape of the last 2 dimensions "
                                  "of x [4, 2, 8], got [4, 8]. Build the op with their sizes or "
                                  "reshape x."));
  EXPECT_THAT(
      [] {
        dispatch<LayerNormForward>(random({2, 8}), random({2, 8}), random({8}), kEps, false);
      },
      ThrowsText<c10::ValueError>("layer_norm: expected bias of the shape of weight, [2, 8]"));
  EXPECT_THAT([] { dispatch<L2NormForward>(random({}), kEps); },
              ThrowsText<c10::ValueError>(
                  "l2_norm: expected x with at least 1 dimension, got a scalar. Pass x.reshape"));
}

TEST(NormOpErrors, OperandsOfAddNorm) {
  const auto with = [](at::IntArrayRef extra, int64_t weight, int64_t bias) {
    return [=, sizes = extra.vec()] {
      dispatch<AddNormForward>(random({3, 6}), random(sizes), random({weight}),
                               Optional(random({bias})), kEps, false, array{true});
    };
  };
  EXPECT_THAT(with({3, 5}, 6, 6),
              ThrowsText<c10::ValueError>("add_extra_input: expected the extra input of the shape "
                                          "of x, [3, 6], got [3, 5]"));
  EXPECT_THAT(with({3, 6}, 5, 6),
              ThrowsText<c10::ValueError>("add_norm: expected weight of shape [6]"));
  EXPECT_THAT(with({3, 6}, 6, 5),
              ThrowsText<c10::ValueError>("add_norm: expected bias of shape [6]"));
}

TEST(NormOpErrors, AScalar) {
  EXPECT_THAT([] { dispatch<RmsNormForward>(random({}), random({1}), kEps, false); },
              ThrowsText<c10::ValueError>(
                  "rms_norm: ", ": expected x with at least 1 dimension, got a scalar. ",
                  "Pass x.reshape({1})"));
}

TEST(NormOpErrors, GradientOfAnotherShape) {
  EXPECT_THAT(
      [] {
        dispatch<RmsNormBackward>(random({2, 7}), random({2, 8}), random({8}), random({2}),
                                  Optional(), false, array{true, true, true});
      },
      ThrowsText<c10::ValueError>("rms_norm_backward: expected grad_y of the shape of x",
                                  "[2, 8], got [2, 7]"));
  EXPECT_THAT(
      [] {
        dispatch<LayerNormBackward>(random({2, 7}), random({2, 8}), random({8}), Optional(),
                                    random({2}), random({2}), Optional(), false,
                                    array{true, true, true, false});
      },
      ThrowsText<c10::ValueError>("layer_norm_backward: expected grad_y of the shape of x"));
}

TEST(NormOpErrors, WhatForwardDidNotReturn) {
  const array<bool, 3> all{true, true, true};
  EXPECT_THAT(
      [&] {
        dispatch<RmsNormBackward>(random({2, 8}), random({2, 8}), random({7}), random({2}),
                                  Optional(), false, all);
      },
      ThrowsText<c10::ValueError>("rms_norm_backward: expected weight of shape [8]", "got [7]"));
  EXPECT_THAT(
      [&] {
        dispatch<RmsNormBackward>(random({2, 8}), random({2, 8}), random({8}), random({3}),
                                  Optional(), false, all);
      },
      ThrowsText<c10::ValueError>("rms_norm_backward: expected inv_rms with 2 elements",
                                  " elements, one per row of x ", "[2, 8], got shape [3]",
                                  "Pass what the forward op returned"));
  EXPECT_THAT(
      [&] {
        dispatch<RmsNormBackward>(random({2, 8}), random({2, 8}), random({8}), random({2}),
                                  Optional(random({8})), false, all);
      },
      ThrowsText<c10::ValueError>("rms_norm_backward: expected grad_residual of the shape of x"));
  EXPECT_THAT(
      [&] {
        dispatch<LayerNormBackward>(random({2, 8}), random({2, 8}), random({8}), Optional(),
                                    random({2}), random({1}), Optional(), false,
                                    array{true, true, true, false});
      },
      ThrowsText<c10::ValueError>("layer_norm_backward: expected inv_std with 2 elements"));
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_norm
