#include "kernel_ops/product/product.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>

#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/product/scaled_product.h"
#include "kernels/bfloat16.h"
#include "kernels/parallel.h"
#include "kernels/targets.h"

namespace at::native {
// oneDNN's product, result = alpha a b + beta result. libtorch exports it without a header. The
// symbol is weak, so that this library loads with a libtorch that lacks it.
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result,
                                         float beta, float alpha);
}  // namespace at::native

/// libtorch exports it if it is built with MKL. Returns the number before; 0 means the process's.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);

/// MKL's c = alpha a b + beta c of bfloat16 matrices, summed in float32. The integers for layout
/// and transposition are cblas's.
extern "C" __attribute__((weak)) void cblas_gemm_bf16bf16f32(int layout, int a_transposed,
                                                             int b_transposed, int m, int n, int k,
                                                             float alpha, const uint16_t* a,
                                                             int a_stride, const uint16_t* b,
                                                             int b_stride, float beta, float* c,
                                                             int c_stride);

namespace tandem::kernel_ops {

namespace {

// The number of multiplications from which oneDNN beats at::mm in float32, measured on Zen 4. It is
// twice as large if some rows are left to at::mm.
constexpr int64_t kWorthIt = 1 << 24;

/// libtorch's answer whether oneDNN multiplies a dtype on this processor.
bool onednn_multiplies([[maybe_unused]] const char* question) {
#if defined(__x86_64__)
  const auto op = c10::Dispatcher::singleton().findSchema({question, ""});
  return op && op->typed<bool()>().redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU));
#else
  return false;
#endif
}

