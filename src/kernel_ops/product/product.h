// Products of matrices: a list of implementations. One is chosen by a description of the product.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernel_ops/framework/implementations.h"
#include "quantization/formats/codes.h"

namespace tandem::kernel_ops {

/// The role of the rows of x in a product. Their number changes from step to step if sequence
/// lengths do.
enum class Rows : uint8_t { of_the_result, contracted };

/// How a product may be summed. Libraries split a long sum of few elements among threads, so its
/// last bits depend on their number. Quantized products must not depend on it.
enum class Sums : uint8_t { any, independent_of_threads };

/// The properties of a product by which its implementation is chosen:
///   result = unit(alpha a b + beta result + bias),
/// with the argument of unit in float32 or wider, rounded once to the result's dtype.
struct ProductType {
  struct Operand {
    int64_t rows, cols, row_stride, col_stride;
    at::ScalarType dtype;
    const Quantizer* quantizer;
    Direction direction;
  };
  /// [m, k] and [k, n].
  Operand a, b;
  /// The dtype of the result, a contiguous matrix [m, n]; [m, n / 2] after a gated unit.
  at::ScalarType dtype;
  Rows rows = Rows::of_the_result;
  Sums sums = Sums::any;
  double alpha = 1;
  /// 0 or 1.
  double beta = 0;
  /// The dtype of the bias; Undefined: there is none.
  at::ScalarType bias = at::ScalarType::Undefined;
  /// A unit as kernel ops take it (unit/activation_function.h); empty: none.
  std::string_view unit = {};
  bool is_gated = false;
  /// Whether the argument of the unit and the largest magnitude of the result are written too.
  bool writes_unit_argument = false, writes_amax = false;
  c10::Device device = at::kCPU;

  /// Whether there is more to compute than a product and a sum.
  bool has_epilogue() const {
    return bias != at::ScalarType::Undefined || !unit.empty() || writes_amax;
  }
};

/// What a caller may say of a product besides its operands and dtype.
struct ProductOptions {
  Rows rows = Rows::of_the_result;
  Sums sums = Sums::any;
  double alpha = 1, beta = 0;
  /// [n], or nullptr.
  const at::Tensor* bias = nullptr;
  std::string_view unit = {};
  bool is_gated = false;
  /// Where the argument of the unit, [m, n] in the result's dtype, and the result's largest
  /// magnitude, [] in float32, are written; nullptr if they are not wanted.
  const at::Tensor *unit_argument = nullptr, *amax = nullptr;
};

/// A product of these matrices, with views of its tensors.
struct Product {
  Product(const CodedMatrix& left, const CodedMatrix& right, at::ScalarType dtype,
          const ProductOptions& options = {});
  CodedMatrix a, b;
  const at::Tensor *bias, *unit_argument, *amax;
  ProductType type;
};

/// An implementation of products. `accepts` is called only if a and b are dense memory on one
/// device of type `device`.
struct ProductImplementation {
  /// The name that `explain` prints; a string with static lifetime.
  std::string_view name;
  c10::DeviceType device;
  bool (*accepts)(const ProductType& type);
  /// Writes the result, or adds to it: contiguous, dense memory on that device.
  void (*run)(const Product& product, const at::Tensor& result);
  /// For an implementation that multiplies codes: why it does not accept these, for `explain`; one
  /// of few strings with static lifetime. nullptr: it gives no reasons.
  std::string_view (*reason)(const ProductType& type) = nullptr;
  /// Whether it may accept a product that has an epilogue.
  bool takes_epilogues = false;
};
using ProductChoice = const detail::Listed<ProductImplementation>*;

/// Adds an implementation, which is tried before the existing ones.
TANDEM_API void register_product(const ProductImplementation& implementation);

/// Whether some implementation for the device takes a bias, a unit or an amax.
bool takes_epilogues(c10::DeviceType device);

/// The first implementation that accepts the product; nullptr if only torch's own product does.
ProductChoice choose(const Product& product);

/// Why no implementation multiplies the codes of this product: bits of reasons for a step to keep.
ImplementationNames why_decoded(const Product& product);

/// Multiplies by the first implementation that accepts the product. Unquantized operands without an
/// epilogue fall back to torch's product. Returns the implementation.
///
/// Shapes: a [m, k], b [k, n] -> result [m, n], dense memory on their device, in the product's
///         dtype: contiguous, or columns of a contiguous matrix if unquantized and summed in any
///         way.
/// Error:  that of a sum in float32 or wider, and one rounding to the result's dtype.
/// Throws: c10::ValueError if unquantized operands do not have these shapes.
TANDEM_API ImplementationNames multiply(const Product& product, const at::Tensor& result);

/// During its lifetime, MKL computes this thread's products on this thread alone, also in a
/// parallel region.
class OneMklThread {
 public:
  OneMklThread();
  ~OneMklThread();
  OneMklThread(const OneMklThread&) = delete;
  OneMklThread& operator=(const OneMklThread&) = delete;

 private:
  const int before_;
};

/// Whether libtorch has oneDNN's product and it is fast on this processor.
bool has_onednn();

/// result = alpha a b, or result += alpha a b if `accumulate`, on the CPU. oneDNN keeps a compiled
/// kernel of about a megabyte for each shape that it has seen. In float32 it therefore gets only
/// numbers of rows with two significant bits, two per octave; other numbers are cut into such
/// pieces, and at::mm computes the rest. Products of fewer than 2^24 multiplications, and pieces of
/// fewer than 2^25, go to at::mm, which is faster for them. bfloat16 products are not cut: at::mm
/// would give the pieces to oneDNN too. How a product is cut depends on its shape alone.
///
/// Shapes: a [m, k], b [k, n], result [m, n], of one dtype; rows: m or k.
/// Error:  that of a float32 sum; if rows are contracted, one more rounding per piece.
void multiply_by_onednn(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result,
                        Rows rows, bool accumulate = false, double alpha = 1);

}  // namespace tandem::kernel_ops
