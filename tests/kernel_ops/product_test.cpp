// Products in pieces: any number of rows gives the product, and what is cut depends on the shape
// alone.
#include "kernel_ops/product/product.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <gmock/gmock.h>

#include <array>

#include "support/tensors.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_product {
namespace {

at::Tensor multiplied(const at::Tensor& a, const at::Tensor& b, kernel_ops::Rows rows) {
  at::Tensor result = at::full({a.size(0), b.size(1)}, NAN, a.options());
  kernel_ops::multiply_by_onednn(a, b, result, rows);
  return result;
}

TEST(ProductInPieces, IsTheProduct) {
  if (!kernel_ops::has_onednn()) GTEST_SKIP() << "oneDNN's product is not there or slow here";
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t rows : {0, 1, 2, 3, 63, 64, 65, 100, 127, 128, 600, 1000, 1023}) {
      SCOPED_TRACE(::testing::Message() << dtype << " " << rows);
      const at::Tensor x = random({rows, 512}, dtype), weight = random({528, 512}, dtype, 2),
                       grad = random({rows, 528}, dtype, 3);
      EXPECT_TRUE(near(multiplied(x, weight.t(), kernel_ops::Rows::of_the_result),
                       at::mm(x, weight.t()),
                       /*magnitude=*/512));
      EXPECT_TRUE(near(multiplied(grad.t(), x, kernel_ops::Rows::contracted), at::mm(grad.t(), x),
                       /*magnitude=*/1024));
    }
}

TEST(ProductInPieces, MultipliesByAlphaAndAccumulates) {
  if (!kernel_ops::has_onednn()) GTEST_SKIP() << "oneDNN's product is not there or slow here";
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const auto rows : {kernel_ops::Rows::of_the_result, kernel_ops::Rows::contracted})
      for (const int64_t count : {0, 3, 777}) {
        const bool contracted = rows == kernel_ops::Rows::contracted;
        const at::Tensor x = random({count, 512}, dtype), weight = random({528, 512}, dtype, 2),
                         grad = random({count, 528}, dtype, 3);
        const at::Tensor a = contracted ? grad.t() : x, b = contracted ? x : weight.t();
        at::Tensor result = random({a.size(0), b.size(1)}, dtype, 4);
        const at::Tensor product = at::mm(a.to(at::kFloat), b.to(at::kFloat));
        at::Tensor expected = (result + product * -0.75).to(dtype);
        kernel_ops::multiply_by_onednn(a, b, result, rows, /*accumulate=*/true, -0.75);
        EXPECT_TRUE(near(result, expected, /*magnitude=*/1024)) << dtype << count << contracted;
        kernel_ops::multiply_by_onednn(a, b, result, rows, /*accumulate=*/false, -0.75);
        EXPECT_TRUE(near(result, (product * -0.75).to(dtype), 1024))
            << dtype << count << contracted;
      }
}

TEST(ProductInPieces, HasTheSameBitsEachTime) {
  if (!kernel_ops::has_onednn()) GTEST_SKIP() << "oneDNN's product is not there or slow here";
  const at::Tensor x = random({777, 512}), weight = random({512, 512}, at::kFloat, 2);
  const at::Tensor first = multiplied(x, weight, kernel_ops::Rows::of_the_result);
  for (const int64_t rows : {64, 512, 600, 1000})
    multiplied(random({rows, 512}), weight, kernel_ops::Rows::of_the_result);
  EXPECT_TRUE(same(multiplied(x, weight, kernel_ops::Rows::of_the_result), first));
}

TEST(ProductInPieces, OfStridedOperands) {
  if (!kernel_ops::has_onednn()) GTEST_SKIP() << "oneDNN's product is not there or slow here";
  const at::Tensor x = random({512, 333}).t(), weight = random({512, 600}).slice(1, 0, 300);
  EXPECT_TRUE(near(multiplied(x, weight, kernel_ops::Rows::of_the_result), at::mm(x, weight), 512));
}

/// What products of decoded codes are made of: numbers with few significant bits.
at::Tensor codes_like(at::IntArrayRef sizes, uint64_t seed) {
  return (random(sizes, at::kFloat, seed) * 8).round().clamp(-15, 15) * 0x1p-20;
}

