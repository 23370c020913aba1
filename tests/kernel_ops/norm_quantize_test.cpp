// A sum before a norm, and the gradient of a norm, with the quantizer behind them as one kernel op:
// the bits of all in turn.
#include "kernel_ops/norm/norm_quantize.h"

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/norm/norm.h"
#include "kernel_ops/quantize/quantize.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_norm_quantize {
namespace {

using namespace kernel_ops;
using std::array;
using Optional = std::optional<at::Tensor>;

constexpr double kEps = 1e-5;

Results<group_size> codes_alone(const at::Tensor& x, const Quantizer* quantizer,
                                array<bool, 3> mask) {
  if (quantizer == nullptr) return quantize_reference(x, std::nullopt, nullptr, mask);
  return dispatch<Quantize>(x, given_for(*quantizer), *quantizer, mask);
}

/// Whether its composite forms, which are slow, are asked for their sizes.
bool is_small(const at::Tensor& x) { return x.numel() <= 8192; }

/// Results are `expected`, of which those that are masked out are empty, then codes.
template <size_t N, size_t M, typename... Codes>
void expect_results(const Results<N>& got, const Results<M>& expected, const array<bool, M>& wanted,
                    const Codes&... codes) {
  static_assert(N == M + sizeof...(Codes) * group_size);
  for (size_t i = 0; i < M; ++i)
    EXPECT_TRUE(same(got[i], wanted[i] ? expected[i] : expected[i].new_empty({0}))) << i;
  size_t i = M;
  for (const Results<group_size>* group : {&codes...})
    for (const at::Tensor& part : *group) {
      EXPECT_TRUE(same(got[i], part)) << "result " << i;
      ++i;
    }
}
template <size_t N>
void expect_sizes(const Results<N>& got, const Results<N>& expected) {
  for (size_t i = 0; i < N; ++i) EXPECT_EQ(got[i].sizes(), expected[i].sizes()) << i;
}

class NormQuantizeOp : public ::testing::TestWithParam<bool> {
 protected:
  static bool is_layer_norm() { return GetParam(); }

  void expect_forward(const at::Tensor& x, const at::Tensor& extra, const Quantizer& quantizer) {
    const at::Tensor weight = random({x.size(-1)}, x.scalar_type(), 8);
    const Optional bias =
        is_layer_norm() ? Optional(random({x.size(-1)}, x.scalar_type(), 9)) : Optional();
    const Optional given = given_for(quantizer);
    const auto made = dispatch<AddNormForward>(x, extra, weight, bias, kEps, true, array{true});
    for (const auto& mask :
         {array{true, true, true, true, true}, array{false, false, true, true, false},
          array{true, false, true, false, true}, array{false, true, false, false, true}}) {
      const auto codes =
          dispatch<Quantize>(made[1], given, quantizer, array{mask[2], mask[3], mask[4]});
      const auto run = [&](const auto& function) {
        return function(x, extra, weight, bias, given, kEps, true, quantizer, mask);
      };
      const auto fused =
          run([](const auto&... args) { return dispatch<AddNormQuantize>(args...); });
      expect_results(fused, made, array{mask[0], mask[1], is_layer_norm(), true}, codes);
      if (mask[0] && mask[1] && is_small(x))
        expect_sizes(run([](const auto&... args) { return AddNormQuantize::reference(args...); }),
                     fused);
    }
  }

