// Activations and gated units as kernel ops: on every instruction set the CPU kernel is the
// composite reference, within one rounding. Every row of tandem/activations.h is tested here;
// tests/kernels measures the formulas that it knows in float64 more closely.
#include "kernel_ops/activation.h"

#include <ATen/ops/silu.h>

#include "kernels/activation.h"
#include "support/kernel_ops.h"
#include "support/targets.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

using kernel_ops::ActivationBackward;
using kernel_ops::ActivationForward;
using kernel_ops::GluBackward;
using kernel_ops::GluForward;
using std::array;
using Bias = std::optional<at::Tensor>;

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
  for_every_case(1, [&](const at::Tensor& x) {
    const at::Tensor bias = random({x.size(-1)}, x.scalar_type(), 9);
    EXPECT_TRUE(matches_reference<ActivationForward>(x, Bias(), function(), array{false, true}));
    EXPECT_TRUE(matches_reference<ActivationForward>(x, Bias(bias), function(), array{true, true}));
  });
}

TEST_P(ActivationOp, BackwardMatchesReference) {
  for_every_case(1, [&](const at::Tensor& z) {
    const at::Tensor grad_y = random(z.sizes(), z.scalar_type(), 4);
    EXPECT_TRUE(matches_reference_at<ActivationBackward>(1, grad_y, z, function(),
                                                         array{true, true, true}));
    EXPECT_TRUE(matches_reference_at<ActivationBackward>(1, grad_y, z, function(),
                                                         array{false, true, false}));
    if (z.numel() == 0) return;
    EXPECT_TRUE(matches_reference<ActivationBackward>(grad_y.narrow(0, 0, 1).expand_as(z), z,
                                                      function(), array{true, false, false}));
  });
}

TEST_P(ActivationOp, GluForwardMatchesReference) {
  for_every_case(2, [&](const at::Tensor& x) {
    const at::Tensor bias = random({x.size(-1)}, x.scalar_type(), 9);
    EXPECT_TRUE(matches_reference<GluForward>(x, Bias(), function(), array{false, true}));
    EXPECT_TRUE(matches_reference<GluForward>(x, Bias(bias), function(), array{true, true}));
  });
}

TEST_P(ActivationOp, GluBackwardMatchesReference) {
  for_every_case(2, [&](const at::Tensor& z) {
    const at::Tensor grad_y = random(z.narrow(-1, 0, z.size(-1) / 2).sizes(), z.scalar_type(), 4);
    EXPECT_TRUE(matches_reference<GluBackward>(grad_y, z, function(), array{true, true, true}));
    EXPECT_TRUE(matches_reference<GluBackward>(grad_y, z, function(), array{false, true, false}));
  });
}

TEST_P(ActivationOp, MixedDtypesPromote) {
  const at::Tensor x = random({5, 8}, at::kBFloat16), bias = random({8}, at::kFloat);
  const auto results =
      kernel_ops::dispatch<ActivationForward>(x, Bias(bias), function(), array{true, true});
  EXPECT_EQ(results[1].scalar_type(), at::kFloat);
  EXPECT_TRUE(matches_reference<ActivationForward>(x, Bias(bias), function(), array{true, true}));
  EXPECT_TRUE(matches_reference<GluForward>(x, Bias(bias), function(), array{true, true}));
}

TEST_P(ActivationOp, Float64RunsTheReference) {
  const at::Tensor x = random({3, 8}, at::kDouble);
  EXPECT_TRUE(same(kernel_ops::dispatch<GluForward>(x, Bias(), function(), array{false, true})[1],
                   GluForward::reference(x, Bias(), function(), array{false, true})[1]));
}

TEST_P(ActivationOp, GradientOfTheOpByItself) {
  const auto inputs = Tensors{leaf({3, 6}, at::kDouble), leaf({6}, at::kDouble, 2)};
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        const auto r = kernel_ops::dispatch<ActivationForward>(t[0], Bias(t[1]), function(),
                                                               array{true, true});
        return Tensors(r.begin(), r.end());
      },
      inputs));
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        const auto r =
            kernel_ops::dispatch<GluForward>(t[0], Bias(t[1]), function(), array{true, true});
        return Tensors(r.begin(), r.end());
      },
      inputs));
}

