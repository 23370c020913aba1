// Activations and gated units as kernel ops: on every instruction set the CPU kernel is the
// composite reference, within one rounding. Every row of tandem/activations.h is tested here;
// tests/kernels measures the formulas that it knows in float64 more closely.
#include "kernel_ops/unit/activation.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "kernels/activation.h"
#include "support/kernel_ops.h"
#include "support/targets.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_activation {
namespace {

using kernel_ops::ActivationBackward;
using kernel_ops::ActivationForward;
using kernel_ops::ScaledActivationBackward;
using kernel_ops::ScaledActivationForward;
using std::array;
using Bias = std::optional<at::Tensor>;

/// y; where there is a bias z too.
ActivationForward::Args forward_of(const at::Tensor& x, const Bias& bias, std::string_view function,
                                   bool is_gated) {
  return {.x = x,
          .bias = bias,
          .activation = function,
          .is_gated = is_gated,
          .output_mask = {bias.has_value(), true}};
}
ActivationBackward::Args backward_of(const at::Tensor& grad_y, const at::Tensor& z,
                                     std::string_view function, bool is_gated,
                                     array<bool, 3> output_mask = {true, true, true}) {
  return {.grad_y = grad_y,
          .z = z,
          .activation = function,
          .is_gated = is_gated,
          .output_mask = output_mask};
}

/// z and y of x and bias; grad_z, y and grad_bias of grad_y and z.
Tensors forward(std::string_view function, bool is_gated, const Tensors& t) {
  const auto r =
      kernel_ops::dispatch<ActivationForward>(forward_of(t[0], t[1], function, is_gated));
  return {r[0], r[1]};
}
Tensors backward(std::string_view function, bool is_gated, const Tensors& t) {
  const auto r =
      kernel_ops::dispatch<ActivationBackward>(backward_of(t[0], t[1], function, is_gated));
  return {r[0], r[1], r[2]};
}

using Param = std::tuple<int64_t, std::string_view>;

class ActivationOp : public ::testing::TestWithParam<Param> {
 protected:
  std::string_view function() const { return std::get<1>(GetParam()); }

 private:
  ScopedTarget target_{std::get<0>(GetParam())};
};
INSTANTIATE_TEST_SUITE_P(Functions, ActivationOp,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::ValuesIn(kernels::kActivationNames)),
                         [](const ::testing::TestParamInfo<Param>& info) {
                           return target_name(std::get<0>(info.param)) + "_" +
                                  std::string(std::get<1>(info.param));
                         });

TEST_P(ActivationOp, ForwardMatchesReference) {
  for (const bool is_gated : {false, true})
    for_every_case(is_gated ? 2 : 1, [&](const at::Tensor& x) {
      const at::Tensor bias = random({x.size(-1)}, x.scalar_type(), 9);
      for (const Bias& added : {Bias(), Bias(bias)})
        EXPECT_TRUE(
            matches_reference<ActivationForward>(forward_of(x, added, function(), is_gated)));
    });
}

TEST_P(ActivationOp, BackwardMatchesReference) {
  for (const bool is_gated : {false, true})
    for_every_case(is_gated ? 2 : 1, [&](const at::Tensor& z) {
      const at::Tensor grad_y =
          random(z.narrow(-1, 0, z.size(-1) / (is_gated ? 2 : 1)).sizes(), z.scalar_type(), 4);
      for (const array mask : {array{true, true, true}, array{false, false, true}})
        EXPECT_TRUE(matches_reference_at<ActivationBackward>(
            is_gated ? 0 : 1, backward_of(grad_y, z, function(), is_gated, mask)));
      if (z.numel() == 0) return;
      const at::Tensor expanded = grad_y.narrow(0, 0, 1).expand_as(grad_y);
      EXPECT_TRUE(matches_reference<ActivationBackward>(
          backward_of(expanded, z, function(), is_gated, {true, false, false})));
    });
}

