// The product of codes as a kernel op: eager and compiled code call the same.
#include "kernel_ops/product/codes_product.h"

#include <ATen/ops/empty.h>

#include "kernel_ops/quantize/quantize.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_codes_product {
namespace {

using namespace kernel_ops;
using at::Tensor;

/// The codes of one direction.
struct Part {
  Part(const Tensor& x, const Quantizer& how, Direction along)
      : direction(serves_both_directions(how) ? Direction::row : along) {
    const bool column = direction == Direction::column;
    codes = codes_in(dispatch<Quantize>({.x = x,
                                         .given = given_for(how),
                                         .quantizer = how,
                                         .output_mask = {!column, column, false}}),
                     how, !column, column);
  }
  CodedMatrix matrix() const { return codes.in(direction); }
  Direction direction;
  Codes codes;
};

class MultiplyCodesOp : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Formats, MultiplyCodesOp, ::testing::ValuesIn(quantizer_texts()),
                         [](const auto& info) { return word_of(info.param); });

TEST_P(MultiplyCodesOp, HasTheBitsOfTheDirectCall) {
  const Quantizer& how = quantizer(GetParam());
  const Tensor x = random({3, 7, 40}), w = random({24, 40}, at::kFloat, 2),
               g = random({3, 7, 24}, at::kFloat, 3);
  const struct {
    Part a;
    bool a_transposed;
    Part b;
    bool b_transposed;
    int64_t rows, cols;
  } cases[] = {
      {{x, how, Direction::row}, false, {w, how, Direction::row}, true, 21, 24},
      {{g, how, Direction::row}, false, {w, how, Direction::column}, false, 21, 40},
      {{g, how, Direction::column}, true, {x, how, Direction::column}, false, 24, 40},
  };
  for (const auto& c : cases)
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const Tensor expected = at::empty({c.rows, c.cols}, dtype);
      multiply_codes(c.a.matrix(), c.a_transposed, c.b.matrix(), c.b_transposed,
                     Rows::of_the_result, expected);
      const auto args =
          MultiplyCodes::of(c.a.matrix(), c.a_transposed, c.b.matrix(), c.b_transposed, dtype);
      EXPECT_TRUE(same(dispatch<MultiplyCodes>(args)[0], expected));
      const at::ScalarType summed = dtype == at::kDouble ? at::kFloat : dtype;
      EXPECT_TRUE(near(MultiplyCodes::reference(args)[0].to(summed), expected.to(summed),
                       /*magnitude=*/40));
    }
}

TEST_P(MultiplyCodesOp, TakesAnotherFormatBesideAPackedOne) {
  const Quantizer &how = quantizer(GetParam()), &packed = quantizer("nvfp4");
  if (how.hadamard) GTEST_SKIP() << "numbers that are rotated fit no others";
  const Tensor x = random({5, 40});
  const auto numbers = [](const Part& part) {
    const c10::SymInt sizes[] = {5, 40};
    return dispatch<Dequantize>(
               dequantizing(part.matrix(), at::kFloat, c10::SymIntArrayRef(sizes)))[0]
        .to(at::kDouble);
  };
  for (const bool column : {false, true}) {
    const Direction along = column ? Direction::column : Direction::row;
    const Part a(x, how, along), b(x, packed, along);
    const Tensor left = numbers(a), right = numbers(b);
    const int64_t size = column ? 40 : 5;
    for (const bool is_packed_first : {false, true}) {
      const auto &first = is_packed_first ? b : a, &second = is_packed_first ? a : b;
      const Tensor product = column ? left.t().mm(right) : left.mm(right.t());
      const Tensor expected = is_packed_first ? product.t() : product;
      const Tensor direct = at::empty({size, size});
      multiply_codes(first.matrix(), column, second.matrix(), !column, Rows::of_the_result, direct);
      EXPECT_TRUE(near(direct, expected.to(at::kFloat), /*magnitude=*/40));
      const auto args =
          MultiplyCodes::of(first.matrix(), column, second.matrix(), !column, at::kFloat);
      EXPECT_TRUE(same(dispatch<MultiplyCodes>(args)[0], direct));
      EXPECT_TRUE(near(MultiplyCodes::reference(args)[0], expected.to(at::kFloat),
                       /*magnitude=*/40));
    }
  }
}

/// a b^T of codes of rows.
Tensor product_of_rows(const Tensor& a, const std::string& a_text, const Tensor& b,
                       const std::string& b_text, at::ScalarType dtype) {
  const Part left(a, quantizer(a_text), Direction::row),
      right(b, quantizer(b_text), Direction::row);
  return dispatch<MultiplyCodes>(
      MultiplyCodes::of(left.matrix(), false, right.matrix(), true, dtype))[0];
}

TEST(MultiplyCodesErrors, MatricesThatDoNotFit) {
  EXPECT_ERROR(product_of_rows(random({3, 5}), "fp8_e4m3", random({5, 4}), "fp8_e4m3", at::kFloat),
               c10::ValueError,
               "multiply_codes: expected matrices [m, k] and [k, n], got [3, 5] and [4, 5]. "
               "Transpose one of them.");
}

TEST(MultiplyCodesErrors, PaddingIsNoDimension) {
  EXPECT_ERROR(product_of_rows(random({3, 5}), "nvfp4", random({4, 17}), "fp8_e4m3", at::kFloat),
               c10::ValueError,
               "multiply_codes: expected matrices [m, k] and [k, n], got [3, 16] and [17, 4]. "
               "Transpose one of them.");
}

TEST(MultiplyCodesErrors, ADtypeThatNoProductHas) {
  EXPECT_ERROR(product_of_rows(random({3, 5}), "fp8_e4m3", random({3, 5}), "fp8_e4m3", at::kInt),
               c10::TypeError,
               "multiply_codes: expected dtype float32, bfloat16, float16 or float64, got int32. "
               "Cast the product.");
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_codes_product