/// Whether at::mm multiplies this 16-bit dtype in its own loops, which take up to a hundred times
/// as long as float32. It does on x86 processors without the instructions that oneDNN needs.
bool has_slow_mm([[maybe_unused]] at::ScalarType dtype) {
#if defined(__x86_64__)
  static const bool has_half = onednn_multiplies("mkldnn::_is_mkldnn_fp16_supported");
  if (dtype != at::kHalf && dtype != at::kBFloat16) return false;
  const bool is_known = dtype == at::kHalf ? has_half : has_onednn();
  return !is_known || !at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

/// Whether oneDNN is faster than at::mm for large products of this dtype. at::mm uses oneDNN for
/// bfloat16 too, after checks of its own, but MKL for float32, which is slower on processors that
/// are not Intel's (benchmarks/products.py; measured on Zen 4).
bool prefers_onednn([[maybe_unused]] at::ScalarType dtype) {
#if defined(__x86_64__)
  static const bool has_slow_mkl = !__builtin_cpu_is("intel");
  return has_onednn() && (dtype == at::kBFloat16 || (dtype == at::kFloat && has_slow_mkl)) &&
         at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

/// `count` rows or columns of a matrix, starting at `first`.
at::Tensor part_of(const at::Tensor& matrix, int64_t dim, int64_t first, int64_t count) {
  if (count == matrix.size(dim)) return matrix;
  int64_t sizes[] = {matrix.size(0), matrix.size(1)};
  sizes[dim] = count;
  return at::native::as_strided_tensorimpl(matrix, sizes, matrix.strides(),
                                           matrix.storage_offset() + first * matrix.stride(dim));
}

/// The largest number up to `rows` in which all bits but the two leading ones are zero.
int64_t rounded_down(int64_t rows) {
  const int dropped =
      std::max(static_cast<int>(std::bit_width(static_cast<uint64_t>(rows))) - 2, 0);
  return rows >> dropped << dropped;
}

/// The position and size of a tile in a result [rows, cols].
struct Tile {
  int64_t row, col, height, width;
};

/// Calls `multiply` for tiles of a fixed size, each on one thread: the values in a tile then depend
/// on its operands alone.
template <typename Multiply>
void for_each_tile(int64_t rows, int64_t cols, const Multiply& multiply) {
  constexpr int64_t kTile = 256;
  const int64_t down = (rows + kTile - 1) / kTile, across = (cols + kTile - 1) / kTile;
  kernels::parallel_for(0, down * across, 1, [&](int64_t first, int64_t last) {
    const OneMklThread one;
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t row = tile / across * kTile, col = tile % across * kTile;
      multiply(Tile{row, col, std::min(kTile, rows - row), std::min(kTile, cols - col)});
    }
  });
}

/// Whether the processor multiplies bfloat16, TANDEM_MAX_CPU_ISA allows it, and MKL uses it. On
/// processors that are not Intel's, MKL computes in float32.
bool multiplies_bfloat16() {
#if defined(__x86_64__)
  static const bool does = cblas_gemm_bf16bf16f32 != nullptr && __builtin_cpu_is("intel") &&
                           __builtin_cpu_supports("avx512bf16") &&
                           kernels::supported_targets().front().starts_with("AVX3");
  return does;
#else
  return false;
#endif
}

/// A float32 matrix in bfloat16, if every element is exact in it.
class Narrowed {
 public:
  explicit Narrowed(const at::Tensor& matrix) {
    const c10::DimVector strides = strides_of(matrix);
    is_transposed_ = strides[1] != 1;
    stride_ = strides[is_transposed_ ? 1 : 0];
    if (strides[is_transposed_ ? 0 : 1] != 1 || stride_ != matrix.size(is_transposed_ ? 0 : 1))
      return;
    numbers_ = empty_cpu({matrix.numel()}, at::kBFloat16);
    fits_ = kernels::cpu::to_bfloat16_if_exact(matrix.const_data_ptr<float>(),
                                               static_cast<size_t>(matrix.numel()), data());
  }
  bool fits() const { return fits_; }
  /// cblas's constant for the transposition.
  int form() const { return is_transposed_ ? 112 : 111; }
  int stride() const { return static_cast<int>(stride_); }
  const uint16_t* at(int64_t row, int64_t col) const {
    return data() + row * (is_transposed_ ? 1 : stride_) + col * (is_transposed_ ? stride_ : 1);
  }

 private:
  uint16_t* data() const { return static_cast<uint16_t*>(numbers_.data_ptr()); }

  at::Tensor numbers_;
  int64_t stride_ = 0;
  bool is_transposed_ = false, fits_ = false;
};

/// result = a b by bfloat16 products that are summed in float32, if all elements are exact in
/// bfloat16, as those of decoded codes are. Returns whether it was computed.
bool multiply_in_bfloat16(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result) {
  const auto most = static_cast<int64_t>(std::numeric_limits<int>::max());
  if (!multiplies_bfloat16() || result.scalar_type() != at::kFloat || result.numel() == 0 ||
      a.numel() == 0 || a.numel() > most || b.numel() > most)
    return false;
  const Narrowed left(a);
  if (!left.fits()) return false;
  const Narrowed right(b);
  if (!right.fits()) return false;
  constexpr int kRowMajor = 101;
  for_each_tile(a.size(0), b.size(1), [&](const Tile& tile) {
    cblas_gemm_bf16bf16f32(
        kRowMajor, left.form(), right.form(), static_cast<int>(tile.height),
        static_cast<int>(tile.width), static_cast<int>(a.size(1)), 1.0f, left.at(tile.row, 0),
        left.stride(), right.at(0, tile.col), right.stride(), 0.0f,
        result.data_ptr<float>() + tile.row * b.size(1) + tile.col, static_cast<int>(b.size(1)));
  });
  return true;
}

/// result = a b in tiles, by multiply_in_bfloat16 if possible. The result is computed at an aligned
/// address, because MKL sums a few rows or columns in an order that depends on the address, and the
/// rows of a group may begin anywhere.
void multiply_in_tiles(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result) {
  constexpr uintptr_t kVector = 64;
  if (reinterpret_cast<uintptr_t>(result.const_data_ptr()) % kVector != 0) {
    const at::Tensor aligned = empty_cpu(result.sizes(), result.scalar_type());
    multiply_in_tiles(a, b, aligned);
    result.copy_(aligned);
    return;
  }
  if (multiply_in_bfloat16(a, b, result)) return;
  for_each_tile(a.size(0), b.size(1), [&](const Tile& tile) {
    at::Tensor target = part_of(part_of(result, 0, tile.row, tile.height), 1, tile.col, tile.width);
    at::cpu::mm_out(target, part_of(a, 0, tile.row, tile.height),
                    part_of(b, 1, tile.col, tile.width));
  });
}

/// Whether the operands are unquantized and all of one dtype that CPU libraries multiply.
bool is_uniform(const ProductType& type) {
  return type.a.quantizer == nullptr && type.b.quantizer == nullptr && type.a.dtype == type.dtype &&
         type.b.dtype == type.dtype && kArithmetic.has(type.dtype) && !type.has_epilogue();
}

/// Whether oneDNN is worthwhile: small products are as fast by at::mm.
bool is_for_onednn(const ProductType& type) {
  return type.a.rows * type.a.cols * type.b.cols >= kWorthIt && is_uniform(type) &&
         type.sums == Sums::any && prefers_onednn(type.dtype);
}

/// The left operand of a bfloat16 product, copied if there are gaps between its rows. If the
/// processor has tiles for bfloat16, oneDNN reads beyond the ends of rows that do not fill a tile
/// and multiplies what it finds by zero, which gives NaN for a NaN. torch.mm has this defect too.
at::Tensor without_gaps(const at::Tensor& matrix) {
  constexpr int64_t kTileColumns = 32;
  const c10::DimVector strides = strides_of(matrix);
  const bool has_gaps = strides[1] == 1 && strides[0] != matrix.size(1);
  return matrix.scalar_type() == at::kBFloat16 && has_gaps && matrix.size(1) % kTileColumns != 0
             ? matrix.contiguous()
             : matrix;
}

constexpr ProductImplementation kOneDnn{
    .name = "onednn",
    .device = at::kCPU,
    .accepts = is_for_onednn,
    .run =
        [](const Product& product, const at::Tensor& result) {
          multiply_by_onednn(without_gaps(product.a.matrix), product.b.matrix, result,
                             product.type.rows, product.type.beta != 0, product.type.alpha);
        },
};

/// result = alpha a b, or result += alpha a b, without a dispatch.
void multiply_by_aten(const at::Tensor& a, const at::Tensor& b, at::Tensor result, bool accumulate,
                      double alpha) {
  if (accumulate || alpha != 1) {
    at::cpu::addmm_out(result, result, without_gaps(a), b, /*beta=*/accumulate ? 1 : 0, alpha);
  } else {
    at::cpu::mm_out(result, without_gaps(a), b);
  }
}

/// at::mm without a dispatch: MKL for float32, oneDNN for bfloat16 and float16.
constexpr ProductImplementation kAten{
    .name = "aten",
    .device = at::kCPU,
    .accepts = [](const ProductType& type) { return is_uniform(type) && type.sums == Sums::any; },
    .run =
        [](const Product& product, const at::Tensor& result) {
          multiply_by_aten(product.a.matrix, product.b.matrix, result, product.type.beta != 0,
                           product.type.alpha);
        },
};

/// sum = alpha a b + beta sum of bfloat16 matrices, in float32, by MKL if the processor multiplies
/// bfloat16. Returns whether it was computed.
bool sum_of_bfloat16(const at::Tensor& a, const at::Tensor& b, const at::Tensor& sum, double alpha,
                     double beta) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (!multiplies_bfloat16() || a.scalar_type() != at::kBFloat16 || a.numel() == 0 ||
      b.numel() == 0 || std::max({a.numel(), b.numel(), sum.numel()}) > kMost)
    return false;
  struct Operand {
    explicit Operand(const at::Tensor& given) {
      const bool lies_transposed = given.stride(0) == 1 && given.stride(1) == given.size(0);
      is_transposed = lies_transposed && !given.is_contiguous();
      matrix = lies_transposed ? given : given.contiguous();
      stride = static_cast<int>(given.size(is_transposed ? 0 : 1));
    }
    int form() const { return is_transposed ? 112 : 111; }
    const uint16_t* data() const { return static_cast<const uint16_t*>(matrix.const_data_ptr()); }
    at::Tensor matrix;
    bool is_transposed = false;
    int stride = 0;
  };
  constexpr int kRowMajor = 101;
  const Operand left(a), right(b);
  cblas_gemm_bf16bf16f32(kRowMajor, left.form(), right.form(), static_cast<int>(a.size(0)),
                         static_cast<int>(b.size(1)), static_cast<int>(a.size(1)),
                         static_cast<float>(alpha), left.data(), left.stride, right.data(),
                         right.stride, static_cast<float>(beta), sum.data_ptr<float>(),
                         static_cast<int>(sum.stride(0)));
  return true;
}

