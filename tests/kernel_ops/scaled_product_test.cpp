// Products of codes by torch's scaled_mm: what it is asked for, and that its operands are the
// numbers that were quantized. One scale per tensor is multiplied on the CPU too.
#include "kernel_ops/product/scaled_product.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/stack.h>
#include <gmock/gmock.h>

#include "kernel_ops/product/codes_product.h"
#include "kernel_ops/quantize/quantize.h"
#include "support/quantizers.h"
#include "support/tensors.h"

namespace tandem::testing::kernel_ops_scaled_product {
namespace {

using namespace kernel_ops;
using at::Tensor;

constexpr ScaledMmDevice kAmpere{80, 12090, 120900}, kAda{89, 12060, 120600},
    kHopper{90, 12090, 120900}, kBlackwell{100, 12080, 120800};

ProductType type_of(const char* a, const char* b, int64_t m, int64_t k, int64_t n) {
  return {{m, k, k, 1, at::kByte, &quantizer(a), Direction::row},
          {k, n, 1, k, at::kByte, &quantizer(b), Direction::row},
          at::kFloat};
}

TEST(ScaledMm, SaysWhatItDoesNotTake) {
  constexpr const char *kOne = "fp8_e4m3", *kOther = "fp8_e5m2", *kLine = "fp8_1x128_e4m3",
                       *kSquare = "fp8_128x128_e4m3", *kMx = "mxfp8_e4m3", *kFour = "nvfp4";
  const ScaledMmDevice old_hopper{90, 12080, 120900}, loads_old{90, 12090, 120800},
      old_blackwell{100, 12060, 120800}, consumer_blackwell{120, 12080, 120800};
  ScaledMmDevice rocm = kHopper;
  rocm.is_rocm = true;
  const struct {
    const char *a, *b;
    int64_t m, k, n;
    ScaledMmDevice device;
    const char* reason;
  } cases[] = {
      {kOne, kOne, 1, 16, 16, kAda, ""},
      {kOne, kOther, 33, 48, 32, kHopper, ""},
      {kOther, kOne, 33, 48, 32, kBlackwell, ""},
      {"fp8_e4m3:delayed", kOne, 33, 48, 32, consumer_blackwell, ""},
      {kOther, kOther, 32, 32, 32, kHopper, "both operands are E5M2"},
      {kOne, kOne, 32, 100, 32, kHopper, "k is no multiple of 16"},
      {kOne, kOne, 32, 32, 100, kHopper, "n is no multiple of 16"},
      {kOne, kOne, 0, 32, 32, kHopper, "a product without numbers"},
      {kOne, kOne, 32, 0, 32, kHopper, "a product without numbers"},
      {kOne, kOne, 32, 32, 0, kHopper, "a product without numbers"},
      {kOne, kOne, 32, 32, 32, kAmpere, "FP8 is multiplied from compute capability 8.9 on"},
      {kOne, kOne, 32, 32, 32, {}, "the compute capability is unknown"},
      {kOne, kOne, 32, 32, 32, rocm, "ROCm is not covered"},
      {kOne, kMx, 32, 32, 32, kBlackwell, "the operands have scales of two kinds"},
      {kOne, kSquare, 32, 128, 128, kHopper, "the operands have scales of two kinds"},
      {kLine, kLine, 4, 128, 16, kHopper, ""},
      {kLine, kSquare, 4, 1280, 144, kHopper, ""},
      {kSquare, kLine, 4, 1280, 144, kHopper, ""},
      {kSquare, kSquare, 128, 128, 128, kHopper, "both operands have squares of 128"},
      {kLine, kLine, 5, 128, 16, kHopper, "m is no multiple of 4"},
      {kLine, kLine, 4, 144, 16, kHopper, "k is no multiple of 128"},
      {kLine, kLine, 4, 128, 20, kHopper, "n is no multiple of 16"},
      {"fp8_1x128_e5m2", kLine, 4, 128, 16, kHopper,
       "E5M2 has one scale per tensor, or is decoded"},
      {kLine, kLine, 4, 128, 16, kAda,
       "FP8 under blocks of 128 is multiplied at compute capability 9.0 alone"},
      {kLine, kSquare, 4, 128, 16, kBlackwell,
       "FP8 under blocks of 128 is multiplied at compute capability 9.0 alone"},
      {kLine, kLine, 4, 128, 16, old_hopper,
       "FP8 under blocks of 128 is multiplied from CUDA 12.9 on"},
      {kLine, kLine, 4, 128, 16, loads_old,
       "FP8 under blocks of 128 is multiplied from CUDA 12.9 on"},
      {kMx, kMx, 31, 64, 48, kBlackwell, ""},
      {kMx, "mxfp8_e4m3:2d=1", 31, 64, 48, consumer_blackwell, ""},
      {kMx, kMx, 31, 48, 48, kBlackwell, "k is no multiple of 32"},
      {kMx, kMx, 31, 64, 40, kBlackwell, "n is no multiple of 16"},
      {"mxfp8_e5m2", kMx, 31, 64, 48, kBlackwell, "E5M2 has one scale per tensor, or is decoded"},
      {kMx, kMx, 31, 64, 48, kHopper,
       "MXFP8 and NVFP4 are multiplied from compute capability 10.0 on"},
      {kMx, kMx, 31, 64, 48, old_blackwell, "MXFP8 and NVFP4 are multiplied from CUDA 12.8 on"},
      {kFour, "nvfp4_256", 31, 16, 48, kBlackwell, ""},  // bytes of two numbers
      {kFour, kFour, 31, 24, 48, kBlackwell, "k is no multiple of 32"},
      {kFour, kFour, 31, 16, 48, kHopper,
       "MXFP8 and NVFP4 are multiplied from compute capability 10.0 on"},
  };
  for (const auto& c : cases)
    EXPECT_EQ(refusal_of_scaled_mm(type_of(c.a, c.b, c.m, c.k, c.n), c.device), c.reason)
        << c.a << " " << c.b << " " << c.m << " " << c.k << " " << c.n << " "
        << c.device.capability;
  ProductType adds = type_of(kOne, kOne, 32, 32, 32), numbers = adds;
  adds.beta = 1;
  numbers.b.quantizer = nullptr;
  for (const ProductType& type : {adds, numbers})
    EXPECT_EQ(refusal_of_scaled_mm(type, kHopper), "it multiplies codes, and adds them to nothing");
}

TEST(ScaledMm, TheRowFollowsTheRule) {
  EXPECT_EQ(kScaledMm.name, "scaled_mm");
  EXPECT_EQ(kScaledMm.device, at::kCUDA);
  ProductType type = type_of("fp8_e4m3", "fp8_e4m3", 16, 16, 16);
  type.device = at::Device(at::kCUDA, 0);
  EXPECT_EQ(kScaledMm.accepts(type), kScaledMm.reason(type).empty());
}

/// Where cuBLASLt reads the scale (r, c) of a matrix with this many columns of scales.
int64_t place_of(int64_t r, int64_t c, int64_t cols) {
  const int64_t tile = r / 128 * (cols / 4) + c / 4;
  return tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

TEST(ScaledMm, ScalesAreSwizzledInTiles) {
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{128, 4}, {384, 4}, {128, 20}, {256, 12}}) {
    const Tensor scales = at::arange(rows * cols).view({rows, cols}),
                 turned = at::arange(rows * cols).view({cols, rows}).t();
    for (const Tensor& source : {scales, turned}) {
      const Tensor got = swizzled(source);
      ASSERT_TRUE(got.is_contiguous());
      ASSERT_EQ(got.sizes(), at::IntArrayRef({rows * cols}));
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c)
          ASSERT_EQ(got[place_of(r, c, cols)].item<int64_t>(), source[r][c].item<int64_t>())
              << r << " " << c;
    }
  }
}

