#include "ops/product.h"

#include <ATen/Context.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/util/Exception.h>

#include "kernel_ops/quantize.h"
#include "kernel_ops/shapes.h"

namespace at::native {
// oneDNN's product, result = alpha a b + beta result. libtorch exports it without a header: weak, so that one without it loads too.
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result,
                                         float beta, float alpha);
}  // namespace at::native

namespace tandem::ops {

namespace {

/// Whether oneDNN is the faster way to this product. at::mm takes it for bfloat16 too, after checks of its own, but gives float32 to
/// MKL, which on processors of other makers than Intel is slower (benchmarks/products.py; measured on Zen 4).
bool prefers_onednn([[maybe_unused]] const at::Tensor& a, [[maybe_unused]] const at::Tensor& b) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512vl") &&
                                 __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq");
  static const bool has_slow_mkl = !__builtin_cpu_is("intel");
  constexpr int64_t kWorthIt = 1 << 20;  // multiplications that take as long as oneDNN's set-up
  return at::native::mkldnn_matmul != nullptr && has_avx512 &&
         (a.scalar_type() == at::kBFloat16 || (a.scalar_type() == at::kFloat && has_slow_mkl)) &&
         a.size(0) * a.size(1) * b.size(1) >= kWorthIt && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

/// A view without a dispatch: the direct path holds plain tensors only.
at::Tensor raw_view(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides);
}

/// `tensor` as a matrix over its last dimension, transposed or not.
at::Tensor matrix(const at::Tensor& tensor, bool transposed, Path path) {
  if (path != Path::direct) {
    const at::Tensor flat =
        tensor.dim() == 2
            ? tensor
            : tensor.reshape_symint({kernel_ops::rows_of(tensor), tensor.sym_size(-1)});
    return transposed ? flat.t() : flat;
  }
  const at::Tensor flat =
      tensor.dim() == 2 || tensor.is_contiguous() ? tensor : tensor.contiguous();
  const int64_t cols = flat.size(-1);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < flat.dim(); ++d) rows *= flat.size(d);
  const int64_t row_stride = flat.dim() == 2 ? flat.stride(0) : cols,
                col_stride = flat.dim() == 2 ? flat.stride(1) : 1;
  if (transposed) return raw_view(flat, {cols, rows}, {col_stride, row_stride});
  return flat.dim() == 2 ? flat : raw_view(flat, {rows, cols}, {row_stride, col_stride});
}

/// How a product may be summed. oneDNN shares a long sum of few elements out among threads, so that the last bits depend on their
/// number; those of quantized products must not.
enum class Sums { any, independent_of_threads };

at::Tensor multiply(Call& call, const at::Tensor& a, const at::Tensor& b, c10::SymIntArrayRef sizes,
                    Sums sums = Sums::any) {
  if (call.path() == Path::direct && call.frame().has_kernels()) {
    at::Tensor result = call.frame().allocate(C10_AS_INTARRAYREF_SLOW(sizes), a.scalar_type(), a);
    at::Tensor target =
        result.dim() == 2 ? result : raw_view(result, {a.size(0), b.size(1)}, {b.size(1), 1});
    if (sums == Sums::any && prefers_onednn(a, b)) {
      at::native::mkldnn_matmul(a, b, target, /*beta=*/0, /*alpha=*/1);
    } else {
      at::cpu::mm_out(target, a, b);
    }
    return result;
  }
  const at::Tensor result = at::mm(a, b);
  return sizes.size() == 2 ? result : result.reshape_symint(sizes);
}

std::string_view format_name(Format format) { return format == Format::fp8_e4m3 ? "e4m3" : "e5m2"; }

}  // namespace

at::Tensor product(Call& call, Factor a, Factor b, c10::SymIntArrayRef sizes,
                   at::ScalarType dtype) {
  if (!is_fp8(call.format(a.read)))
    return multiply(call, matrix(call.in(a.read), a.transposed, call.path()),
                    matrix(call.in(b.read), b.transposed, call.path()), sizes);
  const at::Tensor a_values =
      call.run<kernel_ops::Decode>(call.in(a.read), format_name(call.format(a.read)))[0];
  const at::Tensor b_values =
      call.run<kernel_ops::Decode>(call.in(b.read), format_name(call.format(b.read)))[0];
  const at::Tensor codes_product =
      multiply(call, matrix(a_values, a.transposed, call.path()),
               matrix(b_values, b.transposed, call.path()), sizes, Sums::independent_of_threads);
  return call.run<kernel_ops::ScaleProduct>(codes_product, call.in(a.read, 1), call.in(b.read, 1),
                                            dtype)[0];
}

c10::SymDimVector output_sizes(const at::Tensor& x, const at::Tensor& weight) {
  c10::SymDimVector sizes = kernel_ops::sizes_of(x);
  sizes.back() = weight.sym_size(0);
  return sizes;
}

at::Tensor linear_product(Call& call, size_t x, size_t weight, at::ScalarType dtype) {
  const at::Tensor &input = call.in(x), &matrix = call.in(weight);
  TORCH_CHECK_VALUE(matrix.dim() == 2,
                    "linear: expected weight of shape [out_features, in_features], got ",
                    matrix.sym_sizes(), ". Pass a matrix.");
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.sym_size(-1) == matrix.sym_size(1),
                    "linear: expected x with ", matrix.sym_size(1),
                    " features in its last dimension, as weight ", matrix.sym_sizes(),
                    " has, got x of shape ", input.sym_sizes(), ". Build the op with in_features=",
                    input.dim() ? input.sym_size(-1) : c10::SymInt(1), " or reshape x.");
  return product(call, {x}, {weight, true}, output_sizes(input, matrix), dtype);
}

}  // namespace tandem::ops