TEST(ProductOfSixteenBits, IsRoundedOnceWhoeverMultiplies) {
  // The last has several blocks of rows and columns (multiply_in_float32).
  for (const auto dtype : {at::kBFloat16, at::kHalf})
    for (const auto& [m, k, n] : {std::array{1, 1, 1}, std::array{0, 8, 3}, std::array{3, 0, 2},
                                  std::array{33, 70, 5}, std::array{300, 4100, 260}}) {
      SCOPED_TRACE(::testing::Message() << dtype << " " << m << " " << k << " " << n);
      const at::Tensor a = (codes_like({m, k}, 1) * 0x1p20).to(dtype),
                       b = (codes_like({k, n}, 2) * 0x1p10).to(dtype),
                       before = (codes_like({m, n}, 3) * 0x1p20).to(dtype);
      const at::Tensor exact = at::mm(a.to(at::kDouble), b.to(at::kDouble));
      const at::Tensor bt_columns = b.t().contiguous().t(),
                       padded = at::cat({b, b}, 1).slice(1, 0, n);
      for (const at::Tensor& right : {b, bt_columns, padded}) {
        const at::Tensor result = at::full({m, n}, NAN, a.options());
        kernel_ops::multiply({{a}, {right}, dtype}, result);
        EXPECT_TRUE(same(result, exact.to(dtype)));
        result.copy_(before);
        kernel_ops::multiply({{a}, {right}, dtype, {.alpha = -0.5, .beta = 1}}, result);
        EXPECT_TRUE(same(result, (before.to(at::kDouble) - 0.5 * exact).to(dtype)));
        at::Tensor wide = before.to(at::kFloat);
        kernel_ops::multiply({{a}, {right}, at::kFloat, {.alpha = -0.5, .beta = 1}}, wide);
        EXPECT_TRUE(same(wide, (before.to(at::kDouble) - 0.5 * exact).to(at::kFloat)));
      }
    }
}

void write_independent_of_threads(const at::Tensor& a, const at::Tensor& b,
                                  const at::Tensor& result) {
  kernel_ops::multiply({{a}, {b}, at::kFloat, {.sums = kernel_ops::Sums::independent_of_threads}},
                       result);
}

at::Tensor independent_of_threads(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor result = at::full({a.size(0), b.size(1)}, NAN, a.options());
  write_independent_of_threads(a, b, result);
  return result;
}

TEST(ProductInTiles, OfFewBitsIsExactWhereItsSumsAre) {
  for (const auto& [m, k, n] :
       {std::array{1, 1, 1}, std::array{3, 300, 5}, std::array{257, 64, 513},
        std::array{600, 33, 1}, std::array{2, 0, 3}}) {
    SCOPED_TRACE(::testing::Message() << m << " " << k << " " << n);
    const at::Tensor a = codes_like({m, k}, 1), b = codes_like({k, n}, 2);
    const at::Tensor expected = at::mm(a.to(at::kDouble), b.to(at::kDouble)).to(at::kFloat);
    const at::Tensor at_columns = a.t().contiguous().t(), bt_columns = b.t().contiguous().t();
    for (const at::Tensor& left : {a, at_columns})
      for (const at::Tensor& right : {b, bt_columns})
        EXPECT_TRUE(same(independent_of_threads(left, right), expected));
  }
}

TEST(ProductInTiles, NumbersThatAreNoBfloat16AreNotRounded) {
  const at::Tensor a = codes_like({40, 70}, 1), b = codes_like({70, 30}, 2);
  for (const double other : {1 + 0x1p-12, 0x1p-130}) {
    const at::Tensor changed = a.clone();
    changed[39][69] = other;
    const at::Tensor expected = at::mm(changed.to(at::kDouble), b.to(at::kDouble)).to(at::kFloat);
    EXPECT_TRUE(near(independent_of_threads(changed, b), expected, /*magnitude=*/8)) << other;
    const at::Tensor tiny = at::full({1, 1}, other), one = at::full({1, 1}, 1.0);
    EXPECT_TRUE(same(independent_of_threads(tiny, one), tiny)) << other;
  }
}

TEST(ProductInTiles, HasTheSameBitsWhereverItsResultLies) {
  for (const auto& [m, k, n] :
       {std::array{1, 31, 48}, std::array{64, 48, 7}, std::array{300, 500, 300}}) {
    const at::Tensor a = random({m, k}), b = random({k, n}, at::kFloat, 2);
    const at::Tensor behind_one = at::empty({m * n + 1}).narrow(0, 1, m * n).view({m, n});
    write_independent_of_threads(a, b, behind_one);
    EXPECT_TRUE(same(behind_one, independent_of_threads(a, b))) << m << " " << k << " " << n;
  }
}

TEST(ProductErrors, NumbersWithoutACommonDimensionAreNotRead) {
  const at::Tensor a = random({8, 5}), b = random({4, 3});
  EXPECT_ERROR(independent_of_threads(a, b), c10::ValueError,
               "product: expected matrices [m, k] and [k, n], got [8, 5] and [4, 3]. Reshape or "
               "transpose them.");
}

TEST(ProductInTiles, HasTheSameBitsOnAnyNumberOfThreads) {
  const at::Tensor a = random({300, 500}).to(at::kBFloat16).to(at::kFloat),
                   b = random({500, 700}, at::kFloat, 2).to(at::kBFloat16).to(at::kFloat);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor one = independent_of_threads(a, b);
  for (const int threads : {2, 3}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(same(independent_of_threads(a, b), one)) << threads;
  }
  at::set_num_threads(before);
  EXPECT_TRUE(near(one, at::mm(a.to(at::kDouble), b.to(at::kDouble)).to(at::kFloat),
                   /*magnitude=*/512));
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_product
