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
template <typename K>
::testing::AssertionResult agrees(const typename K::Args& args) {
  const auto got = attempt([&] { return dispatch<K>(args); }),
             expected = attempt([&] { return run_reference<K>(args); });
  if (got.has_value() != expected.has_value())
    return ::testing::AssertionFailure() << (got ? "did not raise" : "raised");
  if (!got) return ::testing::AssertionSuccess();
  for (size_t i = 0; i < got->size(); ++i) {
    const at::Tensor &a = (*got)[i], &b = (*expected)[i];
    if (!a.defined() && !b.defined()) continue;
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
    const at::Tensor x = filled({5, 19}, a), bias = filled({19}, b, 2);
    EXPECT_TRUE(agrees<AddBias>({.x = x, .bias = bias}));
    EXPECT_TRUE(agrees<AddBias>({.x = x, .bias = bias, .factor = 0.5}));
    EXPECT_TRUE(agrees<AddBias>({.x = x, .extra = filled({5, 19}, b, 2)}));
    EXPECT_TRUE(agrees<SumRows>({.x = x, .dtype = b}));
  });
}

TEST(KernelDtypes, Dropout) {
  for_every_pair([](at::ScalarType a, at::ScalarType b) {
    const at::Tensor x = filled({5, 19}, a), seed = at::ones({}, at::kLong);
    EXPECT_TRUE(agrees<Dropout>({.x = x, .seed = at::ones({}, b), .p = 0.5}));
    EXPECT_TRUE(agrees<Dropout>({.x = x, .bias = filled({19}, b, 2), .seed = seed, .p = 0.5}));
    EXPECT_TRUE(agrees<DropoutBackward>({.grad_y = x, .seed = seed, .p = 0.5, .dtype = b}));
  });
}

TEST(KernelDtypes, Activations) {
  for_every_pair([](at::ScalarType a, at::ScalarType b) {
    for (const char* activation : {"gelu", "silu", "relu"})
      for (const bool is_gated : {false, true}) {
        const at::Tensor x = filled({5, 38}, a), grad_y = filled({5, is_gated ? 19 : 38}, b, 2);
        EXPECT_TRUE(agrees<ActivationForward>({.x = x,
                                               .bias = filled({38}, b, 2),
                                               .activation = activation,
                                               .is_gated = is_gated,
                                               .output_mask = {true, true}}));
        EXPECT_TRUE(agrees<ActivationBackward>({.grad_y = grad_y,
                                                .z = x,
                                                .activation = activation,
                                                .is_gated = is_gated,
                                                .output_mask = {true, true, true}}));
      }
  });
}

TEST(KernelDtypes, Norms) {
  const at::Tensor rows = at::ones({5}), wide_rows = at::ones({5}, at::kDouble);
  for_every_pair([&](at::ScalarType a, at::ScalarType b) {
    const at::Tensor x = filled({5, 19}, a), weight = filled({19}, b, 2), grad = filled({5, 19}, b);
    for (const bool is_layer_norm : {false, true}) {
      NormForward::Args forward{
          .x = x, .weight = weight, .eps = 1e-5, .zero_centered_gamma = false};
      if (is_layer_norm) forward.bias = filled({19}, a);
      EXPECT_TRUE(agrees<NormForward>(forward));
      NormBackward::Args backward{.grad_y = grad,
                                  .x = x,
                                  .weight = weight,
                                  .inv_norm = rows,
                                  .zero_centered_gamma = false,
                                  .output_mask = {true, true, true, false, is_layer_norm}};
      if (is_layer_norm) backward.bias = weight, backward.mean = rows;
      EXPECT_TRUE(agrees<NormBackward>(backward));
      backward.grad_residual = x;
      EXPECT_TRUE(agrees<NormBackward>(backward));
    }
    EXPECT_TRUE(agrees<NormBackward>({.grad_y = grad,
                                      .x = x,
                                      .weight = weight,
                                      .inv_norm = wide_rows,
                                      .zero_centered_gamma = false,
                                      .output_mask = {true, true, true}}));
    EXPECT_TRUE(agrees<L2NormForward>({.x = x, .eps = 1e-5}));
    EXPECT_TRUE(agrees<L2NormBackward>(
        {.grad_y = grad, .x = x, .inv_norm = rows, .output_mask = {true, true}}));
  });
}

TEST(KernelDtypes, Codes) {
  const Quantizer& quantizer = tandem::quantizer("fp8_e4m3");
  for_every_pair([&](at::ScalarType a, at::ScalarType b) {
    const at::Tensor codes = filled({5, 19}, a), scale = at::ones({}, b);
    EXPECT_TRUE(agrees<Decode>(
        {.codes = codes, .dequant_scale = scale, .quantizer = quantizer, .column = false}));
    EXPECT_TRUE(agrees<Dequantize>({.codes = codes,
                                    .dequant_scale = scale,
                                    .quantizer = quantizer,
                                    .column = false,
                                    .dtype = at::kFloat}));
    EXPECT_TRUE(agrees<Dequantize>({.codes = filled({5, 19}, at::kByte),
                                    .dequant_scale = at::ones({}),
                                    .quantizer = quantizer,
                                    .column = false,
                                    .dtype = b}));
    EXPECT_TRUE(agrees<ScaleProduct>(
        {.product = codes, .a_scale = scale, .b_scale = at::ones({}), .dtype = at::kBFloat16}));
    EXPECT_TRUE(
        c10::isComplexType(a) ||
        agrees<Quantize>({.x = codes, .quantizer = quantizer, .output_mask = {true, true, true}}));
  });
}

TEST(KernelErrors, DtypesThatAnOpIsNotDefinedFor) {
  EXPECT_ERROR(dispatch<NormForward>({.x = filled({2, 4}, at::kLong),
                                      .weight = filled({4}, at::kFloat),
                                      .eps = 0.1,
                                      .zero_centered_gamma = false}),
               c10::TypeError, "norm: expected x of dtype float32, bfloat16, float16 or float64, ",
               " of dtype float32, bfloat16, float16 or float64, got ", "got int64",
               "Convert it before the call");
  EXPECT_ERROR(dispatch<Decode>({.codes = filled({2, 4}, at::kFloat),
                                 .dequant_scale = at::ones({}),
                                 .quantizer = tandem::quantizer("fp8_e4m3"),
                                 .column = false}),
               c10::TypeError, "decode: expected uint8 codes, got ", "float32",
               "Pass what a quantize op returned");
  EXPECT_ERROR(dispatch<SumRows>({.x = filled({}, at::kFloat), .dtype = at::kFloat}),
               c10::ValueError, "sum_rows: expected x with at least 1 dimension, got a ",
               "Pass x.reshape({1}) if one element is meant");
}

TEST(KernelErrors, OperandsOfTwoDevices) {
  const at::Tensor x = random({2, 4}), elsewhere = random({4}).to(at::kMeta);
  const auto text = ThrowsText<c10::ValueError>(
      "tandem::add_bias: expected x and bias on one device, got cpu and meta",
      " on one device, got ", "Move the module or its input: both have .to(device)");
  EXPECT_THAT([&] { dispatch<AddBias>({.x = x, .bias = elsewhere}); }, text);
  EXPECT_THAT([&] { run_reference<AddBias>({.x = x, .bias = elsewhere}); }, text);
  const at::Tensor all_meta = dispatch<AddBias>({.x = x.to(at::kMeta), .bias = elsewhere})[0];
  EXPECT_TRUE(all_meta.is_meta());
  EXPECT_EQ(all_meta.sizes(), x.sizes());
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_dtypes
