// An activation and its quantizer as one kernel op: the bits of both in turn.
#include "kernel_ops/activation_quantize.h"

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include "kernel_ops/quantize.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

using namespace kernel_ops;
using std::array;
using Optional = std::optional<at::Tensor>;

std::vector<const Quantizer*> with_delayed() {
  std::vector<const Quantizer*> all = quantizers();
  for (const char* text : {"fp8_e4m3:delayed", "fp8_e5m2:delayed"}) all.push_back(&quantizer(text));
  return all;
}

template <typename Fused, typename Forward>
void expect_the_bits_of_both(int64_t width_step) {
  for (const Quantizer* quantizer : with_delayed()) {
    const Optional given =
        quantizer->scaling->takes_scale ? Optional(at::scalar_tensor(3.0f)) : given_for(*quantizer);
    for_every_case(width_step, [&](const at::Tensor& x) {
      for (const auto& mask :
           {array{true, true, true, true, true}, array{false, false, true, false, true},
            array{false, true, true, true, false}, array{true, false, false, false, true}}) {
        const Optional bias = mask[1] ? Optional(random({x.size(-1)}, at::kFloat, 7)) : Optional();
        const auto [z, y] = dispatch<Forward>(x, bias, std::string_view("gelu"), array{true, true});
        const array<bool, 3> group{mask[2], mask[3], mask[4]};
        const auto codes = dispatch<Quantize>(y, given, *quantizer, group);
        const auto fused =
            dispatch<Fused>(x, bias, given, std::string_view("gelu"), *quantizer, mask);
        EXPECT_TRUE(same(fused[0], mask[0] ? y : y.new_empty({0})));
        EXPECT_TRUE(same(fused[1], mask[1] ? z : z.new_empty({0})));
        for (size_t part = 0; part < group_size; ++part)
          EXPECT_TRUE(same(fused[part + 2], codes[part])) << quantizer->text << " part " << part;
        if (!mask[0]) continue;  // composite forms are slow
        const auto reference =
            Fused::reference(x, bias, given, std::string_view("gelu"), *quantizer, mask);
        for (size_t i = 0; i < reference.size(); ++i)
          EXPECT_EQ(reference[i].sizes(), fused[i].sizes()) << quantizer->text << " result " << i;
      }
    });
  }
}

TEST(ActivationQuantizeOp, GivesTheBitsOfBothInTurn) {
  expect_the_bits_of_both<ActivationQuantize, ActivationForward>(1);
}
TEST(ActivationQuantizeOp, OfGatedUnitsToo) { expect_the_bits_of_both<GluQuantize, GluForward>(2); }

template <typename Fused, typename Backward>
void expect_the_bits_of_backward(int64_t width_step) {
  for (const Quantizer* quantizer : with_delayed()) {
    const Optional given =
        quantizer->scaling->takes_scale ? Optional(at::scalar_tensor(3.0f)) : given_for(*quantizer);
    for_every_case(width_step, [&](const at::Tensor& z) {
      std::vector<int64_t> sizes = z.sizes().vec();
      sizes.back() /= width_step;
      const at::Tensor grad_y = random(sizes, z.scalar_type(), 3);
      const auto made =
          dispatch<Backward>(grad_y, z, std::string_view("gelu"), array{true, true, true});
      for (const auto& mask : {array{true, true, true, true, true, true},
                               array{false, false, false, true, false, true},
                               array{false, false, true, true, false, true},
                               array{false, true, true, true, true, false},
                               array{true, false, true, false, false, true}}) {
        const auto codes =
            dispatch<Quantize>(made[0], given, *quantizer, array{mask[3], mask[4], mask[5]});
        const auto fused =
            dispatch<Fused>(grad_y, z, given, std::string_view("gelu"), *quantizer, mask);
        EXPECT_TRUE(same(fused[0], mask[0] ? made[0] : made[0].new_empty({0})));
        EXPECT_TRUE(same(fused[1], mask[1] ? made[2] : made[2].new_empty({0})));
        EXPECT_TRUE(same(fused[2], mask[2] ? made[1] : made[1].new_empty({0})));
        for (size_t part = 0; part < group_size; ++part)
          EXPECT_TRUE(same(fused[part + 3], codes[part])) << quantizer->text << " part " << part;
        if (!mask[0]) continue;  // composite forms are slow
        const auto reference =
            Fused::reference(grad_y, z, given, std::string_view("gelu"), *quantizer, mask);
        for (size_t i = 0; i < reference.size(); ++i)
          EXPECT_EQ(reference[i].sizes(), fused[i].sizes()) << quantizer->text << " result " << i;
      }
    });
  }
}

TEST(ActivationQuantizeOp, OfGradients) {
  expect_the_bits_of_backward<ActivationBackwardQuantize, ActivationBackward>(1);
}
TEST(ActivationQuantizeOp, OfGradientsOfGatedUnits) {
  expect_the_bits_of_backward<GluBackwardQuantize, GluBackward>(2);
}

TEST(ActivationQuantizeOp, SumsOfManyBlocksOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const Quantizer* quantizer : with_delayed()) {
    const Optional given =
        quantizer->scaling->takes_scale ? Optional(at::scalar_tensor(3.0f)) : given_for(*quantizer);
    for (const int64_t rows : {600, 1100, 4500}) {
      const at::Tensor grad_y = random({rows, 40}, at::kBFloat16, 2),
                       z = random({rows, 80}, at::kFloat);
      const auto made =
          dispatch<GluBackward>(grad_y, z, std::string_view("silu"), array{true, true, false});
      const auto codes = dispatch<Quantize>(made[0], given, *quantizer, array{true, true, true});
      for (const int count : {1, 2, 3}) {
        at::set_num_threads(count);
        const auto fused =
            dispatch<GluBackwardQuantize>(grad_y, z, given, std::string_view("silu"), *quantizer,
                                          array{false, false, true, true, true, true});
        EXPECT_TRUE(same(fused[2], made[1])) << quantizer->text << " " << rows;
        for (size_t part = 0; part < group_size; ++part)
          EXPECT_TRUE(same(fused[part + 3], codes[part])) << quantizer->text << " part " << part;
      }
      at::set_num_threads(threads);
    }
  }
}

TEST(ActivationQuantizeOp, OfManyBlocksWithNanAndInfinity) {
  for (const Quantizer* quantizer : with_delayed()) {
    const Optional given =
        quantizer->scaling->takes_scale ? Optional(at::scalar_tensor(0.5f)) : given_for(*quantizer);
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

}  // namespace
}  // namespace tandem::testing
