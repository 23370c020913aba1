// FP8 as kernel ops: the composite reference has the bits of the CPU kernel, whatever the input.
#include "kernel_ops/quantize.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <cfloat>
#include <cmath>

#include "support/kernel_ops.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

using namespace kernel_ops;

/// Numbers that make a cast go wrong: zeros, the smallest and largest, infinities, NaN, and one of every exponent.
at::Tensor special_numbers(at::ScalarType dtype) {
  std::vector<double> numbers{0.0, -0.0, FLT_TRUE_MIN, -FLT_TRUE_MIN, FLT_MIN, 1.0, 448, 57344};
  for (int exponent = -40; exponent <= 16; ++exponent)
    for (const double mantissa : {1.0, 1.0625, 1.125, 1.1875, 1.9375, -1.3125})
      numbers.push_back(std::ldexp(mantissa, exponent));
  return at::tensor(numbers, at::kDouble).to(dtype);
}

class QuantizeOp : public ::testing::TestWithParam<std::tuple<const char*, bool, double>> {
 protected:
  std::string_view format() const { return std::get<0>(GetParam()); }
  bool power_of_two() const { return std::get<1>(GetParam()); }
  double epsilon() const { return std::get<2>(GetParam()); }

  void expect_same_bits(const at::Tensor& x) {
    const auto got = dispatch<QuantizeCurrent>(x, format(), epsilon(), power_of_two()),
               expected = QuantizeCurrent::reference(x, format(), epsilon(), power_of_two());
    for (size_t part = 0; part < 3; ++part) EXPECT_TRUE(same(got[part], expected[part])) << part;
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, QuantizeOp,
                         ::testing::Combine(::testing::Values("e4m3", "e5m2"), ::testing::Bool(),
                                            ::testing::Values(0.0, 0.5)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_pow2" : "_any") +
                                  (std::get<2>(info.param) > 0 ? "_eps" : "");
                         });

TEST_P(QuantizeOp, EveryLayoutAndDtype) {
  for_every_case(1, [&](const at::Tensor& x) { expect_same_bits(x); });
}

TEST_P(QuantizeOp, SpecialNumbers) {
  for (const auto dtype : kKernelDtypes) {
    const at::Tensor x = special_numbers(dtype);
    expect_same_bits(x);
    for (const double special :
         {double{INFINITY}, -double{INFINITY}, double{NAN}, 3e38, -65504.0, 1e-30})
      expect_same_bits(at::cat({x, at::full({1}, special, x.options())}));
  }
}

TEST_P(QuantizeOp, OneNumberSetsTheScale) {
  for (const double number : {0.0, -0.0, 1e-45, 1e-38, 1e-30, 1.0, 447.0, 1e30, double{FLT_MAX},
                              double{INFINITY}, double{NAN}})
    for (const auto dtype : kKernelDtypes) {
      SCOPED_TRACE(::testing::Message() << number << " " << dtype);
      expect_same_bits(at::full({3}, number, at::kDouble).to(dtype));
    }
}

TEST_P(QuantizeOp, DequantizeGivesEveryCodeItsValue) {
  const at::Tensor codes = at::arange(256, at::kByte).view({16, 16});
  const at::Tensor scale = at::scalar_tensor(0.37, at::kFloat);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    EXPECT_TRUE(same(dispatch<Dequantize>(codes, scale, format(), dtype)[0],
                     Dequantize::reference(codes, scale, format(), dtype)[0]));
  EXPECT_TRUE(
      same(dispatch<Decode>(codes.t(), format())[0], Decode::reference(codes.t(), format())[0]));
}

TEST(ScaleProductOp, MatchesReference) {
  const at::Tensor a = at::scalar_tensor(0.3, at::kFloat), b = at::scalar_tensor(7.1, at::kFloat);
  for (const Layout& layout : layouts())
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      const at::Tensor product = layout.make(at::kFloat, 5, 19, 1);
      EXPECT_TRUE(same(dispatch<ScaleProduct>(product, a, b, dtype)[0],
                       ScaleProduct::reference(product, a, b, dtype)[0]))
          << layout;
    }
}

TEST(QuantizeOpErrors, FormatAndEpsilon) {
  EXPECT_THAT([] { dispatch<QuantizeCurrent>(random({2}), "e3m4", 0.0, false); },
              ThrowsText<c10::ValueError>("quantize: expected format \"e4m3\" or \"e5m2\", got \"",
                                          "got \"e3m4\"", "Choose one of the two"));
  EXPECT_THAT([] { dispatch<QuantizeCurrent>(random({2}), "e4m3", -1.0, false); },
              ThrowsText<c10::ValueError>("quantize: expected amax_epsilon >= 0, got -1",
                                          "quantize: expected amax_epsilon >= 0, got ",
                                          "0 sets no lower bound"));
}

TEST(QuantizeOpErrors, ScalesHaveOneElement) {
  const at::Tensor codes = at::arange(4, at::kByte), one = random({1});
  EXPECT_THAT([&] { dispatch<Dequantize>(codes, random({0}), "e4m3", at::kFloat); },
              ThrowsText<c10::ValueError>("dequantize: expected dequant_scale with one element"));
  EXPECT_THAT(
      [&] {
        dispatch<ScaleProduct>(random({2, 2}), one, random({2}), at::kFloat);
      },
      ThrowsText<c10::ValueError>("scale_product: expected b_scale with one element",
                                  "got shape [2]"));
}

TEST(QuantizeOpErrors, HasNoDerivative) {
  EXPECT_THAT(
      [] { dispatch<QuantizeCurrent>(leaf({2}), "e4m3", 0.0, false); },
      ThrowsText<c10::NotImplementedError>(
          "quantize: expected a tensor that needs no gradient, got one",
          ": expected a tensor that needs no gradient, got one that requires ", "detach x"));
  const c10::AutoGradMode no_grad(false);
  EXPECT_NO_THROW(dispatch<QuantizeCurrent>(leaf({2}), "e4m3", 0.0, false));
}

}  // namespace
}  // namespace tandem::testing
