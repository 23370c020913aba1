// Quantizing by hand: casts, quantizers with TransformerEngine's names, and tensors in codes.
#include "tandem/quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <torch/serialize.h>

#include <cmath>
#include <sstream>

#include "kernel_ops/quantize/cast.h"
#include "kernel_ops/quantize/quantize.h"
#include "support/quantized.h"
#include "support/quantizers.h"
#include "support/safetensors.h"
#include "support/tensors.h"
#include "support/throws.h"
#include "tandem/tandem.h"

namespace tandem::testing::front_quantize {
namespace {

constexpr auto kE4m3 = at::kFloat8_e4m3fn, kE5m2 = at::kFloat8_e5m2;
constexpr auto kE2m1 = at::ScalarType::Float4_e2m1fn_x2;
constexpr auto kMae = NVFP4BlockScaling::ErrorMetric::mae,
               kMse = NVFP4BlockScaling::ErrorMetric::mse;

/// A quantizer by its options, and the text that kernel ops know it by.
struct Case {
  const char* text;
  TensorQuantizer (*make)(bool rowwise, bool columnwise);
};
std::ostream& operator<<(std::ostream& out, const Case& one) { return out << one.text; }

const Case kCases[] = {
    {"fp8_e4m3:current:eps=0:pow2=0",
     [](bool row, bool column) -> TensorQuantizer {
       return Float8CurrentScalingQuantizer{
           .fp8_dtype = kE4m3, .rowwise = row, .columnwise = column};
     }},
    {"fp8_e5m2:current:eps=0.5:pow2=1",
     [](bool row, bool column) -> TensorQuantizer {
       return Float8CurrentScalingQuantizer{.fp8_dtype = kE5m2,
                                            .rowwise = row,
                                            .columnwise = column,
                                            .force_pow_2_scales = true,
                                            .amax_epsilon = 0.5};
     }},
    {"fp8_e4m3:delayed",
     [](bool row, bool column) -> TensorQuantizer {
       return Float8Quantizer{.scale = at::full({1}, 3.0),
                              .amax = at::zeros({1}),
                              .fp8_dtype = kE4m3,
                              .rowwise = row,
                              .columnwise = column};
     }},
    {"fp8_128x128_e4m3:eps=0:pow2=1",
     [](bool row, bool column) -> TensorQuantizer {
       return Float8BlockQuantizer{.fp8_dtype = kE4m3, .rowwise = row, .columnwise = column};
     }},
    {"fp8_1x128_e5m2:eps=0.25:pow2=0",
     [](bool row, bool column) -> TensorQuantizer {
       return Float8BlockQuantizer{.fp8_dtype = kE5m2,
                                   .rowwise = row,
                                   .columnwise = column,
                                   .amax_epsilon = 0.25,
                                   .force_pow_2_scales = false,
                                   .block_scaling_dim = 1};
     }},
    {"mxfp8_e4m3",
     [](bool row, bool column) -> TensorQuantizer {
       return MXFP8Quantizer{.fp8_dtype = kE4m3, .rowwise = row, .columnwise = column};
     }},
    {"mxfp8_e5m2:2d=1",
     [](bool row, bool column) -> TensorQuantizer {
       return MXFP8Quantizer{
           .fp8_dtype = kE5m2, .rowwise = row, .columnwise = column, .with_2d_quantization = true};
     }},
    {"nvfp4",
     [](bool row, bool column) -> TensorQuantizer {
       return NVFP4Quantizer{.rowwise = row, .columnwise = column};
     }},
    {"nvfp4:rht=1",
     [](bool row, bool column) -> TensorQuantizer {
       return NVFP4Quantizer{
           .rowwise = row, .columnwise = column, .with_rht = true, .with_post_rht_amax = true};
     }},
    {"nvfp4:2d=1",
     [](bool row, bool column) -> TensorQuantizer {
       return NVFP4Quantizer{.rowwise = row, .columnwise = column, .with_2d_quantization = true};
     }},
    {"nvfp4:sr=1",
     [](bool row, bool column) -> TensorQuantizer {
       return NVFP4Quantizer{.rowwise = row, .columnwise = column, .stochastic_rounding = true};
     }},
    {"nvfp4:4over6=mae",
     [](bool row, bool column) -> TensorQuantizer {
       return NVFP4Quantizer{.rowwise = row,
                             .columnwise = column,
                             .nvfp4_use_4over6 = true,
                             .nvfp4_4over6_err_mode = kMae};
     }},
    {"nvfp4_256:4over6=mse",
     [](bool row, bool column) -> TensorQuantizer {
       return NVFP4Quantizer{.rowwise = row,
                             .columnwise = column,
                             .nvfp4_use_4over6 = true,
                             .nvfp4_e4m3_max = 256,
                             .nvfp4_4over6_err_mode = kMse};
     }},
};

class QuantizeFront : public ::testing::TestWithParam<Case> {
 protected:
  static TensorQuantizer make(bool row = true, bool column = true) {
    return GetParam().make(row, column);
  }
  static const Quantizer& core() { return quantizer(GetParam().text); }
  static bool draws() { return core().stochastic_rounding; }

