#include "kernel_ops/product.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>

#include "kernel_ops/kernel_op.h"
#include "kernels/parallel.h"

namespace at::native {
// oneDNN's product, result = alpha a b + beta result. libtorch exports it without a header: weak,
// so that one without it loads too.
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result,
                                         float beta, float alpha);
}  // namespace at::native

/// libtorch exports it where it is built with MKL. Returns the number before; 0: that of the
/// process.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);

namespace tandem::kernel_ops {

namespace {

// Multiplications from which oneDNN is faster than at::mm in float32, measured on Zen 4; twice as
// many where rows are left to at::mm.
constexpr int64_t kWorthIt = 1 << 24;

/// Whether oneDNN is the faster way to large products of this dtype. at::mm takes it for bfloat16
/// too, after checks of its own, but gives float32 to MKL, which on processors of other makers than
/// Intel is slower (benchmarks/products.py; measured on Zen 4).
bool prefers_onednn([[maybe_unused]] at::ScalarType dtype) {
#if defined(__x86_64__)
  static const bool has_slow_mkl = !__builtin_cpu_is("intel");
  return has_onednn() && (dtype == at::kBFloat16 || (dtype == at::kFloat && has_slow_mkl)) &&
         at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
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

/// result = a b in tiles of a fixed size, each by one thread: what a tile holds depends on its
/// operands alone.
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

/// Numbers of one dtype that CPU libraries multiply.
bool is_uniform(const ProductType& type) {
  return type.a.quantizer == nullptr && type.b.quantizer == nullptr && type.a.dtype == type.dtype &&
         type.b.dtype == type.dtype && kArithmetic.has(type.dtype);
}

/// Small products are as fast by at::mm.
bool is_for_onednn(const ProductType& type) {
  return type.a.rows * type.a.cols * type.b.cols >= kWorthIt && is_uniform(type) &&
         type.sums == Sums::any && prefers_onednn(type.dtype);
}

constexpr ProductImplementation kOneDnn{
    .name = "onednn",
    .device = at::kCPU,
    .accepts = is_for_onednn,
    .run =
        [](const Product& product, const at::Tensor& result) {
          multiply_by_onednn(product.a.matrix, product.b.matrix, result, product.type.rows,
                             product.type.accumulate, product.type.alpha);
        },
};

/// result = alpha a b, or result += alpha a b, without a dispatch.
void multiply_by_aten(const at::Tensor& a, const at::Tensor& b, at::Tensor result, bool accumulate,
                      double alpha) {
  if (accumulate || alpha != 1) {
    at::cpu::addmm_out(result, result, a, b, /*beta=*/accumulate ? 1 : 0, alpha);
  } else {
    at::cpu::mm_out(result, a, b);
  }
}

/// at::mm without a dispatch: MKL for float32, oneDNN for bfloat16.
constexpr ProductImplementation kAten{
    .name = "aten",
    .device = at::kCPU,
    .accepts = [](const ProductType& type) { return is_uniform(type) && type.sums == Sums::any; },
    .run =
        [](const Product& product, const at::Tensor& result) {
          multiply_by_aten(product.a.matrix, product.b.matrix, result, product.type.accumulate,
                           product.type.alpha);
        },
};

constexpr ProductImplementation kTiles{
    .name = "tiles",
    .device = at::kCPU,
    .accepts =
        [](const ProductType& type) {
          return is_uniform(type) && !type.accumulate && type.alpha == 1;
        },
    .run =
        [](const Product& product, const at::Tensor& result) {
          multiply_in_tiles(product.a.matrix, product.b.matrix, result);
        },
};

/// The list. What is independent of threads is right everywhere, and comes last as it is slower.
std::atomic<const void*>& products() {
  static std::atomic<const void*>* const list = [] {
    std::atomic<const void*>& empty = detail::list_of("product");
    for (const auto* row : {&kTiles, &kAten, &kOneDnn}) detail::prepend(empty, *row);
    return &empty;
  }();
  return *list;
}

ProductType::Operand operand(const Factor& factor) {
  const at::IntArrayRef sizes = factor.matrix.sizes(), strides = factor.matrix.strides();
  return {sizes[0],         sizes[1],        strides[0], strides[1], factor.matrix.scalar_type(),
          factor.quantizer, factor.direction};
}

bool is_plain_on(c10::Device device, const Factor& factor) {
  return factor.matrix.device() == device && is_plain(factor.matrix) &&
         std::ranges::all_of(std::array{factor.dequant_scale, factor.amax}, [&](const auto* scale) {
           return scale == nullptr || (scale->device() == device && is_plain(*scale));
         });
}

}  // namespace

Product::Product(const Factor& left, const Factor& right, at::ScalarType dtype, Rows rows,
                 Sums sums, bool accumulate, double alpha)
    : a(left),
      b(right),
      type{operand(left), operand(right), dtype, rows, sums, accumulate, alpha} {}

void register_product(const ProductImplementation& implementation) {
  detail::prepend(products(), implementation);
}

ProductChoice choose(const Product& product) {
  const c10::Device device = product.a.matrix.device();
  if (!is_plain_on(device, product.a) || !is_plain_on(device, product.b)) return nullptr;
  auto* next = static_cast<ProductChoice>(products().load(std::memory_order_acquire));
  while (next != nullptr && !(next->row.device == device.type() && next->row.accepts(product.type)))
    next = next->next;
  return next;
}

ImplementationNames multiply(const Product& product, const at::Tensor& result) {
  if (const ProductChoice choice = choose(product)) {
    choice->row.run(product, result);
    return choice->bit;
  }
  at::Tensor target = result;
  if (product.type.accumulate || product.type.alpha != 1) {
    at::addmm_out(target, target, product.a.matrix, product.b.matrix,
                  /*beta=*/product.type.accumulate ? 1 : 0, product.type.alpha);
  } else {
    at::mm_out(target, product.a.matrix, product.b.matrix);
  }
  return kReference;
}

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
                        Rows rows, bool accumulate, double alpha) {
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
    const bool adds = accumulate || (contracted && first != 0);
    if (is_worth_it) {
      at::native::mkldnn_matmul(part_a, part_b, target, /*beta=*/adds ? 1 : 0,
                                static_cast<float>(alpha));
    } else {
      multiply_by_aten(part_a, part_b, target, adds, alpha);
    }
    if (piece == 0) break;
  }
}

}  // namespace tandem::kernel_ops
