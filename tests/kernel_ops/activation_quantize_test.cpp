// An activation and its quantizer as one kernel op: the bits of both in turn.
#include "kernel_ops/unit/activation_quantize.h"

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include "kernel_ops/quantize/quantize.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_activation_quantize {
namespace {

using namespace kernel_ops;
using std::array;
using Optional = std::optional<at::Tensor>;

template <typename Fused, typename Forward>
void expect_the_bits_of_both(int64_t width_step) {
  for_every_quantizer(
      quantizers_and_delayed(), width_step, [](const Quantizer& quantizer, const at::Tensor& x) {
        const Optional given = given_for(quantizer);
        for (const auto& mask :
             {array{true, true, true, true, true}, array{false, false, true, false, true},
              array{false, true, true, true, false}, array{true, false, false, false, true}}) {
          const Optional bias =
              mask[1] ? Optional(random({x.size(-1)}, at::kFloat, 7)) : Optional();
          const auto [z, y] =
              dispatch<Forward>(x, bias, std::string_view("gelu"), array{true, true});
          const array<bool, 3> group{mask[2], mask[3], mask[4]};
          const auto codes = dispatch<Quantize>(y, given, quantizer, group);
          const auto fused =
              dispatch<Fused>(x, bias, given, std::string_view("gelu"), quantizer, mask);
          EXPECT_TRUE(same(fused[0], mask[0] ? y : y.new_empty({0})));
          EXPECT_TRUE(same(fused[1], mask[1] ? z : z.new_empty({0})));
          for (size_t part = 0; part < group_size; ++part)
            EXPECT_TRUE(same(fused[part + 2], codes[part])) << "part " << part;
          if (!mask[0]) continue;  // composite forms are slow
          const auto reference =
              Fused::reference(x, bias, given, std::string_view("gelu"), quantizer, mask);
          for (size_t i = 0; i < reference.size(); ++i)
            EXPECT_EQ(reference[i].sizes(), fused[i].sizes()) << "result " << i;
        }
      });
}

TEST(ActivationQuantizeOp, GivesTheBitsOfBothInTurn) {
  expect_the_bits_of_both<ActivationQuantize, ActivationForward>(1);
}
TEST(ActivationQuantizeOp, OfGatedUnitsToo) { expect_the_bits_of_both<GluQuantize, GluForward>(2); }

Optional given_for(const Quantizer* quantizer) {
  return quantizer == nullptr ? std::nullopt : testing::given_for(*quantizer);
}

/// What is asked of the codes of one matrix: no quantizer where nothing is.
Results<group_size> codes_alone(const at::Tensor& x, const Quantizer* quantizer,
                                array<bool, 3> mask) {
  if (quantizer != nullptr) return dispatch<Quantize>(x, given_for(quantizer), *quantizer, mask);
  return quantize_reference(x, std::nullopt, nullptr, mask);
}

template <typename Fused, typename Backward>
void expect_the_bits_of_backward(int64_t width_step) {
  const std::vector<const Quantizer*> all = quantizers_and_delayed();
  size_t q = 0;
  for_every_quantizer(all, width_step, [&](const Quantizer& of_gradient, const at::Tensor& z) {
    const Quantizer *const one = &of_gradient, *const other = all[q++ % all.size()];
    std::vector<int64_t> sizes = z.sizes().vec();
    sizes.back() /= width_step;
    const at::Tensor grad_y = random(sizes, z.scalar_type(), 3);
    const auto made =
        dispatch<Backward>(grad_y, z, std::string_view("gelu"), array{true, true, true});
    for (const auto& mask : {array{true, true, true, true, true, true, true, true, true},
                             array{false, false, false, true, false, true, false, false, false},
                             array{false, false, true, true, false, true, false, true, false},
                             array{false, true, true, true, true, false, false, false, false},
                             array{true, false, true, false, false, true, true, true, false},
                             array{true, false, true, false, false, false, false, true, false},
                             array{false, false, false, false, false, false, true, true, true},
                             array{false, true, false, false, false, false, false, false, true}}) {
      const Quantizer *const of_grad = mask[3] || mask[4] || mask[5] ? one : nullptr,
                             *const of_y = mask[6] || mask[7] || mask[8] ? other : nullptr;
      const auto codes = codes_alone(made[0], of_grad, {mask[3], mask[4], mask[5]}),
                 codes_of_y = codes_alone(made[2], of_y, {mask[6], mask[7], mask[8]});
      const auto run = [&](const auto& function) {
        return function(grad_y, z, given_for(of_grad), given_for(of_y), std::string_view("gelu"),
                        of_grad, of_y, mask);
      };
      const auto fused = run([](const auto&... args) { return dispatch<Fused>(args...); });
      EXPECT_TRUE(same(fused[0], mask[0] ? made[0] : made[0].new_empty({0})));
      EXPECT_TRUE(same(fused[1], mask[1] ? made[2] : made[2].new_empty({0})));
      EXPECT_TRUE(same(fused[2], mask[2] ? made[1] : made[1].new_empty({0})));
      for (size_t part = 0; part < group_size; ++part) {
        EXPECT_TRUE(same(fused[3 + part], codes[part])) << one->text << " part " << part;
        EXPECT_TRUE(same(fused[3 + group_size + part], codes_of_y[part]))
            << other->text << " of y, part " << part;
      }
      if (!mask[0] || !mask[1]) continue;  // composite forms are slow
      const auto reference = run([](const auto&... args) { return Fused::reference(args...); });
      for (size_t i = 0; i < reference.size(); ++i)
        EXPECT_EQ(reference[i].sizes(), fused[i].sizes()) << one->text << " result " << i;
    }
  });
}

TEST(ActivationQuantizeOp, OfGradients) {
  expect_the_bits_of_backward<ActivationBackwardQuantize, ActivationBackward>(1);
}
TEST(ActivationQuantizeOp, OfGradientsOfGatedUnits) {
  expect_the_bits_of_backward<GluBackwardQuantize, GluBackward>(2);
}

TEST(ActivationQuantizeOp, SumsOfManyBlocksOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  const std::vector<const Quantizer*> all = quantizers_and_delayed();
  for (size_t q = 0; q < all.size(); q += kSanitized ? 5 : 1)
    for (const Quantizer* const of_y : {all[q], all[(q + 3) % all.size()]})
      for (const int64_t rows : {of_y == all[q] ? 600 : q % 4 == 0 ? 4500 : 1100}) {
        const at::Tensor grad_y = random({rows, 40}, at::kBFloat16, 2);
        at::Tensor z = random({rows, 80}, at::kFloat);
        z[rows - 2][3] = NAN;
        z[rows / 2][60] = INFINITY;
        const auto made =
            dispatch<GluBackward>(grad_y, z, std::string_view("silu"), array{true, true, true});
        const auto codes = codes_alone(made[0], all[q], {true, true, true}),
                   codes_of_y = codes_alone(made[2], of_y, {true, true, true});
        for (const int count : {1, 2, 3}) {
          at::set_num_threads(count);
          const auto fused = dispatch<GluBackwardQuantize>(
              grad_y, z, given_for(all[q]), given_for(of_y), std::string_view("silu"), all[q], of_y,
              array{false, false, true, true, true, true, true, true, true});
          EXPECT_TRUE(same(fused[2], made[1])) << all[q]->text << " " << rows;
          for (size_t part = 0; part < group_size; ++part) {
            EXPECT_TRUE(same(fused[3 + part], codes[part])) << all[q]->text << " part " << part;
            EXPECT_TRUE(same(fused[3 + group_size + part], codes_of_y[part]))
                << of_y->text << " of y beside " << all[q]->text << ", part " << part;
          }
        }
        at::set_num_threads(threads);
      }
}

TEST(ActivationQuantizeOp, OfManyBlocksWithNanAndInfinity) {
  for (const Quantizer* quantizer : quantizers_and_delayed()) {
    const Optional given = given_for(quantizer);
    for (const auto dtype : kKernelDtypes) {
      at::Tensor z = random({600, 256}, dtype);
      z[17][3] = NAN;
      z[599][200] = INFINITY;
      const at::Tensor y =
          dispatch<GluForward>(z, Optional(), std::string_view("silu"), array{false, true})[1];
      for (const bool both : {false, true}) {
        const auto codes = dispatch<Quantize>(y, given, *quantizer, array{true, both, true});
        const auto fused = dispatch<GluQuantize>(z, Optional(), given, std::string_view("silu"),
                                                 *quantizer, array{false, false, true, both, true});
        for (size_t part = 0; part < group_size; ++part)
          EXPECT_TRUE(same(fused[part + 2], codes[part])) << quantizer->text << dtype << part;
      }
    }
  }
}

TEST(ActivationQuantizeOpErrors, AScaleThatTheQuantizerDoesNotTake) {
  EXPECT_THAT(
      [] {
        dispatch<GluQuantize>(random({4, 6}), Optional(), Optional(at::scalar_tensor(1.0f)),
                              std::string_view("silu"), *quantizers()[0],
                              array{true, false, true, false, false});
      },
      ThrowsText<c10::ValueError>("activation_quantize: expected no scale and no seed for ",
                                  "got one"));
}

TEST(ActivationQuantizeOpErrors, CodesWithoutAQuantizer) {
  const Quantizer* const none = nullptr;
  for (const bool is_given : {false, true})
    EXPECT_THAT(
        [&] {
          dispatch<GluBackwardQuantize>(
              random({4, 3}), random({4, 6}), Optional(),
              is_given ? Optional(at::scalar_tensor(1.0f)) : Optional(), std::string_view("silu"),
              none, none, array{true, false, false, false, false, false, !is_given, false, false});
        },
        ThrowsText<c10::ValueError>("activation_backward_quantize: expected a quantizer for what ",
                                    "got none. Name one"));
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_activation_quantize