  void expect_backward(const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight,
                       const Optional& residual, const Quantizer& one, const Quantizer& other,
                       at::ScalarType of_sums = at::kFloat) {
    const at::Tensor beta = random(weight.sizes(), weight.scalar_type(), 9);
    const Optional bias = is_layer_norm() ? Optional(beta) : Optional();
    Optional mean;
    Results<5> made;
    at::Tensor inv_norm;
    if (is_layer_norm()) {
      const auto forward = dispatch<LayerNormForward>(x, weight, beta, kEps, true);
      mean = forward[1];
      inv_norm = forward[2];
      const auto [grad_x, grad_weight, grad_bias, y] =
          dispatch<LayerNormBackward>(grad_y, x, weight, bias, forward[1], inv_norm, residual, true,
                                      array{true, true, true, true});
      made = {grad_x, grad_weight, y, {}, grad_bias};
    } else {
      inv_norm = dispatch<RmsNormForward>(x, weight, kEps, true)[1];
      const auto [grad_x, grad_weight, y] = dispatch<RmsNormBackward>(
          grad_y, x, weight, inv_norm, residual, true, array{true, true, true});
      made = {grad_x, grad_weight, y, {}, weight};
    }
    made[3] = dispatch<SumRows>(made[0], of_sums)[0];
    const bool with_bias = is_layer_norm();
    for (const auto& mask :
         {array{true, true, true, true, with_bias, true, true, true, true, true, true},
          array{false, false, false, false, false, true, true, false, false, false, false},
          array{false, true, false, false, with_bias, true, false, true, false, true, false},
          array{false, false, false, true, false, true, true, true, true, true, true},
          array{false, false, true, true, with_bias, false, true, false, false, false, false},
          array{true, true, false, false, false, false, false, true, false, false, true},
          array{true, true, false, false, with_bias, false, false, false, false, true, false},
          array{false, true, true, true, false, false, false, false, true, true, true}}) {
      const Quantizer *const of_grad = mask[5] || mask[6] || mask[7] ? &one : nullptr,
                             *const of_y = mask[8] || mask[9] || mask[10] ? &other : nullptr;
      const Optional given = of_grad == nullptr ? Optional() : given_for(*of_grad),
                     y_given = of_y == nullptr ? Optional() : given_for(*of_y);
      const auto run = [&](const auto& function) {
        return function(grad_y, x, weight, bias, mean, inv_norm, residual, given, y_given, true,
                        of_sums, of_grad, of_y, mask);
      };
      const auto fused =
          run([](const auto&... args) { return dispatch<NormBackwardQuantize>(args...); });
      expect_results(fused, made, array{mask[0], mask[1], mask[2], mask[3], mask[4]},
                     codes_alone(made[0], of_grad, {mask[5], mask[6], mask[7]}),
                     codes_alone(made[2], of_y, {mask[8], mask[9], mask[10]}));
      if (mask[0] && mask[2] && is_small(x))
        expect_sizes(
            run([](const auto&... args) { return NormBackwardQuantize::reference(args...); }),
            fused);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Norms, NormQuantizeOp, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "layer_norm" : "rms_norm"; });

TEST_P(NormQuantizeOp, OfASumGivesTheBitsOfAllInTurn) {
  for_every_quantizer(quantizers_and_delayed(), 1,
                      [&](const Quantizer& quantizer, const at::Tensor& x) {
                        expect_forward(x, random(x.sizes(), x.scalar_type(), 5), quantizer);
                      });
}

TEST_P(NormQuantizeOp, OfASumOfTwoDtypesAndManyRows) {
  for (const Quantizer* quantizer : quantizers_and_delayed()) {
    SCOPED_TRACE(quantizer->text);
    at::Tensor x = random({600, 256}, at::kBFloat16);
    x[17][3] = NAN;
    expect_forward(x, random({600, 256}, at::kFloat, 5), *quantizer);
  }
}

TEST_P(NormQuantizeOp, OfGradientsGivesTheBitsOfAllInTurn) {
  const std::vector<const Quantizer*> all = quantizers_and_delayed();
  size_t q = 0;
  for_every_quantizer(all, 1, [&](const Quantizer& quantizer, const at::Tensor& x) {
    const at::Tensor weight = random({x.size(-1)}, x.scalar_type(), 8),
                     grad_y = random(x.sizes(), x.scalar_type(), 4);
    const bool is_alike = x.size(-1) == 16;
    const Quantizer& other = is_alike ? quantizer : *all[q++ % all.size()];
    expect_backward(grad_y, x, weight,
                    is_alike ? Optional() : random(x.sizes(), x.scalar_type(), 5), quantizer,
                    other);
  });
}

TEST_P(NormQuantizeOp, OfGradientsOfManyBlocksOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  const std::vector<const Quantizer*> all = quantizers_and_delayed();
  for (size_t q = 0; q < all.size(); q += kSanitized ? 5 : 1) {
    SCOPED_TRACE(all[q]->text);
    for (const int64_t rows : {q % 4 == 0 ? 4500 : q % 2 == 0 ? 1100 : 600}) {
      // Elements that differ, as under autocast.
      const at::Tensor grad_y = random({rows, 40}, at::kFloat, 2),
                       weight = random({40}, at::kFloat);
      at::Tensor x = random({rows, 40}, at::kBFloat16);
      x[rows - 3][7] = INFINITY;
      for (const int count : {1, 2, 3}) {
        at::set_num_threads(count);
        expect_backward(grad_y, x, weight, random({rows, 40}, at::kBFloat16, 6), *all[q],
                        *all[(q + static_cast<size_t>(count) - 1) % all.size()], at::kBFloat16);
      }
      at::set_num_threads(threads);
    }
  }
}

TEST_P(NormQuantizeOp, OfGradientsOverTwoDimensions) {
  for (const Quantizer* quantizer : quantizers_and_delayed()) {
    SCOPED_TRACE(quantizer->text);
    const at::Tensor x = random({50, 2, 24}), weight = random({2, 24}, at::kFloat, 3);
    expect_backward(random({50, 2, 24}, at::kFloat, 4), x, weight, Optional(), *quantizer,
                    *quantizer);
  }
}

TEST(NormQuantizeOpErrors, AScaleThatTheQuantizerDoesNotTake) {
  const at::Tensor x = random({4, 6}), weight = random({6}), rows = random({4});
  const Optional given = at::scalar_tensor(1.0f), none;
  const Quantizer* const nobody = nullptr;
  EXPECT_THAT(
      [&] {
        dispatch<AddNormQuantize>(x, x, weight, none, given, kEps, false, *quantizers()[0],
                                  array{true, false, true, false, false});
      },
      ThrowsText<c10::ValueError>("add_norm_quantize: expected no scale and no seed for ",
                                  "got one"));
  EXPECT_THAT(
      [&] {
        dispatch<NormBackwardQuantize>(
            x, x, weight, none, none, rows, none, given, none, false, at::kFloat, quantizers()[0],
            nobody,
            array{true, false, false, false, false, true, false, false, false, false, false});
      },
      ThrowsText<c10::ValueError>("norm_backward_quantize: expected no scale and no seed for ",
                                  "got one"));
  EXPECT_THAT(
      [&] {
        dispatch<NormBackwardQuantize>(
            x, x, weight, none, none, rows, none, none, none, false, at::kFloat, quantizers()[0],
            nobody,
            array{true, false, false, false, false, true, false, false, false, true, false});
      },
      ThrowsText<c10::ValueError>("norm_backward_quantize: expected a quantizer for what is given ",
                                  "got none"));
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_norm_quantize