TEST_P(ActivationOp, MixedDtypesPromote) {
  const at::Tensor x = random({5, 8}, at::kBFloat16), bias = random({8}, at::kFloat);
  for (const bool is_gated : {false, true}) {
    EXPECT_EQ(forward(function(), is_gated, {x, bias})[1].scalar_type(), at::kFloat);
    EXPECT_TRUE(matches_reference<ActivationForward>(forward_of(x, bias, function(), is_gated)));
  }
}

TEST_P(ActivationOp, Float64RunsTheReference) {
  const at::Tensor x = random({3, 8}, at::kDouble);
  const auto args = forward_of(x, Bias(), function(), true);
  EXPECT_TRUE(same(kernel_ops::dispatch<ActivationForward>(args)[1],
                   ActivationForward::reference(args)[1]));
}

TEST_P(ActivationOp, GradientOfTheOpByItself) {
  for (const bool is_gated : {false, true})
    EXPECT_TRUE(gradients_match([&](const Tensors& t) { return forward(function(), is_gated, t); },
                                {leaf({3, 6}, at::kDouble), leaf({6}, at::kDouble, 2)}));
}

TEST_P(ActivationOp, GradientOfTheBackwardByItself) {
  for (const bool is_gated : {false, true})
    EXPECT_TRUE(
        gradients_match([&](const Tensors& t) { return backward(function(), is_gated, t); },
                        {leaf({3, is_gated ? 3 : 6}, at::kDouble), leaf({3, 6}, at::kDouble, 2)}));
}

/// What only gated units take, for last dimensions that are multiples of 6.
constexpr std::string_view kGatedTexts[] = {
    "situglu:beta1=4:beta2=25",
    "situglu:beta1=0.5:beta2=1e3:interleave=3",
    "clamped_swiglu:limit=0.75:alpha=1.702:glu_linear_offset=1",
    "clamped_swiglu:limit=7:alpha=-1e-3:glu_linear_offset=-0.5:interleave=1",
    "gelu:interleave=3",
};

class GatedOp : public ::testing::TestWithParam<std::tuple<int64_t, std::string_view>> {
 protected:
  std::string_view function() const { return std::get<1>(GetParam()); }

 private:
  ScopedTarget target_{std::get<0>(GetParam())};
};
INSTANTIATE_TEST_SUITE_P(Texts, GatedOp,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::ValuesIn(kGatedTexts)));

TEST_P(GatedOp, MatchesReference) {
  for_every_case(6, [&](const at::Tensor& z) {
    const at::Tensor bias = random({z.size(-1)}, z.scalar_type(), 9),
                     grad_y = random(z.narrow(-1, 0, z.size(-1) / 2).sizes(), z.scalar_type(), 4);
    for (const Bias& added : {Bias(), Bias(bias)})
      EXPECT_TRUE(matches_reference<ActivationForward>(forward_of(z, added, function(), true)));
    EXPECT_TRUE(
        matches_reference_at<ActivationBackward>(1, backward_of(grad_y, z, function(), true)));
  });
}

TEST_P(GatedOp, GradientByItself) {
  EXPECT_TRUE(gradients_match([&](const Tensors& t) { return forward(function(), true, t); },
                              {leaf({3, 6}, at::kDouble), leaf({6}, at::kDouble, 2)}));
  EXPECT_TRUE(gradients_match([&](const Tensors& t) { return backward(function(), true, t); },
                              {leaf({3, 3}, at::kDouble), leaf({3, 6}, at::kDouble, 2)}));
}

/// As activation_function.h has them, and whether the unit is gated.
constexpr std::pair<std::string_view, bool> kScaled[] = {
    {"silu:interleave=3", true},
    {"situglu:beta1=4:beta2=25", true},
    {"clamped_swiglu:limit=0.75:alpha=1.702:glu_linear_offset=1", true},
    {"srelu", false},
    {"gelu", false}};

