// Sums and dropout as kernel ops.
#include "kernel_ops/elementwise/elementwise.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>

#include "support/kernel_ops.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_elementwise {
namespace {

using namespace kernel_ops;
using Optional = std::optional<at::Tensor>;

at::Tensor seed_of(int64_t seed) { return at::scalar_tensor(seed, at::kLong); }

TEST(AddBiasOp, MatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    const at::Tensor bias = random({x.size(-1)}, x.scalar_type(), 8),
                     extra = random(x.sizes(), x.scalar_type(), 4);
    for (const Optional& b : {Optional(), Optional(bias), Optional(bias.to(at::kFloat))})
      for (const Optional& e : {Optional(), Optional(extra), Optional(extra.to(at::kHalf))})
        EXPECT_TRUE(matches_reference<AddBias>(x, b, e));
  });
}

TEST(AddBiasOp, WithoutTermsIsAFreshCopy) {
  const at::Tensor x = random({3, 4}), y = dispatch<AddBias>(x, Optional(), Optional())[0];
  EXPECT_TRUE(same(y, x));
  EXPECT_NE(y.const_data_ptr(), x.const_data_ptr());
  EXPECT_NE(AddBias::reference(x, Optional(), Optional())[0].const_data_ptr(), x.const_data_ptr());
}

TEST(AddBiasOp, GradientOfTheOpByItself) {
  EXPECT_TRUE(gradients_match(
      [](const Tensors& t) {
        const auto r = dispatch<AddBias>(t[0], Optional(t[1]), Optional(t[2]));
        return Tensors(r.begin(), r.end());
      },
      {leaf({3, 4}, at::kDouble), leaf({4}, at::kDouble, 2), leaf({3, 4}, at::kDouble, 3)}));
}

TEST(AddBiasOpErrors, ShapesThatDoNotFit) {
  EXPECT_THAT(
      [] {
        dispatch<AddBias>(random({2, 4}), Optional(random({5})), Optional());
      },
      ThrowsText<c10::ValueError>("bias: expected bias of shape [4]", "got [5]"));
  EXPECT_THAT(
      [] {
        dispatch<AddBias>(random({2, 4}), Optional(), Optional(random({4})));
      },
      ThrowsText<c10::ValueError>("add_extra_input: expected the extra input", " of the shape of ",
                                  "[2, 4], got [4]", " before the call."));
}

TEST(SumRowsOp, MatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    for (const auto dtype : {x.scalar_type(), at::kFloat, at::kBFloat16})
      EXPECT_TRUE(matches_reference<SumRows>(x, dtype));
  });
  EXPECT_TRUE(same(dispatch<SumRows>(random({3, 4}, at::kDouble), at::kDouble)[0],
                   random({3, 4}, at::kDouble).sum(0)));
}

TEST(DropoutOp, MatchesReferenceBitwise) {
  for_every_case(1, [&](const at::Tensor& x) {
    for (const double p : {0.0, 0.3, 0.5, 1.0})
      EXPECT_TRUE(
          same(dispatch<Dropout>(x, seed_of(-77), p)[0], Dropout::reference(x, seed_of(-77), p)[0]))
          << p;
  });
}

TEST(DropoutOp, KeepsTheShareItShouldAndScalesIt) {
  const at::Tensor y = dispatch<Dropout>(at::ones({100, 1000}), seed_of(1), 0.25)[0];
  const double kept = (y != 0).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(kept, 0.75, 0.01);
  EXPECT_FLOAT_EQ(y.max().item<float>(), 1 / 0.75f);
  EXPECT_FALSE(y.equal(dispatch<Dropout>(at::ones({100, 1000}), seed_of(2), 0.25)[0]));
}

TEST(DropoutOp, GradientOfTheOpByItself) {
  EXPECT_TRUE(gradients_match(
      [](const Tensors& t) { return Tensors{dispatch<Dropout>(t[0], seed_of(5), 0.4)[0]}; },
      {leaf({5, 6}, at::kDouble)}));
}