/// result = alpha a b + beta result in float32, rounded once. It widens blocks of a, b and the
/// result, so that its extra memory does not grow with the number of rows.
void multiply_in_float32(const Product& product, const at::Tensor& result) {
  constexpr int64_t kMostElements = 1 << 20;
  const auto [alpha, beta] = std::pair(product.type.alpha, product.type.beta);
  const int64_t rows = result.size(0), cols = result.size(1);
  if (product.type.dtype == at::kFloat &&
      sum_of_bfloat16(product.a.matrix, product.b.matrix, result, alpha, beta))
    return;
  const int64_t most =
      std::max<int64_t>(kMostElements / std::max<int64_t>(product.type.a.cols, 1), 1);
  for (int64_t row = 0, height = 0; row < rows; row += height) {
    height = std::min(most, rows - row);
    const at::Tensor a = part_of(product.a.matrix, 0, row, height).to(at::kFloat);
    for (int64_t col = 0, width = 0; col < cols; col += width) {
      width = std::min(most, cols - col);
      const at::Tensor b = part_of(product.b.matrix, 1, col, width).to(at::kFloat);
      const at::Tensor target = part_of(part_of(result, 0, row, height), 1, col, width);
      const bool is_wide = product.type.dtype == at::kFloat;
      const at::Tensor sum = is_wide ? target : empty_cpu({height, width}, at::kFloat);
      if (!is_wide && beta != 0) sum.copy_(target);
      multiply_by_aten(a, b, sum, beta != 0, alpha);
      if (!is_wide) target.copy_(sum);
    }
  }
}