  /// Quantizes x as the kernel op does with the same scale or seed, and compares all parts.
  static void expect_codes_of_the_op(const at::Tensor& x, bool row, bool column) {
    SCOPED_TRACE(::testing::Message() << x.sizes() << " " << row << column);
    const TensorQuantizer made = make(row, column);
    EXPECT_EQ(made.text(), core().text);
    at::manual_seed(5);
    const QuantizedTensor codes = quantize(x, made);
    std::optional<at::Tensor> given;
    if (given_to(core()) == Given::scale) given = made.scale();
    at::manual_seed(5);
    if (draws()) given = at::randint(INT64_MAX, {}, at::kLong);
    const auto group = kernel_ops::dispatch<kernel_ops::Quantize>(
        {.x = x, .given = given, .quantizer = core(), .output_mask = {row, column, true}});
    const auto got = parts_of(codes);
    const bool both = serves_both_directions(core());
    for (size_t part = 0; part < got.size(); ++part) {
      const bool is_wanted = part < kPartsOfCodes ? row : column;
      const bool has = is_wanted && (part % kPartsOfCodes != 2 || core().format->layout.has_amax);
      ASSERT_EQ(got[part].defined(), has) << part;
      if (!has) continue;
      EXPECT_TRUE(same(got[part], group[both ? part % kPartsOfCodes : part])) << part;
    }
    EXPECT_EQ(codes.rowwise_data().is_same(codes.columnwise_data()), both && row && column);
    for (const bool columnwise : {false, true}) {
      const bool of_columns = columnwise || !row;
      if (columnwise ? !column : (!row && core().hadamard)) continue;
      const at::Tensor numbers = codes.dequantize(columnwise);
      const size_t first = of_columns && !both ? kPartsOfCodes : 0;
      std::optional<at::Tensor> amax;
      if (core().format->layout.has_amax) amax = group[first + 2];
      const c10::SymDimVector sizes(x.sizes().begin(), x.sizes().end());
      const bool rotated = of_columns && core().hadamard;
      EXPECT_TRUE(same(numbers, kernel_ops::dispatch<kernel_ops::Dequantize>(
                                    {.codes = group[first],
                                     .dequant_scale = group[first + 1],
                                     .quantizer = core(),
                                     .column = of_columns,
                                     .dtype = x.scalar_type(),
                                     .amax = amax,
                                     .sizes = rotated ? at::OptionalSymIntArrayRef()
                                                      : c10::SymIntArrayRef(sizes)})[0]));
      EXPECT_TRUE(rotated || numbers.sizes() == x.sizes());
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Quantizers, QuantizeFront, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return word_of(info.param.text); });

TEST_P(QuantizeFront, HasTheCodesAndNumbersOfTheKernelOp) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {64, 256}, {1, 1}, {37, 67}, {3, 5, 40}, {0, 32}, {3, 0}, {5}, {0}})
    for (const auto& [row, column] : {std::pair(true, true), {true, false}, {false, true}})
      for (const auto dtype : {at::kFloat, at::kBFloat16})
        expect_codes_of_the_op(random(sizes, dtype), row, column);
  expect_codes_of_the_op(random({66, 40}).t(), true, true);
  expect_codes_of_the_op(at::cat({at::zeros({16, 64}), random({16, 64}), at::full({1, 64}, 1e30)}),
                         true, true);
}

TEST_P(QuantizeFront, IsNearWhatItIsOf) {
  const bool has_four_bits = core().format->element == kernels::Fp8Format::e2m1;
  const at::Tensor x = random({48, 200}).to(at::kDouble),
                   y = quantize(x.to(at::kFloat), make()).dequantize(false, at::kDouble);
  // Four bits: at most the distance of 4 and 6, where the largest number of a block is 4 or 6.
  const double of_largest = has_four_bits ? 0.5 : 0x1p-13, unit = unit_of(core());
  const at::Tensor allowed = unit * x.abs() + of_largest * x.abs().max();
  EXPECT_LE(((y - x).abs() - allowed).max().item<double>(), 0);
}