TEST(DropoutAddOp, MatchesReferenceBitwise) {
  for_every_case(1, [&](const at::Tensor& x) {
    const at::Tensor bias = random({x.size(-1)}, x.scalar_type(), 8),
                     extra = random(x.sizes(), x.scalar_type(), 4);
    for (const Optional& b : {Optional(), Optional(bias), Optional(bias.to(at::kFloat))})
      for (const Optional& e : {Optional(), Optional(extra), Optional(extra.to(at::kFloat))})
        EXPECT_TRUE(same(dispatch<DropoutAdd>(x, b, seed_of(-77), 0.3, e)[0],
                         DropoutAdd::reference(x, b, seed_of(-77), 0.3, e)[0]));
  });
}

TEST(DropoutAddOp, GradientOfTheOpByItself) {
  EXPECT_TRUE(gradients_match(
      [](const Tensors& t) {
        return Tensors{
            dispatch<DropoutAdd>(t[0], Optional(t[1]), seed_of(5), 0.4, Optional(t[2]))[0]};
      },
      {leaf({5, 6}, at::kDouble), leaf({6}, at::kDouble, 2), leaf({5, 6}, at::kDouble, 3)}));
}

TEST(DropoutBackwardBiasOp, MatchesReference) {
  const at::Tensor seed = seed_of(-77);
  for_every_case(1, [&](const at::Tensor& x) {
    for (const auto dtype : {x.scalar_type(), at::kFloat, at::kBFloat16})
      for (const double p : {0.0, 0.3, 1.0}) {
        const std::array<bool, 2> both{true, true};
        const auto got = dispatch<DropoutBackwardBias>(x, seed, p, dtype, both);
        EXPECT_TRUE(same(got[0], dispatch<Dropout>(x, seed, p)[0]));
        EXPECT_TRUE(same(got[1], dispatch<SumRows>(got[0], dtype)[0]));
        EXPECT_TRUE(matches_reference<DropoutBackwardBias>(x, seed, p, dtype, both));
      }
  });
}

TEST(DropoutBackwardBiasOp, WritesWhatIsWanted) {
  const at::Tensor grad_y = random({7, 5}), seed = seed_of(3);
  const auto of = [&](bool grad_x, bool grad_bias) {
    return dispatch<DropoutBackwardBias>(grad_y, seed, 0.3, at::kFloat,
                                         std::array{grad_x, grad_bias});
  };
  const auto both = of(true, true), grad_x = of(true, false), grad_bias = of(false, true);
  EXPECT_TRUE(same(grad_x[0], both[0]));
  EXPECT_TRUE(same(grad_bias[1], both[1]));
  EXPECT_EQ(grad_x[1].numel() + grad_bias[0].numel() + of(false, false)[0].numel(), 0);
}

TEST(DropoutBackwardBiasOp, GradientOfTheOpByItself) {
  EXPECT_TRUE(gradients_match(
      [](const Tensors& t) {
        const auto r = dispatch<DropoutBackwardBias>(t[0], seed_of(5), 0.4, at::kDouble,
                                                     std::array{true, true});
        return Tensors(r.begin(), r.end());
      },
      {leaf({5, 6}, at::kDouble)}));
}

TEST(DropoutOpErrors, ProbabilityAndSeed) {
  EXPECT_THAT([] { dispatch<Dropout>(random({2}), seed_of(1), 1.5); },
              ThrowsText<c10::ValueError>("dropout: expected a probability p in [0, 1], got ",
                                          "got 1.5", "the share that becomes zero"));
  EXPECT_THAT([] { dispatch<Dropout>(random({2}), random({}), 0.5); },
              ThrowsText<c10::TypeError>("dropout: expected an int64 seed, got ", "float32",
                                         "Draw it with torch.randint"));
  EXPECT_THAT(
      [] { dispatch<Dropout>(random({2}), at::ones({0}, at::kLong), 0.5); },
      ThrowsText<c10::ValueError>("dropout: expected a seed with one element, got shape [0]",
                                  " with one element, got shape ", "Pass a scalar tensor"));
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_elementwise
