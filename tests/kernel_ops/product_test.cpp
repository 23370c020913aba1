// Products in pieces: any number of rows gives the product, and what is cut depends on the shape
// alone.
#include "kernel_ops/product.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>

#include "support/tensors.h"

namespace tandem::testing {
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

}  // namespace
}  // namespace tandem::testing