TEST_P(QuantizeFront, HasNumbersOfEveryShapeInEveryDtype) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{7}, {0}, {}, {3, 0}, {5, 3, 20}})
    for (const auto of : {at::kFloat, at::kDouble}) {
      const QuantizedTensor codes = quantize(random(sizes, of), make());
      for (const auto to : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
        for (const bool columnwise : {false, true}) {
          SCOPED_TRACE(::testing::Message() << at::IntArrayRef(sizes) << of << to << columnwise);
          const at::Tensor y = codes.dequantize(columnwise, to);
          EXPECT_TRUE(same(y, codes.dequantize(columnwise, at::kFloat).to(to)));
          EXPECT_TRUE(columnwise || y.sizes() == codes.sizes());
        }
    }
}

TEST_P(QuantizeFront, ZerosStayZeros) {
  const QuantizedTensor codes = quantize(at::zeros({33, 65}), make());
  EXPECT_TRUE(same(codes.dequantize(), at::zeros({33, 65})));
}

TEST_P(QuantizeFront, HandsTheGradientOn) {
  const at::Tensor x = leaf({32, 64}, at::kBFloat16);
  const QuantizedTensor codes = quantize(x * 2, make());
  EXPECT_TRUE(codes.requires_grad());
  EXPECT_FALSE(codes.detach().requires_grad());
  EXPECT_FALSE(codes.detach().dequantize().requires_grad());
  const at::Tensor grad = random({32, 64}, at::kFloat, 3);
  codes.to(at::kDouble).clone().dequantize(false, at::kFloat).backward(grad);
  EXPECT_TRUE(same(x.grad(), grad.to(at::kBFloat16) * 2));
  const at::Tensor columns = codes.dequantize(/*columnwise=*/true);
  EXPECT_EQ(columns.requires_grad(), !core().hadamard);
  {
    const c10::AutoGradMode no_grad(false);
    EXPECT_FALSE(codes.dequantize().requires_grad());
    EXPECT_FALSE(quantize(x, make()).requires_grad());
  }
  EXPECT_FALSE(quantize(x.detach(), make()).requires_grad());
}

TEST_P(QuantizeFront, CopiesAndWrites) {
  const at::Tensor x = random({40, 72}), other = random({40, 72}, at::kFloat, 2);
  const TensorQuantizer made = make();
  at::manual_seed(1);
  QuantizedTensor codes = quantize(x, made);
  const QuantizedTensor shared = codes, apart = codes.clone();
  at::manual_seed(2);
  const QuantizedTensor expected = quantize(other, made);
  at::manual_seed(2);
  EXPECT_EQ(&codes.quantize_(other), &codes);
  EXPECT_TRUE(same_parts(codes, expected));
  EXPECT_TRUE(same_parts(shared, expected)) << "whoever has the same parts sees it";
  at::manual_seed(1);
  EXPECT_TRUE(same_parts(apart, quantize(x, made)));
  codes.copy_(apart);
  EXPECT_TRUE(same_parts(codes, apart));
  EXPECT_TRUE(codes.to(at::kCPU).rowwise_data().is_same(codes.rowwise_data()));
  const QuantizedTensor half = codes.to(at::kHalf);
  EXPECT_EQ(half.scalar_type(), at::kHalf);
  EXPECT_FALSE(half.rowwise_data().is_same(codes.rowwise_data()));
  EXPECT_TRUE(same(half.dequantize(), codes.dequantize(false, at::kHalf)));
  EXPECT_TRUE(same(codes.copy_(at::ones({72})).dequantize(), at::ones({40, 72})) || draws() ||
              core().format->element == kernels::Fp8Format::e2m1 || core().scaling->takes_scale);
  at::manual_seed(4);
  QuantizedTensor of_another = quantize(x, MXFP8Quantizer{.fp8_dtype = kE4m3});
  const at::Tensor numbers = of_another.dequantize();
  at::manual_seed(4);
  codes.copy_(of_another);
  at::manual_seed(4);
  EXPECT_TRUE(core().text == "mxfp8_e4m3" || same_parts(codes, quantize(numbers, made)));
}

