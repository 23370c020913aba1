// What quantizing by hand refuses, and how it says so.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/serialize.h>

#include <cmath>
#include <functional>
#include <sstream>

#include "support/quantized.h"
#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/quantize.h"
#include "tandem/tandem.h"

namespace tandem::testing::front_quantize_errors {
namespace {

constexpr auto kE4m3 = at::kFloat8_e4m3fn;

TEST(CastFrontErrors, DtypesSeedsAndGradients) {
  const at::Tensor x = at::ones({2});
  EXPECT_ERROR(cast(x, at::kFloat), c10::ValueError,
               "cast: expected a dtype among float8_e4m3fn, float8_e5m2, float8_e8m0fnu and "
               "float4_e2m1fn_x2",
               "got float32", "Pass one of them");
  EXPECT_ERROR(cast_back(cast(x, kE4m3), at::ScalarType::Undefined), c10::ValueError,
               "cast_back: expected a dtype among", "got none");
  EXPECT_ERROR(cast_back(x, kE4m3), c10::TypeError, "expected uint8 codes");
  EXPECT_ERROR(cast(x, at::kFloat8_e8m0fnu, {.seed = at::tensor({int64_t{1}}, at::kLong)}),
               c10::ValueError, "expected no seed for e8m0");
  EXPECT_ERROR(cast_back(cast(x, kE4m3), kE4m3, at::kInt), c10::TypeError,
               "expected numbers in float32, bfloat16, float16 or float64, got int32");
  EXPECT_ERROR(cast_back(cast(x, kE4m3), kE4m3, at::ScalarType::Undefined), c10::TypeError,
               "float64, got none. Take float32, and convert");
  EXPECT_ERROR(cast(at::Tensor(), kE4m3), c10::ValueError,
               "cast: expected x to be a tensor, got an undefined one");
  EXPECT_ERROR(cast(x, kE4m3, {.seed = at::Tensor()}), c10::ValueError,
               "cast: expected a seed to be a tensor, got an undefined one. Leave it out");
  EXPECT_ERROR(cast_back(at::Tensor(), kE4m3), c10::ValueError,
               "cast_back: expected codes to be a tensor, got an undefined one");
  EXPECT_ERROR(cast(leaf({2}), kE4m3), c10::NotImplementedError,
               "expected a tensor that needs no gradient");
}

TEST(QuantizerFrontErrors, Arguments) {
  EXPECT_ERROR(TensorQuantizer(MXFP8Quantizer{}), c10::ValueError,
               "MXFP8Quantizer: expected fp8_dtype to be at::kFloat8_e4m3fn or at::kFloat8_e5m2",
               "got none", "Pass one of them");
  EXPECT_ERROR(TensorQuantizer(Float8CurrentScalingQuantizer{.fp8_dtype = at::kHalf}),
               c10::ValueError, "Float8CurrentScalingQuantizer: expected fp8_dtype", "got float16");
  EXPECT_ERROR(
      TensorQuantizer(MXFP8Quantizer{.fp8_dtype = kE4m3, .rowwise = false, .columnwise = false}),
      c10::ValueError,
      "MXFP8Quantizer: expected rowwise or columnwise codes to be wanted, got neither");
  EXPECT_ERROR(TensorQuantizer(Float8BlockQuantizer{.fp8_dtype = kE4m3}), c10::ValueError,
               "Float8BlockQuantizer: expected rowwise or columnwise");
  for (const double epsilon : {-1.0, double{NAN}, double{INFINITY}}) {
    EXPECT_ERROR(
        TensorQuantizer(Float8CurrentScalingQuantizer{.fp8_dtype = kE4m3, .amax_epsilon = epsilon}),
        c10::ValueError,
        "Float8CurrentScalingQuantizer: expected amax_epsilon to be a finite number >= 0");
    EXPECT_ERROR(TensorQuantizer(Float8BlockQuantizer{
                     .fp8_dtype = kE4m3, .rowwise = true, .amax_epsilon = epsilon}),
                 c10::ValueError, "Float8BlockQuantizer: expected amax_epsilon");
  }
  EXPECT_ERROR(TensorQuantizer(Float8BlockQuantizer{
                   .fp8_dtype = kE4m3, .rowwise = true, .block_scaling_dim = 3}),
               c10::ValueError,
               "Float8BlockQuantizer: expected block_scaling_dim to be 1 or 2, got 3");
  EXPECT_ERROR(
      TensorQuantizer(NVFP4Quantizer{.nvfp4_e4m3_max = 256}), c10::ValueError,
      "NVFP4Quantizer: expected nvfp4_e4m3_max to be 448, or, with nvfp4_use_4over6, 256, got 256",
      "no scale needs room above it");
  EXPECT_ERROR(TensorQuantizer(NVFP4Quantizer{.with_rht = true}), c10::NotImplementedError,
               "NVFP4Quantizer: expected with_post_rht_amax=true, as with_rht, got false");
  EXPECT_ERROR(
      TensorQuantizer(NVFP4Quantizer{.stochastic_rounding = true, .nvfp4_use_4over6 = true}),
      c10::ValueError, "quantizer: expected 4over6 or rounding by chance");
  EXPECT_ERROR(TensorQuantizer("mxfp9"), c10::ValueError, "quantizer: expected a format among");
  EXPECT_ERROR(
      TensorQuantizer(Float8Quantizer{.fp8_dtype = kE4m3}), c10::ValueError,
      "Float8Quantizer: expected scale to be a tensor of one float32, got an undefined tensor",
      "Pass at::ones({1})");
  EXPECT_ERROR(TensorQuantizer(Float8Quantizer{
                   .scale = at::ones({1}), .amax = at::ones({2}), .fp8_dtype = kE4m3}),
               c10::ValueError, "expected amax to be a tensor of one float32",
               "got float32 of shape [2]");
}

TEST(QuantizeFrontErrors, WhatIsQuantized) {
  const MXFP8Quantizer quantizer{.fp8_dtype = kE4m3};
  EXPECT_ERROR(quantize(at::Tensor(), quantizer), c10::ValueError,
               "quantize: expected a tensor, got an undefined one");
  EXPECT_ERROR(quantize(at::ones({2}, at::kLong), quantizer), c10::TypeError,
               "expected x of dtype float32, bfloat16");
  QuantizedTensor codes = quantize(at::ones({4, 32}), quantizer);
  EXPECT_ERROR(codes.quantize_(at::ones({3, 32})), c10::ValueError,
               "quantize_: expected x that broadcasts to shape [4, 32]", "got shape [3, 32]",
               "Quantize it into a new one");
  EXPECT_ERROR(codes.copy_(at::Tensor()), c10::ValueError,
               "broadcasts to shape [4, 32], got an undefined tensor");
  EXPECT_ERROR(
      codes.to(at::kInt), c10::TypeError,
      "QuantizedTensor: expected numbers in float32, bfloat16, float16 or float64, got int32");
  EXPECT_ERROR(QuantizedTensor().dequantize(), c10::ValueError,
               "QuantizedTensor: expected one with codes, got an undefined one");
}

TEST(QuantizeFrontErrors, DtypesThatNumbersHaveNot) {
  for (const char* text : {"fp8_e4m3", "nvfp4"}) {
    const QuantizedTensor codes = quantize(at::ones({4, 32}), TensorQuantizer(text));
    EXPECT_ERROR(codes.dequantize(false, at::kInt), c10::TypeError,
                 "dequantize: expected numbers in float32, bfloat16, float16 or float64, got int32",
                 "Take float32, and convert");
  }
}

/// Each use of an undefined tensor in codes.
void expect_undefined(QuantizedTensor& codes) {
  EXPECT_FALSE(codes.defined());
  EXPECT_EQ(codes.scalar_type(), at::ScalarType::Undefined);
  EXPECT_FALSE(codes.requires_grad());
  std::stringstream file;
  const std::vector<std::pair<const char*, std::function<void()>>> uses{
      {"device", [&] { codes.device(); }},
      {"sizes", [&] { codes.sizes(); }},
      {"quantizer", [&] { codes.quantizer(); }},
      {"dequantize", [&] { codes.dequantize(); }},
      {"detach", [&] { codes.detach(); }},
      {"clone", [&] { codes.clone(); }},
      {"to device", [&] { codes.to(at::kCPU); }},
      {"to dtype", [&] { codes.to(at::kHalf); }},
      {"quantize_", [&] { codes.quantize_(at::ones({2})); }},
      {"copy_", [&] { codes.copy_(QuantizedTensor()); }},
      {"update_usage", [&] { codes.update_usage(true); }},
      {"save", [&] { torch::save(codes, file); }}};
  for (const auto& [name, use] : uses) {
    SCOPED_TRACE(name);
    EXPECT_THAT(use, ThrowsText<c10::ValueError>("QuantizedTensor: expected one with codes, got an "
                                                 "undefined one"));
  }
}

TEST(QuantizeFrontErrors, UndefinedTensorsSayThatTheyAre) {
  QuantizedTensor codes;
  expect_undefined(codes);
  QuantizedTensor source = quantize(leaf({4, 32}), TensorQuantizer("fp8_e4m3:delayed"));
  const QuantizedTensor expected = source, taken = std::move(source);
  EXPECT_TRUE(same_parts(taken, expected));
  expect_undefined(source);  // NOLINT(bugprone-use-after-move)
  source = expected;
  EXPECT_TRUE(same(source.dequantize(), taken.dequantize()));
  codes = std::move(source);
  EXPECT_TRUE(same_parts(codes, expected));
  expect_undefined(source);  // NOLINT(bugprone-use-after-move)
}

TEST(QuantizeFrontErrors, QuantizersThatWereMovedFrom) {
  TensorQuantizer source("fp8_e4m3:delayed");
  const QuantizedTensor codes = quantize(at::ones({4, 32}), source);
  const TensorQuantizer taken = std::move(source);
  EXPECT_TRUE(same_parts(quantize(at::ones({4, 32}), taken), codes));
  // NOLINTBEGIN(bugprone-use-after-move)
  const std::vector<std::pair<const char*, std::function<void()>>> uses{
      {"text", [&] { source.text(); }},
      {"set_usage", [&] { source.set_usage(true, false); }},
      {"quantize",
       [&] {
         quantize(at::ones({4, 32}), source);
       }},
      {"constructor", [&] {
         QuantizedTensor(codes.parts(), source, at::kFloat, {4, 32});
       }}};
  // NOLINTEND(bugprone-use-after-move)
  for (const auto& [name, use] : uses) {
    SCOPED_TRACE(name);
    EXPECT_THAT(use, ThrowsText<c10::ValueError>("TensorQuantizer: expected a quantizer, got one "
                                                 "that was moved from",
                                                 "Make another"));
  }
  source = taken;
  EXPECT_EQ(source.text(), taken.text());
  Float8Quantizer options{.scale = at::ones({1}), .amax = at::zeros({1}), .fp8_dtype = kE4m3};
  const Float8Quantizer moved = std::move(options);
  EXPECT_THAT([&] { quantize(at::ones({2}), options); },  // NOLINT(bugprone-use-after-move)
              ThrowsText<c10::ValueError>("Float8Quantizer: expected scale to be a tensor of one "
                                          "float32, got an undefined tensor"));
}

TEST(QuantizeFrontErrors, PartsThatDoNotBelongTogether) {
  const TensorQuantizer quantizer("nvfp4");
  const QuantizedTensor codes = quantize(random({4, 32}), quantizer);
  const auto put_together = [&](const QuantizedParts& parts, std::vector<int64_t> sizes = {4, 32}) {
    return QuantizedTensor(parts, quantizer, at::kFloat, sizes);
  };
  EXPECT_TRUE(same(put_together(codes.parts()).dequantize(), codes.dequantize()));
  EXPECT_ERROR(put_together({}), c10::ValueError,
               "QuantizedTensor: expected codes of rows or of columns, got neither");
  QuantizedParts parts = codes.parts();
  parts.amax_rowwise = at::Tensor();
  EXPECT_ERROR(put_together(parts), c10::ValueError,
               "QuantizedTensor: expected amax_rowwise with these codes", "got none",
               "Pass the parts that quantize made");
  parts = codes.parts();
  parts.columnwise_data = at::Tensor();
  EXPECT_ERROR(put_together(parts), c10::ValueError, "expected no columnwise_scale_inv", "got one");
  EXPECT_ERROR(put_together(codes.parts(), {4, 48}), c10::ValueError,
               "expected rowwise_data of shape [4, 24], uint8, for numbers of shape [4, 48] in "
               "nvfp4, got shape [4, 16]");
}

TEST(QuantizeFrontErrors, OneSetOfCodesForBothDirections) {
  for (const char* text : {"fp8_e4m3:current", "fp8_128x128_e4m3"}) {
    SCOPED_TRACE(text);
    const TensorQuantizer quantizer(text);
    const QuantizedTensor codes = quantize(random({4, 32}), quantizer);
    for (const auto part :
         {&QuantizedParts::columnwise_data, &QuantizedParts::columnwise_scale_inv}) {
      QuantizedParts parts = codes.parts();
      parts.*part = (parts.*part).clone();
      EXPECT_ERROR(QuantizedTensor(parts, quantizer, at::kFloat, {4, 32}), c10::ValueError,
                   "QuantizedTensor: expected columnwise_",
                   "one set of codes serves both directions", "got another tensor",
                   "Pass the same tensor twice");
    }
  }
}

TEST(QuantizeFrontErrors, SizesAndLayoutsThatNoCodesHave) {
  const TensorQuantizer quantizer("nvfp4");
  const QuantizedParts parts = quantize(random({16, 32}), quantizer).parts();
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {-2, -8, 32}, {(int64_t{1} << 60) + 1, 16, 32}, {int64_t{1} << 62, 4, 0}})
    EXPECT_ERROR(QuantizedTensor(parts, quantizer, at::kFloat, sizes), c10::ValueError,
                 "QuantizedTensor: expected sizes of at least 0 whose product is below 2^63",
                 "got [" + std::to_string(sizes[0]), "Pass those of x");
  QuantizedParts sparse = parts;
  sparse.rowwise_data = parts.rowwise_data.to_sparse();
  EXPECT_ERROR(
      QuantizedTensor(sparse, quantizer, at::kFloat, {16, 32}), c10::ValueError,
      "QuantizedTensor: expected rowwise_data to be a strided tensor, got one of layout Sparse");
}

