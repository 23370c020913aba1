// A norm, alone or behind a sum, and its gradient, with the quantizers behind them in one kernel
// op: the bits of all in turn.
#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/norm/norm.h"
#include "support/codes.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_norm_quantize {
namespace {

using namespace kernel_ops;
using std::array;
using Optional = std::optional<at::Tensor>;

constexpr double kEps = 1e-5;

/// Whether its composite forms, which are slow, are asked for their sizes.
bool is_small(const at::Tensor& x) { return x.numel() <= 8192; }

class NormQuantizeOp : public ::testing::TestWithParam<bool> {
 protected:
  static bool is_layer_norm() { return GetParam(); }
  static Optional bias_like(const at::Tensor& weight) {
    if (!is_layer_norm()) return std::nullopt;
    return random(weight.sizes(), weight.scalar_type(), 9);
  }

  void expect_forward(const at::Tensor& x, const Optional& extra, const Quantizer& quantizer) {
    const at::Tensor weight = random({x.size(-1)}, x.scalar_type(), 8);
    NormForward::Args args{.x = x,
                           .extra = extra,
                           .weight = weight,
                           .bias = bias_like(weight),
                           .eps = kEps,
                           .zero_centered_gamma = true,
                           .rounds_before_weight = !is_layer_norm(),
                           .output_mask = {extra.has_value(), true}};
    const auto made = dispatch<NormForward>(args);
    for (const auto& [sum, y, codes] : {std::tuple{true, true, GroupMask{true, true, true}},
                                        {false, false, GroupMask{true, true, false}},
                                        {true, false, GroupMask{true, false, true}},
                                        {false, true, GroupMask{false, false, true}}}) {
      args.output_mask = {extra && sum, y};
      args.codes = requested(&quantizer, codes);
      const auto fused = dispatch<NormForward>(args);
      expect_made(fused, made, {extra && sum, y, is_layer_norm(), true});
      expect_codes<NormForward>(fused, 0, made[NormForward::y], args.codes);
      if (y && is_small(x)) expect_sizes(run_reference<NormForward>(args), fused);
    }
  }

