// Products of matrices: a list of implementations, chosen from a plain description of the product.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernel_ops/framework/implementations.h"
#include "quantization/formats/quantizer.h"

namespace tandem::kernel_ops {

/// What a product does with the rows of x, whose number changes from step to step where lengths do.
enum class Rows : uint8_t { of_the_result, contracted };

/// How a product may be summed. Libraries share a long sum of few elements out among threads, so
/// that the last bits depend on their number; those of quantized products must not.
enum class Sums : uint8_t { any, independent_of_threads };

/// A matrix that a product reads: numbers, or the codes of a quantizer, which may be packed, and
/// their scales.
struct Factor {
  const at::Tensor& matrix;
  /// Null: numbers.
  const Quantizer* quantizer = nullptr;
  Direction direction = Direction::row;
  const at::Tensor* dequant_scale = nullptr;
  /// Where the format has one.
  const at::Tensor* amax = nullptr;
};

/// What a product is to whoever chooses its implementation:
///   result = unit(alpha a b + beta result + bias),
/// the part in parentheses in float32 or wider, rounded once to the result's dtype.
struct ProductType {
  struct Operand {
    int64_t rows, cols, row_stride, col_stride;
    at::ScalarType dtype;
    const Quantizer* quantizer;
    Direction direction;
  };
  /// [m, k] and [k, n].
  Operand a, b;
  /// Of the result, a contiguous matrix [m, n]; [m, n / 2] behind a gated unit.
  at::ScalarType dtype;
  Rows rows = Rows::of_the_result;
  Sums sums = Sums::any;
  double alpha = 1;
  /// 0 or 1.
  double beta = 0;
  /// Of the bias; Undefined: there is none.
  at::ScalarType bias = at::ScalarType::Undefined;
  /// As kernel ops of units take it (unit/activation_function.h); empty: none.
  std::string_view unit = {};
  bool is_gated = false;
  /// Whether the argument of the unit and the largest magnitude of the result are written too.
  bool writes_unit_argument = false, writes_amax = false;
  c10::Device device = at::kCPU;

  /// Whether there is more to do than a product and a sum.
  bool has_epilogue() const {
    return bias != at::ScalarType::Undefined || !unit.empty() || writes_amax;
  }
};

/// What may be said of a product besides its operands and dtype.
struct ProductOptions {
  Rows rows = Rows::of_the_result;
  Sums sums = Sums::any;
  double alpha = 1, beta = 0;
  /// [n], or null.
  const at::Tensor* bias = nullptr;
  std::string_view unit = {};
  bool is_gated = false;
  /// Where the argument of the unit, [m, n] of the result's dtype, and the result's largest
  /// magnitude, [] in float32, are written; or null.
  const at::Tensor *unit_argument = nullptr, *amax = nullptr;
};

/// A product of these matrices. Views its tensors.
struct Product {
  Product(const Factor& left, const Factor& right, at::ScalarType dtype,
          const ProductOptions& options = {});
  Factor a, b;
  const at::Tensor *bias, *unit_argument, *amax;
  ProductType type;
};

/// One way to multiply. It is asked where a and b are plain memory of one device of its type.
struct ProductImplementation {
  /// What `explain` calls it; of a string that stays.
  std::string_view name;
  c10::DeviceType device;
  bool (*accepts)(const ProductType& type);
  /// Writes the result, or adds to it: contiguous, and plain memory of the same device.
  void (*run)(const Product& product, const at::Tensor& result);
  /// Of one that multiplies codes: why it does not accept these, for `explain`, in few texts that
  /// stay. Null: it has nothing to say.
  std::string_view (*reason)(const ProductType& type) = nullptr;
  /// Whether it may accept a product that has an epilogue.
  bool takes_epilogues = false;
};
using ProductChoice = const detail::Listed<ProductImplementation>*;

/// Adds an implementation, which is asked before those there are.
TANDEM_API void register_product(const ProductImplementation& implementation);

/// Whether a device has implementations that take bias, unit or amax: others are not worth asking.
bool takes_epilogues(c10::DeviceType device);

/// The first implementation that takes these operands; null where only torch's own product does.
ProductChoice choose(const Product& product);

/// Why the codes of this product, which no implementation takes, are decoded: reasons for a step to
/// keep.
ImplementationNames why_decoded(const Product& product);

/// Multiplies by the first implementation that takes the operands, else, numbers without epilogue
/// only, by torch's product. Returns who did.
///
/// Shapes: a [m, k], b [k, n], result [m, n], which is plain memory of their device, contiguous, in
///         the product's dtype.
/// Error:  that of a sum in float32 or wider, and one rounding to the result's dtype.
/// Throws: c10::ValueError where numbers are no matrices of these shapes.
TANDEM_API ImplementationNames multiply(const Product& product, const at::Tensor& result);

/// While it lives, this thread's products in MKL run on it alone, inside a parallel region too.
class OneMklThread {
 public:
  OneMklThread();
  ~OneMklThread();
  OneMklThread(const OneMklThread&) = delete;
  OneMklThread& operator=(const OneMklThread&) = delete;

 private:
  const int before_;
};

/// Whether libtorch's oneDNN product is there and fast here.
bool has_onednn();

/// result = alpha a b, or result += alpha a b where `accumulate`, on the CPU. oneDNN keeps a
/// compiled kernel of about a megabyte for each shape it has seen: float32 products get it for
/// numbers of rows with two significant bits only, two per octave; other numbers are cut into such
/// pieces, and the rest goes to at::mm. Products of fewer than 2^24 multiplications, and pieces of
/// fewer than 2^25, go to at::mm, which is faster there. bfloat16 ones are not cut: at::mm would
/// give those to oneDNN too. How a product is cut depends on its shape alone.
///
/// Shapes: a [m, k], b [k, n], result [m, n], of one dtype; rows: m or k.
/// Error:  that of a float32 sum; where rows are contracted, one more rounding per piece.
void multiply_by_onednn(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result,
                        Rows rows, bool accumulate = false, double alpha = 1);

}  // namespace tandem::kernel_ops
