// What kernels do not list goes to the reference: every kernel op on every dtype of every operand,
// and on operands of two devices.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>

#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/norm/norm.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernel_ops/unit/activation.h"
#include "support/kernel_ops.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_dtypes {
namespace {

using namespace kernel_ops;
using Optional = std::optional<at::Tensor>;

constexpr at::ScalarType kDtypes[] = {
    at::kBool,          at::kByte,        at::kChar,         at::kShort,        at::kInt,
    at::kLong,          at::kHalf,        at::kFloat,        at::kDouble,       at::kBFloat16,
    at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kComplexFloat, at::kComplexDouble};

template <typename F>
auto attempt(F&& function) -> std::optional<decltype(function())> {
  try {
    return function();
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

/// The dispatcher's kernel gives what the reference gives, or raises where it raises.
template <typename K, typename... Args>
::testing::AssertionResult agrees(const Args&... args) {
  const auto got = attempt([&] { return dispatch<K>(args...); }),
             expected = attempt([&] { return run_reference<K>(args...); });
  if (got.has_value() != expected.has_value())
    return ::testing::AssertionFailure() << (got ? "did not raise" : "raised");
  if (!got) return ::testing::AssertionSuccess();
  for (size_t i = 0; i < got->size(); ++i) {
    const at::Tensor &a = (*got)[i], &b = (*expected)[i];
    if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes() || !a.is_contiguous())
      return ::testing::AssertionFailure() << "result " << i << ": " << a.toString() << a.sizes();
    const auto wide = b.is_complex() ? at::kComplexDouble : at::kDouble;
    if (!at::allclose(a.to(wide), b.to(wide), /*rtol=*/2e-2, /*atol=*/2e-2, /*equal_nan=*/true))
      return ::testing::AssertionFailure() << "result " << i << " is " << a << ", not " << b;
  }
  return ::testing::AssertionSuccess();
}

at::Tensor filled(at::IntArrayRef sizes, at::ScalarType dtype, uint64_t seed = 1) {
  return (random(sizes, at::kFloat, seed) * 2).round().abs().to(dtype);
}

/// Calls `check(a, b)` for every pair of dtypes.
template <typename Check>
void for_every_pair(Check&& check) {
  for (const auto a : kDtypes)
    for (const auto b : kDtypes) {
      SCOPED_TRACE(::testing::Message() << a << ", " << b);
      check(a, b);
    }
}

TEST(KernelDtypes, Sums) {
  for_every_pair([](at::ScalarType a, at::ScalarType b) {
    const at::Tensor x = filled({5, 19}, a);
    EXPECT_TRUE(agrees<AddBias>(x, Optional(filled({19}, b, 2)), Optional()));
    EXPECT_TRUE(agrees<AddBias>(x, Optional(), Optional(filled({5, 19}, b, 2))));
    EXPECT_TRUE(agrees<SumRows>(x, b));
  });
}

TEST(KernelDtypes, Dropout) {
  for_every_pair([](at::ScalarType a, at::ScalarType b) {
    EXPECT_TRUE(agrees<Dropout>(filled({5, 19}, a), at::ones({}, b), 0.5));
    EXPECT_TRUE(agrees<DropoutBackwardBias>(filled({5, 19}, a), at::ones({}, at::kLong), 0.5, b,
                                            std::array{true, true}));
  });
}

TEST(KernelDtypes, Activations) {
  for_every_pair([](at::ScalarType a, at::ScalarType b) {
    for (const char* activation : {"gelu", "silu", "relu"}) {
      const std::string_view name = activation;
      const std::array<bool, 2> two{true, true};
      const std::array<bool, 3> three{true, true, true};
      const at::Tensor x = filled({5, 38}, a), half = filled({5, 19}, b, 2);
      const Optional bias(filled({38}, b, 2));
      EXPECT_TRUE(agrees<ActivationForward>(x, bias, name, two));
      EXPECT_TRUE(agrees<GluForward>(x, bias, name, two));
      EXPECT_TRUE(agrees<ActivationBackward>(filled({5, 38}, b, 2), x, name, three));
      EXPECT_TRUE(agrees<GluBackward>(half, x, name, three));
    }
  });
}

TEST(KernelDtypes, Norms) {
  const at::Tensor rows = at::ones({5});
  for_every_pair([&](at::ScalarType a, at::ScalarType b) {
    const at::Tensor x = filled({5, 19}, a), weight = filled({19}, b, 2), grad = filled({5, 19}, b);
    const std::array<bool, 3> three{true, true, true};
    const std::array<bool, 4> four{true, true, true, true};
    EXPECT_TRUE(agrees<RmsNormForward>(x, weight, 1e-5, false));
    EXPECT_TRUE(agrees<L2NormForward>(x, 1e-5));
    EXPECT_TRUE(agrees<L2NormBackward>(grad, x, rows, std::array<bool, 2>{true, true}));
    EXPECT_TRUE(agrees<LayerNormForward>(x, weight, filled({19}, a), 1e-5, false));
    EXPECT_TRUE(
        agrees<RmsNormBackward>(grad, x, weight, rows.to(at::kDouble), Optional(), false, three));
    EXPECT_TRUE(agrees<RmsNormBackward>(grad, x, weight, rows, Optional(x), false, three));
    EXPECT_TRUE(agrees<LayerNormBackward>(grad, x, weight, Optional(weight), rows, rows, Optional(),
                                          false, four));
  });
}

TEST(KernelDtypes, Codes) {
  const Quantizer& quantizer = tandem::quantizer("fp8_e4m3");
  const at::OptionalSymIntArrayRef no_sizes;
  for_every_pair([&](at::ScalarType a, at::ScalarType b) {
    const at::Tensor codes = filled({5, 19}, a), scale = at::ones({}, b);
    EXPECT_TRUE(agrees<Decode>(codes, scale, quantizer, false, Optional()));
    EXPECT_TRUE(
        agrees<Dequantize>(codes, scale, quantizer, false, at::kFloat, Optional(), no_sizes));
    EXPECT_TRUE(agrees<Dequantize>(filled({5, 19}, at::kByte), at::ones({}), quantizer, false, b,
                                   Optional(), no_sizes));
    EXPECT_TRUE(
        agrees<ScaleProduct>(codes, Optional(scale), Optional(at::ones({})), at::kBFloat16));
    EXPECT_TRUE(c10::isComplexType(a) ||
                agrees<Quantize>(codes, Optional(), quantizer, std::array{true, true, true}));
  });
}

TEST(KernelErrors, DtypesThatAnOpIsNotDefinedFor) {
  EXPECT_THAT(
      [] {
        dispatch<RmsNormForward>(filled({2, 4}, at::kLong), filled({4}, at::kFloat), 0.1, false);
      },
      ThrowsText<c10::TypeError>(
          "norm: expected x of dtype float32, bfloat16, float16 or float64, ",
          " of dtype float32, bfloat16, float16 or float64, got ", "got int64",
          "Convert it before the call"));
  EXPECT_THAT(
      [] {
        dispatch<Decode>(filled({2, 4}, at::kFloat), at::ones({}), tandem::quantizer("fp8_e4m3"),
                         false, std::optional<at::Tensor>());
      },
      ThrowsText<c10::TypeError>("decode: expected uint8 codes, got ", "float32",
                                 "Pass what a quantize op returned"));
  EXPECT_THAT([] { dispatch<SumRows>(filled({}, at::kFloat), at::kFloat); },
              ThrowsText<c10::ValueError>("sum_rows: expected x with at least 1 dimension, got a ",
                                          "Pass x.reshape({1}) if one element is meant"));
}

TEST(KernelErrors, OperandsOfTwoDevices) {
  const at::Tensor x = random({2, 4}), elsewhere = random({4}).to(at::kMeta);
  const auto text = ThrowsText<c10::ValueError>(
      "tandem::add_bias: expected x and bias on one device, got cpu and meta",
      " on one device, got ", "Move the module or its input: both have .to(device)");
  EXPECT_THAT([&] { dispatch<AddBias>(x, Optional(elsewhere), Optional()); }, text);
  EXPECT_THAT([&] { run_reference<AddBias>(x, Optional(elsewhere), Optional()); }, text);
  const at::Tensor all_meta =
      dispatch<AddBias>(x.to(at::kMeta), Optional(elsewhere), Optional())[0];
  EXPECT_TRUE(all_meta.is_meta());
  EXPECT_EQ(all_meta.sizes(), x.sizes());
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_dtypes