  void expect_backward(const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight,
                       const Optional& residual, const Quantizer& one, const Quantizer& other,
                       at::ScalarType of_sums = at::kFloat) {
    const Optional bias = bias_like(weight);
    const auto forward = dispatch<NormForward>(
        {.x = x, .weight = weight, .bias = bias, .eps = kEps, .zero_centered_gamma = true});
    const bool with_bias = is_layer_norm();
    NormBackward::Args args{.grad_y = grad_y,
                            .x = x,
                            .weight = weight,
                            .bias = bias,
                            .mean = with_bias ? Optional(forward[NormForward::mean]) : Optional(),
                            .inv_norm = forward[NormForward::inv_norm],
                            .grad_residual = residual,
                            .zero_centered_gamma = true,
                            .rounds_before_weight = !is_layer_norm(),
                            .sums_dtype = of_sums,
                            .output_mask = {true, true, true, false, with_bias}};
    auto made = dispatch<NormBackward>(args);
    made[NormBackward::sums] =
        dispatch<SumRows>({.x = made[NormBackward::grad_x], .dtype = of_sums})[0];
    struct Wanted {
      array<bool, 5> results;
      GroupMask of_grad, of_y;
    };
    for (const Wanted& wanted :
         {Wanted{{true, true, true, true, with_bias}, {true, true, true}, {true, true, true}},
          Wanted{{false, false, false, false, false}, {true, true, false}, {}},
          Wanted{{false, true, false, false, with_bias}, {true, false, true}, {false, true, false}},
          Wanted{{false, false, false, true, false}, {true, true, true}, {true, true, true}},
          Wanted{{false, false, true, true, with_bias}, {false, true, false}, {}},
          Wanted{{true, true, false, false, false}, {false, true, false}, {false, false, true}},
          Wanted{{true, true, false, false, with_bias}, {}, {false, true, false}},
          Wanted{{false, true, true, true, false}, {}, {true, true, true}},
          Wanted{{true, true, true, true, with_bias}, {}, {}}}) {
      args.output_mask = wanted.results;
      args.codes = requested(&one, wanted.of_grad);
      args.y_codes = requested(&other, wanted.of_y);
      const auto fused = dispatch<NormBackward>(args);
      expect_made(fused, made, wanted.results);
      expect_codes<NormBackward>(fused, 0, made[NormBackward::grad_x], args.codes);
      expect_codes<NormBackward>(fused, 1, made[NormBackward::y], args.y_codes);
      if (wanted.results[0] && wanted.results[2] && is_small(x))
        expect_sizes(run_reference<NormBackward>(args), fused);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Norms, NormQuantizeOp, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "layer_norm" : "rms_norm"; });

TEST_P(NormQuantizeOp, AloneOrOfASumGivesTheBitsOfAllInTurn) {
  for_every_quantizer(quantizers_and_delayed(), 1,
                      [&](const Quantizer& quantizer, const at::Tensor& x) {
                        expect_forward(x, std::nullopt, quantizer);
                        expect_forward(x, random(x.sizes(), x.scalar_type(), 5), quantizer);
                      });
}

TEST_P(NormQuantizeOp, OfManyBands) {
  size_t next = is_layer_norm() ? 1 : 0;  // each quantizer meets two dtypes
  for (const Quantizer* quantizer : quantizers_and_delayed()) {
    const at::ScalarType dtype = kKernelDtypes[next++ % kKernelDtypes.size()];
    SCOPED_TRACE(::testing::Message() << quantizer->text << ' ' << dtype);
    const bool is_half = dtype == at::kHalf;
    at::Tensor x = random({is_half ? 600 : 300, is_half ? 131 : 1100}, dtype);
    expect_forward(x, std::nullopt, *quantizer);
    x[17][3] = NAN;
    expect_forward(x, random(x.sizes(), at::kFloat, 5), *quantizer);
  }
}

TEST_P(NormQuantizeOp, InCompositeForm) {
  const at::Tensor x = random({4, 8}, at::kDouble), weight = random({8}, at::kDouble, 2);
  NormForward::Args args{.x = x,
                         .weight = weight,
                         .bias = is_layer_norm() ? Optional(weight) : Optional(),
                         .eps = kEps,
                         .zero_centered_gamma = false};
  const at::Tensor y = dispatch<NormForward>(args)[NormForward::y];
  args.codes = requested(&tandem::quantizer("fp8_e4m3"), {true, false, true});
  for (const bool with_y : {false, true}) {
    args.output_mask[NormForward::y] = with_y;
    const auto fused = dispatch<NormForward>(args);
    EXPECT_TRUE(same(fused[NormForward::y], with_y ? y : y.new_empty({0})));
    EXPECT_EQ(group_of<NormForward>(fused)[row_codes].sizes(), x.sizes());
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
  const Optional given = at::scalar_tensor(1.0f);
  const auto run = [&](const RequestedCodes& codes, const RequestedCodes& y_codes) {
    dispatch<NormBackward>({.grad_y = x,
                            .x = x,
                            .weight = weight,
                            .inv_norm = rows,
                            .zero_centered_gamma = false,
                            .output_mask = {true},
                            .codes = codes,
                            .y_codes = y_codes});
  };
  const GroupMask only_rows{true, false, false};
  EXPECT_ERROR(run({quantizers()[0], given, only_rows}, {}), c10::ValueError,
               "norm_backward: expected no scale and no seed for ", "got one");
  EXPECT_ERROR(run({quantizers()[0], {}, only_rows}, {nullptr, {}, only_rows}), c10::ValueError,
               "norm_backward: expected a quantizer for what is given ", "got none");
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_norm_quantize