ScaledActivationForward::Args scaled_of(const at::Tensor& x, const at::Tensor& scales,
                                        std::string_view function, bool is_gated) {
  return {.x = x, .scales = scales, .activation = function, .is_gated = is_gated};
}
ScaledActivationBackward::Args scaled_backward_of(const at::Tensor& grad_y, const at::Tensor& x,
                                                  const at::Tensor& scales,
                                                  std::string_view function, bool is_gated,
                                                  array<bool, 3> output_mask = {true, true, true}) {
  return {.grad_y = grad_y,
          .x = x,
          .scales = scales,
          .activation = function,
          .is_gated = is_gated,
          .output_mask = output_mask};
}

class ScaledOp
    : public ::testing::TestWithParam<std::tuple<int64_t, std::pair<std::string_view, bool>>> {
 protected:
  std::string_view function() const { return std::get<1>(GetParam()).first; }
  bool is_gated() const { return std::get<1>(GetParam()).second; }

 private:
  ScopedTarget target_{std::get<0>(GetParam())};
};
INSTANTIATE_TEST_SUITE_P(Units, ScaledOp,
                         ::testing::Combine(::testing::ValuesIn(all_targets()),
                                            ::testing::ValuesIn(kScaled)));

TEST_P(ScaledOp, MatchesReference) {
  for_every_case(is_gated() ? 6 : 1, [&](const at::Tensor& x) {
    const int64_t cols = is_gated() ? x.size(-1) / 2 : x.size(-1);
    const auto rows = x.sizes().slice(0, x.dim() - 1);
    const at::Tensor grad_y = random(x.narrow(-1, 0, cols).sizes(), x.scalar_type(), 4);
    for (const auto dtype : {x.scalar_type(), at::kFloat}) {
      const at::Tensor scales = random(rows, dtype, 5);
      EXPECT_TRUE(
          matches_reference<ScaledActivationForward>(scaled_of(x, scales, function(), is_gated())));
      for (const array mask :
           {array{true, true, true}, array{true, false, false}, array{false, true, false}})
        EXPECT_TRUE(matches_reference_at<ScaledActivationBackward>(
            static_cast<double>(cols),
            scaled_backward_of(grad_y, x, scales, function(), is_gated(), mask)));
    }
  });
}

TEST_P(ScaledOp, GradientByItself) {
  const auto x = leaf({3, is_gated() ? 12 : 6}, at::kDouble), scales = leaf({3}, at::kDouble, 2);
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        return Tensors{kernel_ops::dispatch<ScaledActivationForward>(
            scaled_of(t[0], t[1], function(), is_gated()))[0]};
      },
      {x, scales}));
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        const auto r = kernel_ops::dispatch<ScaledActivationBackward>(
            scaled_backward_of(t[0], t[1], t[2], function(), is_gated()));
        return Tensors(r.begin(), r.end());
      },
      {leaf({3, 6}, at::kDouble, 3), x, scales}));
}

TEST(ScaledOps, OfNothingHaveGradientsOfZero) {
  const auto results = kernel_ops::dispatch<ScaledActivationBackward>(
      scaled_backward_of(random({3, 0}), random({3, 0}), random({3}), "srelu", false));
  EXPECT_TRUE(same(results[1], at::zeros({3})));
}

TEST(ScaledOpErrors, ShapesThatDoNotFit) {
  EXPECT_ERROR(kernel_ops::dispatch<ScaledActivationForward>(
                   scaled_of(random({2, 4}), random({3}), "silu", true)),
               c10::ValueError,
               "scaled_activation: expected scales with 2 elements, one per row of x [2, 4], got "
               "shape [3]. Pass a tensor of the shape of x");
  EXPECT_ERROR(kernel_ops::dispatch<ScaledActivationForward>(
                   scaled_of(random({}), random({}), "srelu", false)),
               c10::ValueError, "scaled_activation: expected x with at least 1 dimension");
  EXPECT_ERROR(kernel_ops::dispatch<ScaledActivationBackward>(
                   scaled_backward_of(random({2, 4}), random({2, 4}), random({2}), "silu", true)),
               c10::ValueError,
               "scaled_activation: expected grad_y of the shape of y, [2, 2], got [2, 4]");
}