TEST_P(QuantizeFront, ComesBackFromAFile) {
  for (const auto& [row, column] : {std::pair(true, true), {true, false}, {false, true}}) {
    const QuantizedTensor codes = quantize(random({33, 3, 40}, at::kBFloat16), make(row, column));
    std::stringstream file;
    torch::save(codes, file);
    QuantizedTensor loaded;
    torch::load(loaded, file);
    EXPECT_TRUE(same_parts(loaded, codes));
    EXPECT_EQ(loaded.scalar_type(), at::kBFloat16);
    EXPECT_EQ(loaded.sizes(), codes.sizes());
    EXPECT_EQ(loaded.quantizer().text(), core().text);
    EXPECT_EQ(loaded.quantizer().rowwise_usage(), row);
    EXPECT_EQ(loaded.quantizer().columnwise_usage(), column);
    const bool is_shared = serves_both_directions(core()) && row && column;
    EXPECT_EQ(loaded.rowwise_data().is_same(loaded.columnwise_data()), is_shared);
    if (core().scaling->takes_scale) {
      EXPECT_TRUE(same(loaded.quantizer().scale(), codes.quantizer().scale()));
      EXPECT_TRUE(same(loaded.quantizer().amax(), codes.quantizer().amax()));
    }
    EXPECT_TRUE(same_parts(loaded.copy_(codes), codes));
  }
}

TEST_P(QuantizeFront, GivesAndDropsDirections) {
  const at::Tensor x = random({32, 64});
  QuantizedTensor both = quantize(x, make());
  const QuantizedTensor before = both;
  both.update_usage(std::nullopt, false);
  EXPECT_TRUE(both.rowwise_data().defined());
  EXPECT_FALSE(both.columnwise_data().defined() || both.columnwise_scale_inv().defined());
  EXPECT_TRUE(before.columnwise_data().defined()) << "another object keeps its own";
  EXPECT_ERROR(both.dequantize(/*columnwise=*/true), c10::ValueError,
               "dequantize: expected columnwise codes", "Build the quantizer with columnwise=true");
  if (serves_both_directions(core())) {
    both.update_usage(std::nullopt, true);
    EXPECT_TRUE(both.columnwise_data().is_same(both.rowwise_data()));
  } else {
    EXPECT_ERROR(both.update_usage(true, true), c10::Error,
                 "update_usage: expected columnwise codes that are there or the same",
                 GetParam().text, "Quantize with columnwise=true");
  }
  EXPECT_ERROR(both.update_usage(false, false), c10::ValueError,
               "update_usage: expected codes of rows or of columns to be kept, got neither");
}

TEST(QuantizeFrontFloat8, RaisesItsAmax) {
  const at::Tensor scale = at::full({1}, 2.0), amax = at::zeros({1});
  const Float8Quantizer quantizer{.scale = scale, .amax = amax, .fp8_dtype = kE4m3};
  QuantizedTensor codes = quantize(at::tensor({1.0f, -7.0f}), quantizer);
  EXPECT_EQ(amax.item<float>(), 7);
  EXPECT_TRUE(same(codes.rowwise_data(), cast(at::tensor({2.0f, -14.0f}), kE4m3)));
  quantize(at::tensor({3.0f, NAN}), quantizer);
  quantize(at::tensor({NAN}), quantizer);
  EXPECT_EQ(amax.item<float>(), 7) << "a NaN counts as none";
  codes.quantize_(at::tensor({9.0f, 1.0f}));
  EXPECT_EQ(amax.item<float>(), 9) << "whoever writes raises it too";
  EXPECT_TRUE(same(codes.dequantize(), at::tensor({9.0f, 1.0f})));
  const at::Tensor other_amax = at::full({1}, 20.0);
  const Float8Quantizer other{.scale = scale, .amax = other_amax, .fp8_dtype = kE4m3};
  codes.copy_(quantize(at::tensor({2.0f, 1.0f}), other));
  EXPECT_EQ(amax.item<float>(), 20) << "that of what was written";
}

TEST(QuantizeFrontNvfp4, DrawsSeedsFromTheGenerator) {
  const at::Tensor x = random({64, 64});
  const NVFP4Quantizer by_chance{.stochastic_rounding = true};
  at::manual_seed(7);
  const QuantizedTensor first = quantize(x, by_chance), second = quantize(x, by_chance);
  EXPECT_FALSE(same(first.rowwise_data(), second.rowwise_data()));
  at::manual_seed(7);
  EXPECT_TRUE(same_parts(quantize(x, by_chance), first));
}

TEST(QuantizeFrontNvfp4, RotatedColumnsTellNoNumbers) {
  const NVFP4Quantizer rotated{.rowwise = false, .with_rht = true, .with_post_rht_amax = true};
  const QuantizedTensor codes = quantize(random({20, 32}), rotated);
  EXPECT_EQ(codes.dequantize(/*columnwise=*/true).sizes(), (std::vector<int64_t>{32, 32}));
  EXPECT_ERROR(codes.dequantize(), c10::ValueError,
               "dequantize: expected codes of rows, got rotated ones", "Pass columnwise=true");
}