TEST_P(ActivationOp, GradientOfTheBackwardByItself) {
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        const auto r = kernel_ops::dispatch<ActivationBackward>(t[0], t[1], function(),
                                                                array{true, true, true});
        return Tensors(r.begin(), r.end());
      },
      {leaf({3, 6}, at::kDouble), leaf({3, 6}, at::kDouble, 2)}));
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& t) {
        const auto r =
            kernel_ops::dispatch<GluBackward>(t[0], t[1], function(), array{true, true, true});
        return Tensors(r.begin(), r.end());
      },
      {leaf({3, 3}, at::kDouble), leaf({3, 6}, at::kDouble, 2)}));
}

TEST(ActivationOps, MaskedOutResultsAreEmptyAndFresh) {
  const at::Tensor x = random({2, 4});
  const auto results =
      kernel_ops::dispatch<ActivationForward>(x, Bias(), "silu", array{true, false});
  EXPECT_EQ(results[1].numel(), 0);
  EXPECT_TRUE(same(results[0], x));
  EXPECT_NE(results[0].const_data_ptr(), x.const_data_ptr()) << "a result may not be an operand";
  EXPECT_NE(ActivationForward::reference(x, Bias(), "silu", array{true, false})[0].const_data_ptr(),
            x.const_data_ptr());
}

TEST(ActivationOps, SiluIsTorchs) {
  const at::Tensor x = random({5, 9});
  EXPECT_TRUE(
      near(kernel_ops::dispatch<ActivationForward>(x, Bias(), "silu", array{false, true})[1],
           at::silu(x)));
}

TEST(ActivationOpErrors, UnknownFunction) {
  EXPECT_THAT(
      [] {
        kernel_ops::dispatch<ActivationForward>(random({2, 4}), Bias(), "tanh", array{true, true});
      },
      ThrowsText<c10::ValueError>("activation: expected one of gelu, silu, relu", "got \"tanh\"",
                                  "Use one of these"));
}

TEST(ActivationOpErrors, OddLastDimension) {
  EXPECT_THAT(
      [] {
        kernel_ops::dispatch<GluForward>(random({2, 5}), Bias(), "silu", array{true, true});
      },
      ThrowsText<c10::ValueError>("glu: expected x with an even last dimension, two halves, got ",
                                  "[2, 5]", "write twice the features"));
  EXPECT_THAT(
      [] {
        kernel_ops::dispatch<GluBackward>(random({2, 2}), random({2, 5}), "silu",
                                          array{true, true, true});
      },
      ThrowsText<c10::ValueError>("glu_backward: expected x with an even last dimension"));
}

TEST(ActivationOpErrors, ShapesThatDoNotFit) {
  EXPECT_THAT(
      [] {
        kernel_ops::dispatch<ActivationForward>(random({2, 4}), Bias(random({3})), "silu",
                                                array{true, true});
      },
      ThrowsText<c10::ValueError>("activation: expected bias of shape [4]",
                                  ", the last dimension of x [2, 4]", "got [3]", "4 features"));
  EXPECT_THAT(
      [] {
        kernel_ops::dispatch<ActivationBackward>(random({2, 4}), random({2, 5}), "silu",
                                                 array{true, true, true});
      },
      ThrowsText<c10::ValueError>("activation_backward: expected grad_y", " of the shape of z",
                                  "[2, 5], got [2, 4]", "Expand or reshape grad_y"));
  EXPECT_THAT(
      [] {
        kernel_ops::dispatch<GluBackward>(random({2, 4}), random({2, 6}), "silu",
                                          array{true, true, true});
      },
      ThrowsText<c10::ValueError>(
          "glu_backward: expected grad_y with half the last dimension of z, ",
          "[2, 6], got [2, 4]"));
}

}  // namespace
}  // namespace tandem::testing