TEST(ActivationOpErrors, TextsThatAreNone) {
  const auto given = [](std::string_view text) {
    forward(text, true, {random({2, 4}), random({4})});
  };
  for (const auto text : {"situglu", "situglu:beta1=4", "situglu:beta2=4:beta1=4",
                          "situglu:beta1=nan:beta2=4", "situglu:beta1=4:beta2=25:interleave=0",
                          "situglu:beta1=4:beta2=25,", "situglu:beta1=:beta2=25"})
    EXPECT_ERROR(given(text), c10::ValueError,
                 "activation: expected situglu:beta1=NUMBER:beta2=NUMBER, and behind it "
                 ":interleave=COLUMNS where a and b are no halves, got \"" +
                     std::string(text) + "\". Write all finite numbers, in this order.")
        << text;
  EXPECT_ERROR(given("silu:interleave=-1"), c10::ValueError, "expected silu, and behind");
  EXPECT_ERROR(given("tanh"), c10::ValueError, "expected one of gelu, silu, relu",
               "situglu, clamped_swiglu, got \"tanh\"");
  EXPECT_ERROR(forward("tanh", false, {random({2, 4}), random({4})}), c10::ValueError,
               "activation: expected one of gelu, silu, relu", "got \"tanh\"", "Use one of these");
  EXPECT_ERROR(forward("silu:interleave=2", false, {random({2, 4}), random({4})}), c10::ValueError,
               "activation: expected silu, got \"silu:interleave=2\"");
}

TEST(ActivationOpErrors, BlocksThatDoNotFit) {
  EXPECT_ERROR(forward("silu:interleave=4", true, {random({2, 12}), random({12})}), c10::ValueError,
               "glu: expected x whose last dimension is a multiple of 8, two blocks of "
               "glu_interleave_size, got [2, 12]");
}

TEST(ActivationOpErrors, WholeNumbersOfAFunctionWithFractions) {
  EXPECT_ERROR(kernel_ops::dispatch<ActivationForward>(
                   forward_of(at::ones({2, 4}, at::kLong), Bias(), "qgelu", false)),
               c10::TypeError,
               "activation: expected x of a dtype with fractions, as qgelu has, got int64. Convert "
               "it before the call.");
}

TEST(ActivationOps, MaskedOutResultsAreEmptyAndFresh) {
  const at::Tensor x = random({2, 4});
  const ActivationForward::Args args{
      .x = x, .activation = "silu", .is_gated = false, .output_mask = {true, false}};
  const auto results = kernel_ops::dispatch<ActivationForward>(args);
  EXPECT_EQ(results[1].numel(), 0);
  EXPECT_TRUE(same(results[0], x));
  EXPECT_NE(results[0].const_data_ptr(), x.const_data_ptr()) << "a result may not be an operand";
  EXPECT_NE(ActivationForward::reference(args)[0].const_data_ptr(), x.const_data_ptr());
}

TEST(ActivationOpErrors, OddLastDimension) {
  EXPECT_ERROR(forward("silu", true, {random({2, 5}), random({5})}), c10::ValueError,
               "glu: expected x with an even last dimension, two halves, got ", "[2, 5]",
               "write twice the features");
  EXPECT_ERROR(backward("silu", true, {random({2, 2}), random({2, 5})}), c10::ValueError,
               "glu_backward: expected x with an even last dimension");
}

TEST(ActivationOpErrors, ShapesThatDoNotFit) {
  EXPECT_ERROR(forward("silu", false, {random({2, 4}), random({3})}), c10::ValueError,
               "activation: expected bias of shape [4]", ", the last dimension of x [2, 4]",
               "got [3]", "4 features");
  EXPECT_ERROR(backward("silu", false, {random({2, 4}), random({2, 5})}), c10::ValueError,
               "activation_backward: expected grad_y", " of the shape of z", "[2, 5], got [2, 4]",
               "Expand or reshape grad_y");
  EXPECT_ERROR(backward("silu", true, {random({2, 4}), random({2, 6})}), c10::ValueError,
               "glu_backward: expected grad_y with half the last dimension of z, ",
               "[2, 6], got [2, 4]");
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_activation