TEST(QuantizeFrontText, PrintsShapeDtypeAndQuantizer) {
  std::ostringstream text;
  text << quantize(at::ones({4, 64}), MXFP8Quantizer{.fp8_dtype = kE4m3}) << " "
       << QuantizedTensor();
  EXPECT_EQ(text.str(),
            "QuantizedTensor([4, 64], dtype=float32, quantizer=mxfp8_e4m3) QuantizedTensor()");
}

TEST(QuantizeFrontUsage, CountsForWhatIsQuantizedFromThenOn) {
  TensorQuantizer quantizer("mxfp8_e4m3");
  const QuantizedTensor before = quantize(at::ones({4, 64}), quantizer);
  quantizer.set_usage(std::nullopt, false);
  EXPECT_FALSE(quantize(at::ones({4, 64}), quantizer).columnwise_data().defined());
  EXPECT_TRUE(before.quantizer().columnwise_usage());
  EXPECT_ERROR(quantizer.set_usage(false, std::nullopt), c10::ValueError,
               "set_usage: expected rowwise or columnwise codes", "got neither", "Leave one");
}

// Casts.

template <typename T>
at::Tensor raw(const Safetensors& file, const std::string& name, at::ScalarType dtype) {
  const std::vector<T> values = file.read<T>(name);
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, dtype);
  std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(T));
  return tensor;
}

TEST(CastFront, HasTheBitsOfTheGoldenVectors) {
  const Safetensors fp8(TANDEM_SOURCE_DIR "/tests/data/golden_fp8.safetensors"),
      blocks(TANDEM_SOURCE_DIR "/tests/data/golden_blocks.safetensors"),
      formats(TANDEM_SOURCE_DIR "/tests/data/golden_formats.safetensors");
  const at::Tensor all = at::arange(65536, at::kInt).to(at::kShort).view(at::kBFloat16);
  struct Format {
    const Safetensors& file;
    const char* name;
    at::ScalarType dtype;
    int64_t codes;
  };
  for (const auto& [file, name, dtype, count] :
       {Format{fp8, "e4m3", kE4m3, 256}, Format{fp8, "e5m2", kE5m2, 256},
        Format{blocks, "e2m1", kE2m1, 16}}) {
    SCOPED_TRACE(name);
    const std::string format(name), edges = "cast_fp32_edges_" + format;
    EXPECT_TRUE(
        same(cast(all, dtype), raw<uint8_t>(file, "cast_bf16_all_" + format + "/data", at::kByte)));
    EXPECT_TRUE(same(cast(raw<uint32_t>(file, edges + "/x", at::kFloat), dtype),
                     raw<uint8_t>(file, edges + "/data", at::kByte)));
    if (dtype != kE2m1) {
      EXPECT_TRUE(same(
          cast(raw<uint32_t>(file, edges + "_nosat/x", at::kFloat), dtype, {.saturate = false}),
          raw<uint8_t>(file, edges + "_nosat/data", at::kByte)));
    }
    EXPECT_TRUE(same(cast_back(at::arange(count, at::kByte), dtype),
                     raw<uint32_t>(file, "decode/" + format, at::kFloat)));
  }
  EXPECT_TRUE(same(cast(raw<uint32_t>(formats, "cast_e8m0/x", at::kFloat), at::kFloat8_e8m0fnu),
                   raw<uint8_t>(formats, "cast_e8m0/data", at::kByte)));
  const at::Tensor powers = at::arange(255, at::kByte);
  EXPECT_TRUE(same(cast_back(powers, at::kFloat8_e8m0fnu, at::kDouble),
                   at::pow(2.0, powers.to(at::kDouble) - 127)));
}

TEST(CastFront, RoundsByChanceAsTheKernelOp) {
  const at::Tensor x = random({1000}), seed = at::tensor({int64_t{3}, int64_t{1}}, at::kLong);
  const at::Tensor codes = cast(x, kE4m3, {.seed = seed});
  EXPECT_TRUE(same(codes, kernel_ops::dispatch<kernel_ops::CastToCodes>(
                              {.x = x, .format = "e4m3", .saturate = true, .seed = seed})[0]));
  EXPECT_FALSE(same(codes, cast(x, kE4m3)));
}

}  // namespace
}  // namespace tandem::testing::front_quantize