/// A tensor in the codes of both directions.
Codes in_codes(const Tensor& x, const char* text) {
  const Quantizer& how = quantizer(text);
  return codes_in(
      dispatch<Quantize>(
          {.x = x, .given = given_for(how), .quantizer = how, .output_mask = {true, true, false}}),
      how, true, true);
}

/// An operand that owns its tensors.
struct Operand {
  Codes codes;
  Direction direction;
  bool transposed;
  CodedMatrix read() const { return codes.in(direction); }
  const Tensor& matrix() const { return codes.parts[part_of(direction, 0)]; }
  Tensor& matrix() { return codes.parts[part_of(direction, 0)]; }
};
struct OfCodes {
  const char* name;
  Operand a, b;
};

/// y = x W^T, grad_x = g W and grad_W = g^T x.
std::vector<OfCodes> products_of(const Codes& x, const Codes& w, const Codes& g) {
  constexpr Direction kRow = Direction::row, kColumn = Direction::column;
  return {{"y", {x, kRow, false}, {w, kRow, true}},
          {"grad_x", {g, kRow, false}, {w, kColumn, false}},
          {"grad_W", {g, kColumn, true}, {x, kColumn, false}}};
}

/// The product itself, and views that it holds on to.
struct Views {
  explicit Views(const OfCodes& of, at::ScalarType dtype = at::kFloat)
      : left(turned(of.a.matrix(), of.a.transposed)),
        right(turned(of.b.matrix(), of.b.transposed)),
        product(of.a.read().as(left), of.b.read().as(right), dtype,
                {.sums = Sums::independent_of_threads}) {}
  Tensor left, right;
  Product product;
};

