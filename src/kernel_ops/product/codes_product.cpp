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

Factor factor(const CodedMatrix& operand, const Tensor& as_read) {
  return {as_read, operand.quantizer, operand.direction, &operand.scale,
          operand.amax.defined() ? &operand.amax : nullptr};
}

std::optional<Tensor> maybe(const Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

/// The arguments that decode an operand.
Decode::Args decoding(const CodedMatrix& codes) {
  return {.codes = codes.matrix,
          .dequant_scale = codes.scale,
          .quantizer = *codes.quantizer,
          .column = codes.direction == Direction::column,
          .amax = maybe(codes.amax)};
}

/// The decoded operand, with its scale if that is applied to the product.
CodedMatrix decoded(const CodedMatrix& codes, const Tensor& numbers) {
  CodedMatrix result{numbers};
  if (codes.quantizer->format->layout.applies_at_end) result.scale = codes.scale;
  return result;
}

// The operands as the kernel op gets them.

CodedMatrix coded(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& amax,
                  const Quantizer& quantizer, bool column) {
  return {codes, &quantizer, column ? Direction::column : Direction::row, scale,
          amax.value_or(Tensor())};
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

Tensor turned(const CodedMatrix& operand, bool is_transposed) {
  const Tensor& matrix = operand.matrix;
  const MatrixSize size(matrix.sym_sizes());
  const Tensor flat = matrix.dim() == 2 ? matrix : matrix.reshape_symint({size.rows, size.cols});
  return is_transposed ? flat.t() : flat;
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
  const Tensor left = turned(a, a_transposed), right = turned(b, b_transposed);
  const Product product(factor(a, left), factor(b, right), target.scalar_type(),
                        {.rows = rows, .sums = Sums::independent_of_threads});
  if (choose(product) != nullptr) return multiply(product, target);
  ImplementationNames took = why_decoded(product);
  const CodedMatrix first = decoded(a, run<Decode>(took, {}, decoding(a))[0]),
                    second = decoded(b, run<Decode>(took, {}, decoding(b))[0]);
  const bool finishes = first.scale.defined() || second.scale.defined() ||
                        target.scalar_type() != first.matrix.scalar_type();
  const Tensor sums =
      finishes ? empty_beside(target, target.sizes(), first.matrix.scalar_type()) : target;
  Tensor numbers = turned(first, a_transposed), others = turned(second, b_transposed);
  cut_padding(numbers, *a.quantizer, others, *b.quantizer);
  took |= multiply(Product({numbers}, {others}, sums.scalar_type(),
                           {.rows = rows, .sums = Sums::independent_of_threads}),
                   sums);
  if (!finishes) return took;
  const Tensor scaled = run<ScaleProduct>(took, {target},
                                          {.product = sums,
                                           .a_scale = maybe(first.scale),
                                           .b_scale = maybe(second.scale),
                                           .dtype = target.scalar_type()})[0];
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
  const Tensor left = turned(a, args.a_transposed), right = turned(b, args.b_transposed);
  const Product product(factor(a, left), factor(b, right), args.dtype,
                        {.sums = Sums::independent_of_threads});
  if (!detail::is_differentiated(args) && choose(product) != nullptr) {
    const Tensor result = empty_beside(args.a, {left.size(0), right.size(1)}, args.dtype);
    multiply(product, result);
    return {result};
  }
  const CodedMatrix first = decoded(a, Decode::reference(decoding(a))[0]),
                    second = decoded(b, Decode::reference(decoding(b))[0]);
  Tensor numbers = turned(first, args.a_transposed), others = turned(second, args.b_transposed);
  cut_padding(numbers, args.a_quantizer, others, args.b_quantizer);
  return ScaleProduct::reference({.product = at::mm(numbers, others),
                                  .a_scale = maybe(first.scale),
                                  .b_scale = maybe(second.scale),
                                  .dtype = args.dtype});
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<MultiplyCodes>(
      library, {{"cpu", at::kCPU,
                 Takes<kCodes, kScale, kStatistic, kCodes, kScale, kStatistic, kNumbers>::these,
                 MultiplyCodes::cpu}});
}

}  // namespace tandem::kernel_ops
