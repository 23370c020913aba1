#include "kernel_ops/product/codes_product.h"

#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/run.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/quantize/quantize.h"

namespace tandem::kernel_ops {

namespace {

// The operands as the kernel op gets them.

CodedMatrix coded(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& amax,
                  const Quantizer& quantizer, bool column) {
  return {codes, &quantizer, column ? Direction::column : Direction::row, &scale,
          amax ? &*amax : nullptr};
}
CodedMatrix left_of(const MultiplyCodes::Args& args) {
  return coded(args.a, args.a_scale, args.a_amax, args.a_quantizer, args.a_column);
}
CodedMatrix right_of(const MultiplyCodes::Args& args) {
  return coded(args.b, args.b_scale, args.b_amax, args.b_quantizer, args.b_column);
}

/// The sizes of an operand's dequantized matrix, transposed or not.
MatrixSize size_of(const CodedMatrix& operand, bool transposed) {
  MatrixSize size(Decode::shapes(decoding(operand))[0].sizes);
  if (transposed) std::swap(size.rows, size.cols);
  return size;
}

/// The number of values that codes of k numbers decode to.
c10::SymInt padded(const Quantizer& quantizer, const c10::SymInt& k) {
  if (!is_packed(quantizer)) return k;
  return sizes_of_numbers(quantizer, sizes_of_codes(quantizer, {1, k}, Direction::row),
                          Direction::row)
      .back();
}

}  // namespace

Tensor turned(const Tensor& tensor, bool is_transposed) {
  const MatrixSize size(tensor.sym_sizes());
  const Tensor flat = tensor.dim() == 2 ? tensor : tensor.reshape_symint({size.rows, size.cols});
  return is_transposed ? flat.t() : flat;
}

std::optional<Tensor> scale_at_end(const CodedMatrix& codes) {
  return codes.quantizer->format->layout.applies_at_end ? std::optional(*codes.dequant_scale)
                                                        : std::nullopt;
}

void cut_padding(Tensor& a, const Quantizer& a_quantizer, Tensor& b, const Quantizer& b_quantizer) {
  if (is_packed(a_quantizer) == is_packed(b_quantizer)) return;
  if (is_packed(a_quantizer)) {
    a = a.narrow_symint(1, 0, b.sym_size(0));
  } else {
    b = b.narrow_symint(0, 0, a.sym_size(1));
  }
}

ImplementationNames multiply_codes(const CodedMatrix& a, bool a_transposed, const CodedMatrix& b,
                                   bool b_transposed, Rows rows, const Tensor& target) {
  const Tensor left = turned(a.matrix, a_transposed), right = turned(b.matrix, b_transposed);
  const Product product(a.as(left), b.as(right), target.scalar_type(),
                        {.rows = rows, .sums = Sums::independent_of_threads});
  if (choose(product) != nullptr) return multiply(product, target);
  ImplementationNames took = why_decoded(product);
  Tensor numbers = turned(run<Decode>(took, {}, decoding(a))[0], a_transposed),
         others = turned(run<Decode>(took, {}, decoding(b))[0], b_transposed);
  const std::optional<Tensor> a_scale = scale_at_end(a), b_scale = scale_at_end(b);
  const bool finishes = a_scale || b_scale || target.scalar_type() != numbers.scalar_type();
  const Tensor sums =
      finishes ? empty_beside(target, target.sizes(), numbers.scalar_type()) : target;
  cut_padding(numbers, *a.quantizer, others, *b.quantizer);
  took |= multiply(Product(numbers, others, sums.scalar_type(),
                           {.rows = rows, .sums = Sums::independent_of_threads}),
                   sums);
  if (!finishes) return took;
  const Tensor scaled = run<ScaleProduct>(
      took, {target},
      {.product = sums, .a_scale = a_scale, .b_scale = b_scale, .dtype = target.scalar_type()})[0];
  if (!scaled.is_same(target)) target.copy_(scaled);  // a dtype without a kernel
  return took;
}

Specs<1> MultiplyCodes::shapes(const Args& args) {
  const MatrixSize left = size_of(left_of(args), args.a_transposed),
                   right = size_of(right_of(args), args.b_transposed);
  TORCH_CHECK_VALUE(left.cols == padded(args.a_quantizer, right.rows) ||
                        right.rows == padded(args.b_quantizer, left.cols),
                    "multiply_codes: expected matrices [m, k] and [k, n], got [", left.rows, ", ",
                    left.cols, "] and [", right.rows, ", ", right.cols,
                    "]. Transpose one of them.");
  TORCH_CHECK_TYPE(kNumbers.has(args.dtype), "multiply_codes: expected dtype float32, bfloat16, ",
                   "float16 or float64, got ", dtype_name(args.dtype), ". Cast the product.");
  return {ResultSpec{{left.rows, right.cols}, args.dtype}};
}

void MultiplyCodes::cpu(const Args& args, std::span<Tensor> results) {
  multiply_codes(left_of(args), args.a_transposed, right_of(args), args.b_transposed,
                 Rows::of_the_result, results[0]);
}

Results<1> MultiplyCodes::reference(const Args& args) {
  const CodedMatrix a = left_of(args), b = right_of(args);
  const Tensor left = turned(args.a, args.a_transposed), right = turned(args.b, args.b_transposed);
  const Product product(a.as(left), b.as(right), args.dtype,
                        {.sums = Sums::independent_of_threads});
  if (!detail::is_differentiated(args) && choose(product) != nullptr) {
    const Tensor result = empty_beside(args.a, {left.size(0), right.size(1)}, args.dtype);
    multiply(product, result);
    return {result};
  }
  Tensor numbers = turned(Decode::reference(decoding(a))[0], args.a_transposed),
         others = turned(Decode::reference(decoding(b))[0], args.b_transposed);
  cut_padding(numbers, args.a_quantizer, others, args.b_quantizer);
  return ScaleProduct::reference({.product = at::mm(numbers, others),
                                  .a_scale = scale_at_end(a),
                                  .b_scale = scale_at_end(b),
                                  .dtype = args.dtype});
}

MultiplyCodes::Args MultiplyCodes::of(const CodedMatrix& a, bool a_transposed, const CodedMatrix& b,
                                      bool b_transposed, at::ScalarType dtype) {
  return {.a = a.matrix,
          .a_scale = *a.dequant_scale,
          .a_amax = a.maybe_amax(),
          .a_quantizer = *a.quantizer,
          .a_column = a.is_column(),
          .a_transposed = a_transposed,
          .b = b.matrix,
          .b_scale = *b.dequant_scale,
          .b_amax = b.maybe_amax(),
          .b_quantizer = *b.quantizer,
          .b_column = b.is_column(),
          .b_transposed = b_transposed,
          .dtype = dtype};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<MultiplyCodes>(
      library, {{"cpu", at::kCPU,
                 Takes<kCodes, kScale, kStatistic, kCodes, kScale, kStatistic, kNumbers>::these,
                 MultiplyCodes::cpu}});
}

}  // namespace tandem::kernel_ops