/// The numbers of an operand in float64, as the emulation decodes them.
Tensor numbers_of(const Operand& operand) {
  return turned(Dequantize::reference(dequantizing(operand.read(), at::kDouble))[0],
                operand.transposed);
}

/// The scales of an operand [outer, k] for each of its numbers, from what cuBLASLt documents.
Tensor scales_of(const ScaledOperand& operand, int64_t outer, int64_t k) {
  const Tensor& scale = operand.scale;
  const auto widened = [&](const Tensor& of_blocks, int64_t height, int64_t width) {
    return of_blocks.to(at::kDouble)
        .repeat_interleave(height, 0)
        .repeat_interleave(width, 1)
        .narrow(0, 0, outer)
        .narrow(1, 0, k);
  };
  switch (operand.scaling) {
    case 0:
      EXPECT_EQ(scale.numel(), 1);
      return scale.to(at::kDouble).expand({outer, k});
    case 4:
      EXPECT_EQ(scale.sizes(), at::IntArrayRef({outer, k / 128}));
      EXPECT_EQ(scale.strides(), at::IntArrayRef({1, outer}));
      return widened(scale, 1, 128);
    case 5: {
      const int64_t padded = (k / 128 + 3) / 4 * 4;
      EXPECT_EQ(scale.sizes(), at::IntArrayRef({padded, (outer + 127) / 128}));
      EXPECT_EQ(scale.strides(), at::IntArrayRef({1, padded}));
      return widened(scale.t(), 128, 128);
    }
    default:
      break;
  }
  const bool is_mx = operand.scaling == 3;
  const int64_t block = is_mx ? 32 : 16, rows = (outer + 127) / 128 * 128,
                cols = (k / block + 3) / 4 * 4;
  EXPECT_EQ(operand.swizzle, 1);
  EXPECT_TRUE(scale.is_contiguous());
  EXPECT_EQ(scale.scalar_type(), is_mx ? at::kFloat8_e8m0fnu : at::kFloat8_e4m3fn);
  EXPECT_EQ(scale.numel(), rows * cols);
  Tensor places = at::empty({rows, cols}, at::kLong);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      places.mutable_data_ptr<int64_t>()[r * cols + c] = place_of(r, c, cols);
  const Tensor bytes = scale.view(at::kByte).index({places});
  return widened(is_mx ? at::pow(2.0, bytes.to(at::kDouble) - 127)
                       : decode_values(bytes, kernels::Fp8Format::e4m3),
                 1, block);
}

/// What scaled_mm computes with, in float64: [outer, k].
Tensor numbers_of(const ScaledOperand& operand, bool is_left, kernels::Fp8Format element) {
  const Tensor lines = is_left ? operand.codes : operand.codes.t();
  EXPECT_EQ(lines.stride(1), 1);
  EXPECT_EQ(lines.stride(0) % 16, 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(lines.const_data_ptr()) % 16, 0);
  Tensor codes = lines.view(at::kByte);
  if (element == kernels::Fp8Format::e2m1) {
    EXPECT_EQ(lines.scalar_type(), at::kFloat4_e2m1fn_x2);
    codes = at::stack({codes.bitwise_and(0xF), codes.bitwise_right_shift(4)}, -1).flatten(-2);
  } else {
    EXPECT_EQ(lines.scalar_type(),
              element == kernels::Fp8Format::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2);
  }
  Tensor numbers = decode_values(codes, element).to(at::kDouble) *
                   scales_of(operand, codes.size(0), codes.size(1));
  if (operand.factor.defined()) numbers = numbers * operand.factor.to(at::kDouble);
  return numbers;
}