/// Whether a has few rows, and the columns of b are contiguous. at::mm reads
/// b once for these, which is faster than to widen b in memory (benchmarks/backend.py, few_rows).
bool has_few_rows(const ProductType& type) {
  constexpr int64_t kFewRows = 4;
  return type.a.rows <= kFewRows && type.b.row_stride == 1 && type.beta == 0 && type.alpha == 1;
}

/// Whether the operands have 16 bits and at::mm would multiply them slowly, or not into float32.
bool is_for_float32(const ProductType& type) {
  const at::ScalarType dtype = type.a.dtype;
  const bool is_into_float32 = type.dtype == at::kFloat && type.b.dtype == dtype &&
                               type.a.quantizer == nullptr && type.b.quantizer == nullptr &&
                               (dtype == at::kHalf || dtype == at::kBFloat16) &&
                               !type.has_epilogue();
  return type.sums == Sums::any &&
         (is_into_float32 || (is_uniform(type) && has_slow_mm(type.dtype) && !has_few_rows(type)));
}

constexpr ProductImplementation kInFloat32{
    .name = "float32", .device = at::kCPU, .accepts = is_for_float32, .run = multiply_in_float32};

constexpr ProductImplementation kTiles{
    .name = "tiles",
    .device = at::kCPU,
    .accepts =
        [](const ProductType& type) {
          return is_uniform(type) && type.beta == 0 && type.alpha == 1;
        },
    .run =
        [](const Product& product, const at::Tensor& result) {
          multiply_in_tiles(product.a.matrix, product.b.matrix, result);
        },
};

/// The list of implementations. The one whose sums do not depend on the number of threads accepts
/// other products too, but is slower, so it stands last.
std::atomic<const void*>& products() {
  static std::atomic<const void*>* const list = [] {
    std::atomic<const void*>& empty = detail::list_of("product");
    for (const auto* row : {&kTiles, &kAten, &kInFloat32, &kOneDnn, &kScaledMm})
      detail::prepend(empty, *row);
    return &empty;
  }();
  return *list;
}

ProductType::Operand operand(const CodedMatrix& read) {
  const at::IntArrayRef sizes = read.matrix.sizes();
  const c10::DimVector strides = strides_of(read.matrix);
  return {sizes[0],       sizes[1],      strides[0], strides[1], read.matrix.scalar_type(),
          read.quantizer, read.direction};
}

