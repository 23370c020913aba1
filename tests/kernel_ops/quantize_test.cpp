// FP8 as kernel ops: the composite reference has the bits of the CPU kernel, whatever the input.
#include "kernel_ops/quantize/quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <cfloat>
#include <cmath>

#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_quantize {
namespace {

using namespace kernel_ops;
using Optional = std::optional<at::Tensor>;

/// Numbers that make a cast go wrong: zeros, the smallest and largest, infinities, NaN, and one of
/// every exponent.
at::Tensor special_numbers(at::ScalarType dtype) {
  std::vector<double> numbers{0.0, -0.0, FLT_TRUE_MIN, -FLT_TRUE_MIN, FLT_MIN, 1.0, 448, 57344};
  for (int exponent = -40; exponent <= 16; ++exponent)
    for (const double mantissa : {1.0, 1.0625, 1.125, 1.1875, 1.9375, -1.3125})
      numbers.push_back(std::ldexp(mantissa, exponent));
  return at::tensor(numbers, at::kDouble).to(dtype);
}

class QuantizeOp : public ::testing::TestWithParam<std::string> {
 protected:
  const Quantizer& quantizer() const { return tandem::quantizer(GetParam()); }

  void expect_same_bits(const at::Tensor& x) {
    for (const std::array mask : {std::array{true, true, true}, std::array{true, false, false},
                                  std::array{false, true, false}, std::array{false, false, true}}) {
      const Quantize::Args args{
          .x = x, .given = given_for(quantizer()), .quantizer = quantizer(), .output_mask = mask};
      const auto got = dispatch<Quantize>(args), expected = Quantize::reference(args);
      for (size_t part = 0; part < got.size(); ++part) {
        EXPECT_TRUE(same(got[part], expected[part])) << part;
        EXPECT_TRUE(expected[part].is_contiguous()) << part;  // as compiled code is told
        EXPECT_TRUE(is_written(quantizer(), written_of(quantizer(), mask), part) ||
                    got[part].numel() == 0)
            << part;
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, QuantizeOp, ::testing::ValuesIn(quantizer_texts()),
                         [](const auto& info) { return word_of(info.param); });

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
  const at::Tensor x = random({36, 64}, at::kFloat) * 1e-3;
  const auto group = dispatch<Quantize>({.x = x,
                                         .given = given_for(quantizer()),
                                         .quantizer = quantizer(),
                                         .output_mask = {true, true, false}});
  for (const bool column : {false, true}) {
    const Direction direction =
        column && !serves_both_directions(quantizer()) ? Direction::column : Direction::row;
    const at::Tensor& made = group[part_of(direction, 0)];
    const at::Tensor codes =
        at::arange(made.numel(), at::kLong).bitwise_and(255).to(at::kByte).view(made.sizes());
    const at::Tensor& scale = group[part_of(direction, 1)];
    Optional amax;
    if (quantizer().format->layout.has_amax) amax = group[part_of(direction, 2)];
    const c10::SymInt some[] = {column && is_packed(quantizer()) ? 35 : 36, 64};
    for (const auto sizes : {at::OptionalSymIntArrayRef(), at::OptionalSymIntArrayRef(some)})
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        const Dequantize::Args args{.codes = codes,
                                    .dequant_scale = scale,
                                    .quantizer = quantizer(),
                                    .column = column,
                                    .dtype = dtype,
                                    .amax = amax,
                                    .sizes = sizes};
        EXPECT_TRUE(same(dispatch<Dequantize>(args)[0], Dequantize::reference(args)[0]));
      }
    const auto decoding = [&](const at::Tensor& these) -> Decode::Args {
      return {.codes = these,
              .dequant_scale = scale,
              .quantizer = quantizer(),
              .column = column,
              .amax = amax};
    };
    const at::Tensor strided = codes.t().contiguous().t();
    EXPECT_TRUE(
        same(dispatch<Decode>(decoding(strided))[0], Decode::reference(decoding(codes))[0]));
  }
}

TEST(ScaleProductOp, MatchesReference) {
  const at::Tensor a = at::scalar_tensor(0.3, at::kFloat), b = at::scalar_tensor(7.1, at::kFloat);
  for (const Layout& layout : layouts())
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      const at::Tensor product = layout.make(at::kFloat, 5, 19, 1);
      const ScaleProduct::Args args{.product = product, .a_scale = a, .b_scale = b, .dtype = dtype};
      EXPECT_TRUE(same(dispatch<ScaleProduct>(args)[0], ScaleProduct::reference(args)[0]))
          << layout;
    }
}

TEST(ScaleProductOp, WithoutScalesIsACast) {
  const at::Tensor product = random({3, 5});
  EXPECT_TRUE(same(dispatch<ScaleProduct>({.product = product, .dtype = at::kBFloat16})[0],
                   product.to(at::kBFloat16)));
}

TEST(Quantizers, HaveOneTextAndOneAddress) {
  const Quantizer& plain = quantizer("fp8_e4m3");
  EXPECT_EQ(plain.text, "fp8_e4m3:current:eps=0:pow2=0");
  EXPECT_EQ(&plain, &quantizer(plain.text));
  EXPECT_EQ(&plain, &quantizer("fp8_e4m3:pow2=0:eps=0.0"));
  Quantizer options = plain;
  options.amax_epsilon = 0.1;
  options.power_of_two = true;
  EXPECT_EQ(quantizer(options).text, "fp8_e4m3:current:eps=0.1:pow2=1");
  EXPECT_EQ(&quantizer(options), &quantizer("fp8_e4m3:current:eps=0.1:pow2=1"));
  EXPECT_NE(&plain, &quantizer(options));
  for (const FormatDef& format : formats())
    EXPECT_EQ(quantizer(format.name).text, quantizer(quantizer(format.name).text).text);
}

/// Row codes and amax.
Group quantized(const at::Tensor& x, const Quantizer& quantizer, const Optional& given = {}) {
  return dispatch<Quantize>(
      {.x = x, .given = given, .quantizer = quantizer, .output_mask = {true, false, true}});
}

TEST(QuantizerErrors, FormatScaleAndOptions) {
  EXPECT_ERROR(quantized(random({2}), quantizer("fp8_e3m4")), c10::ValueError,
               "quantizer: expected a format among fp8_e4m3, fp8_e5m2", "got \"fp8_e3m4\"",
               "Begin with the format's name");
  EXPECT_ERROR(quantizer("fp8_e4m3:previous"), c10::ValueError,
               "quantizer: expected a kind of scale that fp8_e4m3 has, got \"previous\"",
               "Leave it out: it has \"current\".");
  for (const char* option : {"eps", "eps=x", "eps=1x", "pow2=2", "2d=1", "margin=0", ""})
    EXPECT_ERROR(quantizer(std::string("fp8_e4m3:current:") + option), c10::ValueError,
                 "quantizer: expected options of fp8_e4m3 among eps, pow2 with a number, 0 or 1",
                 std::string("got \"") + option + "\"", "Write them as in \"fp8_e4m3:current");
  EXPECT_ERROR(quantizer("nvfp4:4over6=l2"), c10::ValueError,
               "quantizer: expected options of nvfp4 among 2d, rht, sr, 4over6",
               "(4over6: 0, mae or mse), got \"4over6=l2\"");
  EXPECT_ERROR(quantizer("nvfp4:sr=1:4over6=mae"), c10::ValueError,
               "quantizer: expected 4over6 or rounding by chance (sr), ", "leave one of them out");
  EXPECT_ERROR(quantizer("nvfp4:2d=1:rht=1"), c10::ValueError,
               "quantizer: expected squares (2d) or rotated columns ");
  const auto refuses = [](const char* format, auto member, auto value, const char* text) {
    Quantizer options = quantizer(format);
    options.*member = value;
    EXPECT_ERROR(quantizer(options), c10::ValueError,
                 std::string("quantizer: expected options that ") + text,
                 "Leave it at its default");
  };
  refuses("mxfp8_e4m3", &Quantizer::power_of_two, true, "mxfp8_e4m3 has, which are 2d, got pow2=1");
  refuses("nvfp4", &Quantizer::amax_epsilon, 0.5,
          "nvfp4 has, which are 2d, rht, sr, 4over6, got eps=0.5");
  refuses("fp8_e4m3", &Quantizer::square_blocks, true,
          "fp8_e4m3:current has, which are eps, pow2, got 2d=1");
  refuses("fp8_1x128_e5m2", &Quantizer::hadamard, true,
          "fp8_1x128_e5m2 has, which are eps, pow2, got rht=1");
  refuses("fp8_e5m2:delayed", &Quantizer::stochastic_rounding, true,
          "fp8_e5m2:delayed has, which are none, got sr=1");
  refuses("mxfp8_e5m2", &Quantizer::four_over_six, kernels::FourOverSix::mse,
          "mxfp8_e5m2 has, which are 2d, got 4over6=mse");
  for (const char* epsilon : {"-1", "inf", "nan"})
    EXPECT_ERROR(quantizer(std::string("fp8_e5m2:eps=") + epsilon), c10::ValueError,
                 "quantizer: expected eps >= 0 and finite, got ", std::string("got ") + epsilon,
                 "0 sets no lower bound of amax");
  EXPECT_ERROR(
      quantized(random({2}), quantizer("fp8_e4m3"), at::ones({})), c10::ValueError,
      "quantize: expected no scale and no seed for fp8_e4m3:current:eps=0:pow2=0, got one",
      ". Only scales that are kept from call to call are passed in, and seeds of rounding.");
  const Quantizer& by_chance = quantizer("nvfp4:sr=1");
  EXPECT_ERROR(quantized(random({2}), by_chance), c10::ValueError,
               "quantize: expected a seed for nvfp4:sr=1, got none");
  for (const at::Tensor& seed : {random({1}), at::arange(3), at::arange(2).view({1, 2})})
    EXPECT_ERROR(quantized(random({2}), by_chance, seed), c10::ValueError,
                 "quantize: expected a seed of one int64, or of two with an offset, got ",
                 "Draw it with torch.randint.");
}

TEST(QuantizeOpErrors, ScalesHaveOneElement) {
  const at::Tensor codes = at::arange(4, at::kByte), one = random({1});
  EXPECT_ERROR(dispatch<Dequantize>({.codes = codes,
                                     .dequant_scale = random({0}),
                                     .quantizer = quantizer("fp8_e4m3"),
                                     .column = false,
                                     .dtype = at::kFloat}),
               c10::ValueError, "dequantize: expected dequant_scale with one element");
  const auto decode = [](const at::Tensor& these, const char* text, const Optional& amax) {
    dispatch<Decode>({.codes = these,
                      .dequant_scale = random({}),
                      .quantizer = quantizer(text),
                      .column = false,
                      .amax = amax});
  };
  EXPECT_ERROR(decode(codes, "fp8_e4m3", random({})), c10::ValueError,
               "decode: expected no amax with codes of fp8_e4m3", "got one");
  EXPECT_ERROR(decode(codes, "nvfp4", {}), c10::ValueError,
               "decode: expected an amax with codes of nvfp4, got none",
               "Pass what quantize returned beside the codes.");
  EXPECT_ERROR(decode(codes[0], "nvfp4", random({1})), c10::ValueError,
               "decode: expected packed codes with at least 1 dimension, got a ", "scalar",
               "Pass what quantize returned");
  const Group four = quantized(random({3, 5}), quantizer("nvfp4"));
  const c10::SymInt other[] = {3, 17};
  EXPECT_ERROR(
      dispatch<Dequantize>({.codes = four[row_codes],
                            .dequant_scale = four[row_scale],
                            .quantizer = quantizer("nvfp4"),
                            .column = false,
                            .dtype = at::kFloat,
                            .amax = four[row_amax],
                            .sizes = other}),
      c10::ValueError,
      "dequantize: expected codes of shape [3, 16] for numbers of shape [3, 17], got [3, 8]",
      "Pass the sizes of what was quantized.");
  EXPECT_ERROR(
      dispatch<ScaleProduct>(
          {.product = random({2, 2}), .a_scale = one, .b_scale = random({2}), .dtype = at::kFloat}),
      c10::ValueError, "scale_product: expected b_scale with one element", "got shape [2]");
}

TEST(QuantizeOpErrors, HasNoDerivative) {
  EXPECT_ERROR(quantized(leaf({2}), quantizer("fp8_e4m3")), c10::NotImplementedError,
               "quantize: expected a tensor that needs no gradient, got one",
               ": expected a tensor that needs no gradient, got one that requires ", "detach x");
  const c10::AutoGradMode no_grad(false);
  EXPECT_NO_THROW(quantized(leaf({2}), quantizer("fp8_e4m3")));
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_quantize