/// Elements within `units` units of float32, and `rounding`, of the sum of the magnitudes.
::testing::AssertionResult is_within(const Tensor& got, const Tensor& a, const Tensor& b,
                                     double units, double rounding = 0) {
  const Tensor expected = at::mm(a, b), magnitude = at::mm(at::abs(a), at::abs(b));
  const Tensor error = at::abs(got.to(at::kDouble) - expected);
  const Tensor bound = magnitude * (units * 0x1p-23) + at::abs(expected) * rounding;
  const Tensor is_wrong = (error > bound).bitwise_or(at::isnan(got) != at::isnan(expected));
  if (!is_wrong.any().item<bool>()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << is_wrong.sum().item<int64_t>() << " elements are wrong, the largest error is "
         << (error / magnitude).max().item<double>() * 0x1p23 << " units";
}

struct ScaledFormats {
  const char* name;
  const char *x, *w, *g;
  int64_t rows, in, out;
  ScaledMmDevice device;
};
std::ostream& operator<<(std::ostream& out, const ScaledFormats& formats) {
  return out << formats.name;
}

class ScaledOperands : public ::testing::TestWithParam<ScaledFormats> {};
INSTANTIATE_TEST_SUITE_P(
    Formats, ScaledOperands,
    ::testing::Values(
        ScaledFormats{"one_scale", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2", 48, 32, 80, kAda},
        ScaledFormats{"lines", "fp8_1x128_e4m3", "fp8_1x128_e4m3:eps=0.5:pow2=0",
                      "fp8_1x128_e4m3:pow2=0", 384, 640, 256, kHopper},
        ScaledFormats{"squares_of_weights", "fp8_1x128_e4m3", "fp8_128x128_e4m3", "fp8_1x128_e4m3",
                      128, 640, 256, kHopper},
        ScaledFormats{"squares_of_inputs", "fp8_128x128_e4m3", "fp8_1x128_e4m3", "fp8_1x128_e4m3",
                      640, 384, 128, kHopper},
        ScaledFormats{"mx", "mxfp8_e4m3", "mxfp8_e4m3:2d=1", "mxfp8_e4m3", 160, 96, 224,
                      kBlackwell},
        ScaledFormats{"four_bits", "nvfp4", "nvfp4:2d=1", "nvfp4", 160, 96, 224, kBlackwell},
        ScaledFormats{"four_rotated_bits", "nvfp4:rht=1", "nvfp4_256:4over6=mae",
                      "nvfp4:rht=1:sr=1", 32, 256, 64, kBlackwell}),
    [](const auto& info) { return info.param.name; });

TEST_P(ScaledOperands, AreTheNumbersOfTheCodes) {
  const ScaledFormats& of = GetParam();
  const Codes x = in_codes(random({of.rows, of.in}), of.x),
              w = in_codes(random({of.out, of.in}, at::kFloat, 2), of.w),
              g = in_codes(random({of.rows, of.out}, at::kFloat, 3), of.g);
  for (const OfCodes& codes : products_of(x, w, g)) {
    SCOPED_TRACE(codes.name);
    const Views views(codes);
    EXPECT_EQ(refusal_of_scaled_mm(views.product.type, of.device), "");
    const Tensor a = numbers_of(scaled_operand(views.product.a, true), true,
                                codes.a.codes.quantizer->format->element),
                 b = numbers_of(scaled_operand(views.product.b, false), false,
                                codes.b.codes.quantizer->format->element)
                         .t();
    constexpr double kRoundingsOfScales = 6;  // of two operands, three each
    EXPECT_TRUE(
        is_within(at::mm(a, b), numbers_of(codes.a), numbers_of(codes.b), kRoundingsOfScales));
  }
}

TEST(ScaledMm, CodesAreCopiedOnlyWhereTheyLieOtherwise) {
  const Codes x = in_codes(random({48, 32}), "fp8_e4m3"),
              w = in_codes(random({80, 32}, at::kFloat, 2), "fp8_e4m3"),
              g = in_codes(random({48, 80}, at::kFloat, 3), "fp8_e5m2");
  const bool copies[][2] = {{false, false}, {false, true}, {true, true}};
  size_t place = 0;
  for (const OfCodes& codes : products_of(x, w, g)) {
    SCOPED_TRACE(codes.name);
    const Views views(codes);
    EXPECT_EQ(!scaled_operand(views.product.a, true).codes.is_alias_of(codes.a.matrix()),
              copies[place][0]);
    EXPECT_EQ(!scaled_operand(views.product.b, false).codes.is_alias_of(codes.b.matrix()),
              copies[place][1]);
    ++place;
  }
}

TEST(ScaledMm, RowsThatBeginBetweenSixteenBytesAreCopied) {
  const Codes x = in_codes(random({48, 32}), "fp8_e4m3");
  for (const auto& [first, copies] : {std::pair(int64_t{16}, false), {3, true}}) {
    const Tensor wide = at::empty({48, 64}, at::kByte), inner = wide.narrow(1, first, 32);
    inner.copy_(x.parts[row_codes]);
    const ScaledOperand operand = scaled_operand(x.in(Direction::row).as(inner), true);
    EXPECT_EQ(!operand.codes.is_alias_of(wide), copies);
    EXPECT_TRUE(same(operand.codes.view(at::kByte), x.parts[row_codes]));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(operand.codes.const_data_ptr()) % 16, 0);
  }
}

/// Codes with memory of others between their rows and before the first, whose rows begin anywhere.
Tensor with_gaps(const Tensor& codes) {
  const int64_t rows = codes.size(0), cols = codes.size(1);
  const Tensor wide = at::full({rows, cols + 5}, 0x7F, at::kByte);
  wide.narrow(1, 3, cols).copy_(codes);
  return wide.narrow(1, 3, cols);
}
/// Codes that lie as a transposed matrix.
Tensor by_columns(const Tensor& codes) { return codes.t().contiguous().t(); }

double unit_of(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 0x1p-8 : dtype == at::kHalf ? 0x1p-11 : 0;
}

/// All of it, on the CPU, whose scaled_mm has one scale per tensor, and sums in float32.
class ScaledProduct : public ::testing::Test {
 protected:
  static void expect_the_product(const OfCodes& codes) {
    const Tensor a = numbers_of(codes.a), b = numbers_of(codes.b);
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      SCOPED_TRACE(::testing::Message() << codes.name << " " << dtype);
      const Views views(codes, dtype);
      Tensor got = at::full({a.size(0), b.size(1)}, NAN, dtype), decoded = at::empty_like(got);
      multiply_by_scaled_mm(views.product, got);
      // Two roundings of operands beside the sum.
      const double units = static_cast<double>(a.size(1)) + 2;
      EXPECT_TRUE(is_within(got, a, b, units, unit_of(dtype)));
      multiply_codes(codes.a.read(), codes.a.transposed, codes.b.read(), codes.b.transposed,
                     Rows::of_the_result, decoded);
      EXPECT_TRUE(is_within(decoded, a, b, units, unit_of(dtype)));
    }
  }
};

