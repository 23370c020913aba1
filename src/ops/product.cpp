#include "ops/product.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>

#include "kernel_ops/quantize.h"
#include "kernel_ops/shapes.h"
#include "kernels/parallel.h"

namespace at::native {
// oneDNN's product, result = alpha a b + beta result. libtorch exports it without a header: weak, so that one without it loads too.
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result,
                                         float beta, float alpha);
}  // namespace at::native

/// libtorch exports it where it is built with MKL. Returns the number before; 0: that of the process.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);

namespace tandem::ops {

namespace {

// Multiplications from which oneDNN is faster than at::mm in float32, measured on Zen 4; twice as many where rows are left to at::mm.
constexpr int64_t kWorthIt = 1 << 24;

/// Whether oneDNN is the faster way to large products of this dtype. at::mm takes it for bfloat16 too, after checks of its own, but
/// gives float32 to MKL, which on processors of other makers than Intel is slower (benchmarks/products.py; measured on Zen 4).
bool prefers_onednn([[maybe_unused]] at::ScalarType dtype) {
#if defined(__x86_64__)
  static const bool has_slow_mkl = !__builtin_cpu_is("intel");
  return has_onednn() && (dtype == at::kBFloat16 || (dtype == at::kFloat && has_slow_mkl)) &&
         at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

/// A view without a dispatch: the direct path holds plain tensors only.
at::Tensor raw_view(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides);
}

/// `count` rows or columns of a matrix, from `first` on.
at::Tensor part_of(const at::Tensor& matrix, int64_t dim, int64_t first, int64_t count) {
  if (count == matrix.size(dim)) return matrix;
  int64_t sizes[] = {matrix.size(0), matrix.size(1)};
  sizes[dim] = count;
  return at::native::as_strided_tensorimpl(matrix, sizes, matrix.strides(),
                                           matrix.storage_offset() + first * matrix.stride(dim));
}

/// The largest number up to `rows` of which all but the two leading bits are zero: two per octave.
int64_t rounded_down(int64_t rows) {
  const int dropped =
      std::max(static_cast<int>(std::bit_width(static_cast<uint64_t>(rows))) - 2, 0);
  return rows >> dropped << dropped;
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

/// This thread's products in MKL run on it alone, inside a parallel region too.
struct OneMklThread {
  OneMklThread() : before(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0) {}
  ~OneMklThread() {
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before);
  }
  OneMklThread(const OneMklThread&) = delete;
  OneMklThread& operator=(const OneMklThread&) = delete;
  const int before;
};

/// result = a b in tiles of a fixed size, each by one thread: what a tile holds depends on its operands alone.
void multiply_in_tiles(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result) {
  constexpr int64_t kTile = 256;
  const int64_t rows = a.size(0), cols = b.size(1);
  const int64_t down = (rows + kTile - 1) / kTile, across = (cols + kTile - 1) / kTile;
  const auto multiply_tile = [&](int64_t tile) {
    const int64_t row = tile / across * kTile, col = tile % across * kTile;
    const int64_t height = std::min(kTile, rows - row), width = std::min(kTile, cols - col);
    at::Tensor target = part_of(part_of(result, 0, row, height), 1, col, width);
    at::cpu::mm_out(target, part_of(a, 0, row, height), part_of(b, 1, col, width));
  };
  kernels::parallel_for(0, down * across, 1, [&](int64_t first, int64_t last) {
    const OneMklThread one;
    for (int64_t tile = first; tile < last; ++tile) multiply_tile(tile);
  });
}

/// How a product may be summed. oneDNN and MKL share a long sum of few elements out among threads, so that the last bits depend on their
/// number; those of quantized products must not.
enum class Sums { any, independent_of_threads };

at::Tensor multiply(Call& call, const at::Tensor& a, const at::Tensor& b, c10::SymIntArrayRef sizes,
                    Rows rows, Sums sums = Sums::any) {
  constexpr auto kDtypes = kernel_ops::kArithmetic;
  if (call.path() == Path::direct && a.scalar_type() == b.scalar_type() &&
      kDtypes.has(a.scalar_type()) && kernel_ops::detail::is_plain_cpu(a) &&
      kernel_ops::detail::is_plain_cpu(b)) {
    at::Tensor result = call.frame().allocate(C10_AS_INTARRAYREF_SLOW(sizes), a.scalar_type(), a);
    at::Tensor target =
        result.dim() == 2 ? result : raw_view(result, {a.size(0), b.size(1)}, {b.size(1), 1});
    if (sums == Sums::any) {
      multiply_into(a, b, target, rows);
    } else {
      multiply_in_tiles(a, b, target);
    }
    return result;
  }
  const at::Tensor result = at::mm(a, b);
  // Batched gradients (is_grads_batched) lose a last dimension of one column in torch's product of two batched matrices.
  return static_cast<size_t>(result.dim()) == sizes.size() ? result : result.reshape_symint(sizes);
}

/// An operand of a product of codes: its numbers in float32, and the scale that the product gets at its end, if its format has one.
struct Decoded {
  Decoded(Call& call, size_t read)
      : quantizer(*call.type(read).quantizer),
        values(call.run<kernel_ops::Decode>(call.in(read), call.in(read, 1), quantizer,
                                            call.type(read).direction == Direction::column)[0]) {
    if (quantizer.format->layout.applies_at_end) scale = call.in(read, 1);
  }
  const Quantizer& quantizer;
  const at::Tensor values;
  std::optional<at::Tensor> scale;
};

}  // namespace

bool has_onednn() {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512vl") &&
                                 __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq");
  return at::native::mkldnn_matmul != nullptr && has_avx512;
#else
  return false;
#endif
}

void multiply_by_onednn(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result,
                        Rows rows, bool accumulate) {
  const bool contracted = rows == Rows::contracted, rounds = a.scalar_type() == at::kFloat;
  const int64_t count = a.size(contracted ? 1 : 0);
  const int64_t per_row = b.size(1) * a.size(contracted ? 0 : 1);
  for (int64_t first = 0, piece = 0; first < count || first == 0; first += piece) {
    const int64_t rest = count - first;
    piece = rounds ? rounded_down(rest) : rest;
    const bool is_worth_it = piece * per_row >= (piece == count ? kWorthIt : 2 * kWorthIt);
    if (!is_worth_it) piece = rest;
    const at::Tensor part_a = part_of(a, contracted ? 1 : 0, first, piece),
                     part_b = contracted ? part_of(b, 0, first, piece) : b;
    at::Tensor target = contracted ? result : part_of(result, 0, first, piece);
    const bool adds = contracted && (accumulate || first != 0);
    if (is_worth_it) {
      at::native::mkldnn_matmul(part_a, part_b, target, /*beta=*/adds ? 1 : 0, /*alpha=*/1);
    } else if (adds) {
      at::cpu::addmm_out(target, target, part_a, part_b);
    } else {
      at::cpu::mm_out(target, part_a, part_b);
    }
    if (piece == 0) break;
  }
}

void multiply_into(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, Rows rows) {
  if (prefers_onednn(a.scalar_type())) {
    multiply_by_onednn(a, b, result, rows);
  } else {
    at::Tensor target = result;
    at::cpu::mm_out(target, a, b);
  }
}

void check_one_device(const Call& call, std::initializer_list<size_t> reads) {
  const size_t first = *reads.begin();
  for (const size_t read : reads)
    TORCH_CHECK_VALUE(!call.has(read) || call.in(read).device() == call.in(first).device(),
                      call.step().name, ": expected ", call.step().read_names[first], " and ",
                      call.step().read_names[read], " on one device, got ", call.in(first).device(),
                      " and ", call.in(read).device(),
                      ". Move the module or its input: both have .to(device).");
}

at::Tensor product(Call& call, Factor a, Factor b, c10::SymIntArrayRef sizes,
                   at::ScalarType dtype) {
  check_one_device(call, {a.read, b.read});
  const Rows rows = a.transposed ? Rows::contracted : Rows::of_the_result;
  if (call.format(a.read) != Format::codes)
    return multiply(call, matrix(call.in(a.read), a.transposed, call.path()),
                    matrix(call.in(b.read), b.transposed, call.path()), sizes, rows);
  const Decoded first(call, a.read), second(call, b.read);
  const at::Tensor result = multiply(call, matrix(first.values, a.transposed, call.path()),
                                     matrix(second.values, b.transposed, call.path()), sizes, rows,
                                     Sums::independent_of_threads);
  if (!first.scale && !second.scale && dtype == result.scalar_type()) return result;
  return call.run<kernel_ops::ScaleProduct>(result, first.scale, second.scale, dtype)[0];
}

void product_into(Call& call, Factor a, Factor b, const at::Tensor& target, bool accumulate) {
  check_one_device(call, {a.read, b.read});
  if (call.format(a.read) == Format::codes) {
    const c10::SymInt sizes[] = {target.sym_size(0), target.sym_size(1)};
    const at::Tensor result = product(call, a, b, sizes, at::kFloat);
    accumulate ? target.add_(result) : target.copy_(result);
    return;
  }
  const auto operand =
      [&](Factor factor) {  // exact in the wider dtype, and so is the sum's only rounding
        const at::Tensor& tensor = call.in(factor.read);
        const at::ScalarType wide = at::promote_types(tensor.scalar_type(), target.scalar_type());
        return matrix(tensor.to(wide), factor.transposed, call.path());
      };
  const at::Tensor left = operand(a), right = operand(b);
  const bool is_same = left.scalar_type() == target.scalar_type();
  if (call.path() == Path::direct && is_same && target.is_contiguous() &&
      kernel_ops::kArithmetic.has(target.scalar_type()) && kernel_ops::detail::is_plain_cpu(left) &&
      kernel_ops::detail::is_plain_cpu(right) && kernel_ops::detail::is_plain_cpu(target)) {
    at::Tensor result = target;
    if (prefers_onednn(target.scalar_type()) && a.transposed) {
      multiply_by_onednn(left, right, result, Rows::contracted, accumulate);
    } else {
      at::cpu::addmm_out(result, result, left, right, /*beta=*/accumulate ? 1 : 0);
    }
    return;
  }
  if (!is_same) {
    const at::Tensor result = at::mm(left, right);
    accumulate ? target.add_(result) : target.copy_(result);
  } else {
    target.addmm_(left, right, /*beta=*/accumulate ? 1 : 0);
  }
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