bool is_plain_on(c10::Device device, const CodedMatrix& operand) {
  return operand.matrix.device() == device && is_plain(operand.matrix) &&
         std::ranges::all_of(
             std::array{operand.dequant_scale, operand.amax}, [&](const auto* scale) {
               return scale == nullptr || (scale->device() == device && is_plain(*scale));
             });
}

}  // namespace

Product::Product(const CodedMatrix& left, const CodedMatrix& right, at::ScalarType dtype,
                 const ProductOptions& options)
    : a(left),
      b(right),
      bias(options.bias),
      unit_argument(options.unit_argument),
      amax(options.amax),
      type{.a = operand(left),
           .b = operand(right),
           .dtype = dtype,
           .rows = options.rows,
           .sums = options.sums,
           .alpha = options.alpha,
           .beta = options.beta,
           .bias = bias == nullptr ? at::ScalarType::Undefined : bias->scalar_type(),
           .unit = options.unit,
           .is_gated = options.is_gated,
           .writes_unit_argument = unit_argument != nullptr,
           .writes_amax = amax != nullptr,
           .device = left.matrix.device()} {}

namespace {

/// One bit per type of device.
std::atomic<uint64_t> devices_with_epilogues{0};
constexpr uint64_t bit_of_device(c10::DeviceType device) {
  return uint64_t{1} << static_cast<unsigned>(device);
}

}  // namespace

void register_product(const ProductImplementation& implementation) {
  detail::prepend(products(), implementation);
  if (implementation.takes_epilogues)
    devices_with_epilogues |= bit_of_device(implementation.device);
}

bool takes_epilogues(c10::DeviceType device) {
  return (devices_with_epilogues.load(std::memory_order_acquire) & bit_of_device(device)) != 0;
}

ProductChoice choose(const Product& product) {
  const c10::Device device = product.a.matrix.device();
  if (!is_plain_on(device, product.a) || !is_plain_on(device, product.b)) return nullptr;
  auto* next = static_cast<ProductChoice>(products().load(std::memory_order_acquire));
  while (next != nullptr && !(next->row.device == device.type() && next->row.accepts(product.type)))
    next = next->next;
  return next;
}

ImplementationNames why_decoded(const Product& product) {
  static const ImplementationNames nobody_does =
      bit_of_reason("no library multiplies codes on this device");
  ImplementationNames why = 0;
  const auto* next = static_cast<ProductChoice>(products().load(std::memory_order_acquire));
  for (; next != nullptr; next = next->next)
    if (next->row.device == product.type.device.type() && next->row.reason != nullptr)
      if (const std::string_view reason = next->row.reason(product.type); !reason.empty())
        why |= bit_of_reason(reason);
  return why != 0 ? why : nobody_does;
}

ImplementationNames multiply(const Product& product, const at::Tensor& result) {
  const ProductType::Operand &a = product.type.a, &b = product.type.b;
  // The sizes of packed codes differ from those of the matrices.
  const bool are_numbers = a.quantizer == nullptr && b.quantizer == nullptr;
  TORCH_CHECK_VALUE(!are_numbers || a.cols == b.rows,
                    "product: expected matrices [m, k] and [k, n], got [", a.rows, ", ", a.cols,
                    "] and [", b.rows, ", ", b.cols, "]. Reshape or transpose them.");
  if (const ProductChoice choice = choose(product)) {
    choice->row.run(product, result);
    return choice->bit;
  }
  TORCH_INTERNAL_ASSERT(!product.type.has_epilogue(), "no implementation takes this epilogue");
  at::Tensor target = result;
  if (product.type.beta != 0 || product.type.alpha != 1) {
    at::addmm_out(target, target, product.a.matrix, product.b.matrix, product.type.beta,
                  product.type.alpha);
  } else {
    at::mm_out(target, product.a.matrix, product.b.matrix);
  }
  return kReference;
}

OneMklThread::OneMklThread()
    : before_(MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0) {}
OneMklThread::~OneMklThread() {
  if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before_);
}

bool has_onednn() {
#if defined(__x86_64__)
  // libtorch asks this before it lets oneDNN multiply bfloat16: the processor has AVX-512, and
  // ONEDNN_MAX_CPU_ISA does not hide it.
  static const bool is_supported = onednn_multiplies("mkldnn::_is_mkldnn_bf16_supported");
  return at::native::mkldnn_matmul != nullptr && is_supported;
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