TEST_F(ScaledProduct, IsThatOfDecodedCodes) {
  const struct {
    int64_t rows, in, out;
  } sizes[] = {{1, 16, 16}, {5, 16, 32}, {48, 32, 80}, {33, 144, 16}, {7, 19, 33}};
  for (const auto& [rows, in, out] : sizes)
    for (const auto& [of_x, of_g] :
         {std::pair("fp8_e4m3", "fp8_e5m2"), {"fp8_e5m2:current:pow2=1", "fp8_e4m3"}}) {
      SCOPED_TRACE(::testing::Message() << rows << " " << in << " " << out << " " << of_x);
      const Codes x = in_codes(random({rows, in}), of_x),
                  w = in_codes(random({out, in}, at::kFloat, 2) * 1e-3, "fp8_e4m3"),
                  g = in_codes(random({rows, out}, at::kFloat, 3) * 100, of_g);
      for (OfCodes& codes : products_of(x, w, g)) {
        expect_the_product(codes);
        codes.a.matrix() = with_gaps(codes.a.matrix());
        codes.b.matrix() = by_columns(codes.b.matrix());
        expect_the_product(codes);
        codes.a.matrix() = by_columns(codes.a.matrix());
        codes.b.matrix() = with_gaps(codes.b.matrix());
        expect_the_product(codes);
      }
    }
}

TEST_F(ScaledProduct, KeepsNan) {
  Tensor x = random({16, 32});
  x[3][5] = NAN;
  const Codes codes = in_codes(x, "fp8_e4m3"),
              w = in_codes(random({16, 32}, at::kFloat, 2), "fp8_e4m3");
  const OfCodes product{"y", {codes, Direction::row, false}, {w, Direction::row, true}};
  const Views views(product);
  const Tensor y = at::empty({16, 16});
  multiply_by_scaled_mm(views.product, y);
  EXPECT_TRUE(at::isnan(y[3]).all().item<bool>());
  EXPECT_EQ(at::isnan(y).sum().item<int64_t>(), 16);
}

TEST_F(ScaledProduct, OnTheCpuIsDecodedAndSaysSo) {
  const Codes x = in_codes(random({16, 32}), "fp8_e4m3"),
              w = in_codes(random({16, 32}, at::kFloat, 2), "fp8_e4m3");
  const Tensor y = at::empty({16, 16});
  const ImplementationNames took = multiply_codes(x.in(Direction::row), false, w.in(Direction::row),
                                                  true, Rows::of_the_result, y);
  EXPECT_THAT(names_in(took), ::testing::ElementsAre("cpu", "tiles"));
  EXPECT_THAT(reasons_in(took),
              ::testing::ElementsAre("no library multiplies codes on this device"));
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_scaled_product