/// An archive as QuantizedTensor::save writes it, but for what is changed.
struct Archive {
  std::string dtype = "float32";
  std::vector<int64_t> sizes{16, 32};
  QuantizedParts parts;
  void load_into(QuantizedTensor& codes) const {
    torch::serialize::OutputArchive out;
    out.write("quantizer", c10::IValue("fp8_e4m3:current"));
    out.write("dtype", c10::IValue(dtype));
    out.write("sizes", c10::IValue(sizes));
    out.write("rowwise_data", parts.rowwise_data, /*is_buffer=*/true);
    out.write("rowwise_scale_inv", parts.rowwise_scale_inv, /*is_buffer=*/true);
    out.write("columnwise_data", parts.columnwise_data, /*is_buffer=*/true);
    out.write("columnwise_scale_inv", parts.columnwise_scale_inv, /*is_buffer=*/true);
    std::stringstream file;
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    codes.load(in);
  }
};

TEST(QuantizeFrontErrors, ArchivesOfNoCodes) {
  const QuantizedTensor source = quantize(random({16, 32}), TensorQuantizer("fp8_e4m3:current"));
  const Archive good{.parts = source.parts()};
  QuantizedTensor codes;
  good.load_into(codes);
  EXPECT_TRUE(same_parts(codes, source));
  for (const char* dtype : {"int32", "none", "no dtype"}) {
    Archive other = good;
    other.dtype = dtype;
    EXPECT_ERROR(
        other.load_into(codes), c10::ValueError,
        "QuantizedTensor: expected an archive whose dtype is float32, bfloat16, float16 or float64",
        std::string("got \"") + dtype + "\"", "Load what was");
  }
  Archive sized = good;
  sized.sizes = {-16, -32};
  EXPECT_ERROR(sized.load_into(codes), c10::ValueError, "expected sizes of at least 0");
  Archive apart = good;
  apart.parts.columnwise_data = source.rowwise_data().clone().add_(1);
  EXPECT_ERROR(apart.load_into(codes), c10::ValueError, "one set of codes serves both directions");
  EXPECT_TRUE(same_parts(codes, source)) << "what is refused changes nothing";
}

TEST(QuantizeFrontErrors, Archives) {
  std::stringstream file;
  torch::save(at::ones({2}), file);
  QuantizedTensor codes;
  EXPECT_ERROR(torch::load(codes, file), c10::ValueError,
               "QuantizedTensor: expected an archive that torch::save wrote of one, got one "
               "without quantizer");
  EXPECT_THAT(
      [&] {
        std::stringstream other;
        torch::save(codes, other);
      },
      ThrowsText<c10::ValueError>("expected one with codes, got an undefined one"));
}

TEST(QuantizeFrontErrors, Tangents) {
  const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
  EXPECT_ERROR(quantize(at::_make_dual(random({2}), random({2}), 0),
                        Float8CurrentScalingQuantizer{.fp8_dtype = kE4m3}),
               c10::NotImplementedError, "quantize: expected x without a tangent");
  torch::autograd::ForwardADLevel::release_idx(level);
}

}  // namespace
}  // namespace tandem::testing::front_quantize_errors
