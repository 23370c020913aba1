#include "kernel_ops/decoded_product.h"

#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include "kernel_ops/product.h"
#include "kernel_ops/register.h"

namespace tandem::kernel_ops {

Specs<1> MultiplyDecoded::shapes(const Tensor& a, const Tensor& b) {
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2 && a.sym_size(1) == b.sym_size(0),
                    "multiply_decoded: expected matrices [m, k] and [k, n], got ", a.sym_sizes(),
                    " and ", b.sym_sizes(), ". Reshape or transpose them.");
  return {ResultSpec{{a.sym_size(0), b.sym_size(1)}, a.scalar_type()}};
}

void MultiplyDecoded::cpu(const Tensor& a, const Tensor& b, Results<1>& results) {
  multiply(Product({a}, {b}, at::kFloat, Rows::of_the_result, Sums::independent_of_threads),
           results[0]);
}

Results<1> MultiplyDecoded::reference(const Tensor& a, const Tensor& b) { return {at::mm(a, b)}; }

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<MultiplyDecoded>(
      library, {{"cpu", at::kCPU, Takes<kStatistic, kStatistic>::these, MultiplyDecoded::cpu}});
}

}  // namespace tandem::kernel_ops
