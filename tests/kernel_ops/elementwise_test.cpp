// Sums and dropout as kernel ops; with a quantizer behind them, the bits of both in turn.
#include "kernel_ops/elementwise/elementwise.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>

#include "support/codes.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_elementwise {
namespace {

using namespace kernel_ops;
using Optional = std::optional<at::Tensor>;

at::Tensor seed_of(int64_t seed) { return at::scalar_tensor(seed, at::kLong); }

/// Calls `check(bias, extra)` with terms of several dtypes and without.
template <typename Check>
void for_every_term(const at::Tensor& x, at::ScalarType of_extra, Check&& check) {
  const at::Tensor bias = random({x.size(-1)}, x.scalar_type(), 8),
                   extra = random(x.sizes(), x.scalar_type(), 4);
  for (const Optional& b : {Optional(), Optional(bias), Optional(bias.to(at::kFloat))})
    for (const Optional& e : {Optional(), Optional(extra), Optional(extra.to(of_extra))})
      check(b, e);
}

TEST(AddBiasOp, MatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    for_every_term(x, at::kHalf, [&](const Optional& bias, const Optional& extra) {
      for (const double factor : {1.0, -0.75})
        EXPECT_TRUE(
            matches_reference<AddBias>({.x = x, .bias = bias, .factor = factor, .extra = extra}));
    });
  });
}

TEST(AddBiasOp, WithoutTermsIsAFreshCopy) {
  const at::Tensor x = random({3, 4}), y = dispatch<AddBias>({.x = x})[0];
  EXPECT_TRUE(same(y, x));
  EXPECT_NE(y.const_data_ptr(), x.const_data_ptr());
  EXPECT_NE(AddBias::reference({.x = x})[0].const_data_ptr(), x.const_data_ptr());
}

TEST(AddBiasOp, RoundsTheFactorTimesTheBiasWithTheSum) {
  const at::Tensor x = random({3, 400}, at::kBFloat16), bias = random({400}, at::kBFloat16, 2);
  const double factor = 1 / 3.0;
  const at::Tensor y = dispatch<AddBias>({.x = x, .bias = bias, .factor = factor})[0];
  EXPECT_TRUE(same(y, (x.to(at::kFloat) + bias.to(at::kFloat) * factor).to(at::kBFloat16)));
  EXPECT_FALSE(same(y, x + bias * factor));
}

TEST(AddBiasOp, GradientOfTheOpByItself) {
  for (const double factor : {1.0, -0.75})
    EXPECT_TRUE(gradients_match(
        [&](const Tensors& t) {
          return Tensors{
              dispatch<AddBias>({.x = t[0], .bias = t[1], .factor = factor, .extra = t[2]})[0]};
        },
        {leaf({3, 4}, at::kDouble), leaf({4}, at::kDouble, 2), leaf({3, 4}, at::kDouble, 3)}));
}

TEST(AddBiasOpErrors, ShapesThatDoNotFit) {
  EXPECT_ERROR(dispatch<AddBias>({.x = random({2, 4}), .bias = random({5})}), c10::ValueError,
               "bias: expected bias of shape [4]", "got [5]");
  EXPECT_ERROR(dispatch<AddBias>({.x = random({2, 4}), .extra = random({4})}), c10::ValueError,
               "add_extra_input: expected the extra input", " of the shape of ", "[2, 4], got [4]",
               " before the call.");
}

TEST(SumRowsOp, MatchesReference) {
  for_every_case(1, [&](const at::Tensor& x) {
    for (const auto dtype : {x.scalar_type(), at::kFloat, at::kBFloat16})
      EXPECT_TRUE(matches_reference<SumRows>({.x = x, .dtype = dtype}));
  });
  const at::Tensor x = random({3, 4}, at::kDouble);
  EXPECT_TRUE(same(dispatch<SumRows>({.x = x, .dtype = at::kDouble})[0], x.sum(0)));
}

TEST(DropoutOp, MatchesReferenceBitwise) {
  const at::Tensor seed = seed_of(-77);
  for_every_case(1, [&](const at::Tensor& x) {
    for_every_term(x, at::kFloat, [&](const Optional& bias, const Optional& extra) {
      for (const double p : {0.0, 0.3, 0.5, 1.0}) {
        const Dropout::Args args{.x = x, .bias = bias, .seed = seed, .p = p, .extra = extra};
        EXPECT_TRUE(same(dispatch<Dropout>(args)[0], Dropout::reference(args)[0])) << p;
      }
    });
  });
}

TEST(DropoutOp, KeepsTheShareItShouldAndScalesIt) {
  const auto of = [](int64_t seed) {
    return dispatch<Dropout>({.x = at::ones({100, 1000}), .seed = seed_of(seed), .p = 0.25})[0];
  };
  const at::Tensor y = of(1);
  const double kept = (y != 0).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(kept, 0.75, 0.01);
  EXPECT_FLOAT_EQ(y.max().item<float>(), 1 / 0.75f);
  EXPECT_FALSE(y.equal(of(2)));
}

TEST(DropoutOp, GradientOfTheOpByItself) {
  EXPECT_TRUE(gradients_match(
      [](const Tensors& t) {
        const at::Tensor seed = seed_of(5);
        return Tensors{
            dispatch<Dropout>({.x = t[0], .seed = seed, .p = 0.4})[0],
            dispatch<Dropout>({.x = t[0], .bias = t[1], .seed = seed, .p = 0.4, .extra = t[2]})[0]};
      },
      {leaf({5, 6}, at::kDouble), leaf({6}, at::kDouble, 2), leaf({5, 6}, at::kDouble, 3)}));
}

TEST(DropoutOpErrors, ProbabilityAndSeed) {
  const auto run = [](const at::Tensor& seed, double p) {
    dispatch<Dropout>({.x = random({2}), .seed = seed, .p = p});
  };
  EXPECT_ERROR(run(seed_of(1), 1.5), c10::ValueError,
               "dropout: expected a probability p in [0, 1], got ", "got 1.5",
               "the share that becomes zero");
  EXPECT_ERROR(run(random({}), 0.5), c10::TypeError, "dropout: expected an int64 seed, got ",
               "float32", "Draw it with torch.randint");
  EXPECT_ERROR(run(at::ones({0}, at::kLong), 0.5), c10::ValueError,
               "dropout: expected a seed with one element, got shape [0]", "Pass a scalar tensor");
}

TEST(DropoutBackwardOp, MatchesReference) {
  const at::Tensor seed = seed_of(-77);
  for_every_case(1, [&](const at::Tensor& x) {
    for (const auto dtype : {x.scalar_type(), at::kFloat, at::kBFloat16})
      for (const double p : {0.0, 0.3, 1.0}) {
        const DropoutBackward::Args args{.grad_y = x, .seed = seed, .p = p, .dtype = dtype};
        const auto got = dispatch<DropoutBackward>(args);
        EXPECT_TRUE(same(got[0], dispatch<Dropout>({.x = x, .seed = seed, .p = p})[0]));
        EXPECT_TRUE(same(got[1], dispatch<SumRows>({.x = got[0], .dtype = dtype})[0]));
        EXPECT_TRUE(matches_reference<DropoutBackward>(args));
      }
  });
}

TEST(DropoutBackwardOp, WritesWhatIsWanted) {
  const at::Tensor grad_y = random({7, 5}), seed = seed_of(3);
  const auto of = [&](bool grad_x, bool grad_bias) {
    return dispatch<DropoutBackward>({.grad_y = grad_y,
                                      .seed = seed,
                                      .p = 0.3,
                                      .dtype = at::kFloat,
                                      .output_mask = {grad_x, grad_bias}});
  };
  const auto both = of(true, true), grad_x = of(true, false), grad_bias = of(false, true);
  EXPECT_TRUE(same(grad_x[0], both[0]));
  EXPECT_TRUE(same(grad_bias[1], both[1]));
  EXPECT_EQ(grad_x[1].numel() + grad_bias[0].numel() + of(false, false)[0].numel(), 0);
}

TEST(DropoutBackwardOp, GradientOfTheOpByItself) {
  EXPECT_TRUE(gradients_match(
      [](const Tensors& t) {
        const auto r = dispatch<DropoutBackward>(
            {.grad_y = t[0], .seed = seed_of(5), .p = 0.4, .dtype = at::kDouble});
        return Tensors{r[0], r[1]};
      },
      {leaf({5, 6}, at::kDouble)}));
}

/// Of the sums of x and of dropout's gradient. Their composite forms are slow.
void expect_the_bits_of_both(const Quantizer& quantizer, const at::Tensor& x) {
  const at::Tensor seed = seed_of(77);
  const bool is_small = x.numel() <= 8192;
  for (const GroupMask& codes : {GroupMask{true, true, true}, GroupMask{true, false, false},
                                 GroupMask{false, true, false}}) {
    SumRows::Args args{.x = x, .dtype = codes[0] ? at::kFloat : at::kBFloat16};
    const auto made = dispatch<SumRows>(args);
    args.codes = requested(&quantizer, codes);
    const auto fused = dispatch<SumRows>(args);
    expect_made(fused, made, {true});
    expect_codes<SumRows>(fused, 0, x, args.codes);
    if (codes[2] && is_small) expect_sizes(run_reference<SumRows>(args), fused);
  }
  for (const auto& [wanted, codes] :
       {std::pair{std::array{true, true}, GroupMask{true, true, true}},
        {std::array{false, false}, GroupMask{true, true, false}},
        {std::array{false, true}, GroupMask{true, false, true}},
        {std::array{true, false}, GroupMask{false, false, true}}}) {
    DropoutBackward::Args args{
        .grad_y = x, .seed = seed, .p = 0.3, .dtype = wanted[0] ? at::kFloat : at::kBFloat16};
    const auto made = dispatch<DropoutBackward>(args);
    args.output_mask = wanted;
    args.codes = requested(&quantizer, codes);
    const auto fused = dispatch<DropoutBackward>(args);
    expect_made(fused, made, wanted);
    expect_codes<DropoutBackward>(fused, 0, made[0], args.codes);
    if (wanted[0] && is_small) expect_sizes(run_reference<DropoutBackward>(args), fused);
  }
}

TEST(ElementwiseAndQuantizeOp, GivesTheBitsOfBothInTurn) {
  for_every_quantizer(quantizers_and_delayed(), 1, expect_the_bits_of_both);
}

TEST(ElementwiseAndQuantizeOp, OfManyBlocksOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  at::Tensor x = random({1100, 261}, at::kBFloat16);  // dropout's words of a row begin anywhere
  x[1000][7] = NAN;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    for (const Quantizer* quantizer : quantizers_and_delayed()) {
      SCOPED_TRACE(quantizer->text);
      expect_the_bits_of_both(*quantizer, x);
    }
  }
  at::set_num_threads(threads);
}

TEST(ElementwiseAndQuantizeOpErrors, ScalarsAndWhatTheQuantizerDoesNotTake) {
  const at::Tensor one = at::scalar_tensor(1.0f), x = random({4, 6}), seed = seed_of(77);
  const GroupMask rows{true, false, false};
  const RequestedCodes codes{quantizers()[0], std::nullopt, rows},
      scaled{quantizers()[0], one, rows};
  EXPECT_ERROR(dispatch<SumRows>({.x = one, .dtype = at::kFloat, .codes = codes}), c10::ValueError,
               "sum_rows: expected x with at least 1 dimension", "got");
  EXPECT_ERROR(dispatch<SumRows>({.x = x, .dtype = at::kFloat, .codes = scaled}), c10::ValueError,
               "sum_rows: expected no scale and no seed for ", "got one");
  EXPECT_ERROR(dispatch<DropoutBackward>(
                   {.grad_y = x, .seed = seed, .p = 0.3, .dtype = at::kFloat, .codes = scaled}),
               c10::ValueError, "dropout_backward: expected no scale and no seed for ", "got one");
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_elementwise
