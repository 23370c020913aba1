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

/// The numbers of codes in float32, but for a scale that the product gets at its end.
CodedMatrix decoded(ImplementationNames& took, const CodedMatrix& codes) {
  const auto amax = codes.amax.defined() ? std::optional(codes.amax) : std::nullopt;
  CodedMatrix numbers{run<Decode>(took, {}, codes.matrix, codes.scale, *codes.quantizer,
                                  codes.direction == Direction::column, amax)[0]};
  if (codes.quantizer->format->layout.applies_at_end) numbers.scale = codes.scale;
  return numbers;
}

std::optional<Tensor> end_scale(const CodedMatrix& operand) {
  return operand.scale.defined() ? std::optional(operand.scale) : std::nullopt;
}

/// An operand as the kernel op is given it.
CodedMatrix coded(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& amax,
                  const Quantizer& quantizer, bool column) {
  return {codes, &quantizer, column ? Direction::column : Direction::row, scale,
          amax.value_or(Tensor())};
}

/// Sizes of the numbers of an operand as a matrix, transposed or not.
MatrixSize size_of(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& amax,
                   const Quantizer& quantizer, bool column, bool transposed) {
  MatrixSize size(Decode::shapes(codes, scale, quantizer, column, amax)[0].sizes);
  if (transposed) std::swap(size.rows, size.cols);
  return size;
}

/// How many numbers codes of k numbers are decoded to.
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
  const Product product(factor(a, left), factor(b, right), target.scalar_type(), rows,
                        Sums::independent_of_threads);
  if (choose(product) != nullptr) return multiply(product, target);
  ImplementationNames took = why_decoded(product);
  const CodedMatrix first = decoded(took, a), second = decoded(took, b);
  const bool finishes = first.scale.defined() || second.scale.defined() ||
                        target.scalar_type() != first.matrix.scalar_type();
  const Tensor sums =
      finishes ? empty_beside(target, target.sizes(), first.matrix.scalar_type()) : target;
  Tensor numbers = turned(first, a_transposed), others = turned(second, b_transposed);
  cut_padding(numbers, *a.quantizer, others, *b.quantizer);
  took |= multiply(
      Product({numbers}, {others}, sums.scalar_type(), rows, Sums::independent_of_threads), sums);
  if (!finishes) return took;
  const Tensor scaled = run<ScaleProduct>(took, {target}, sums, end_scale(first), end_scale(second),
                                          target.scalar_type())[0];
  if (!scaled.is_same(target)) target.copy_(scaled);  // of a dtype without a kernel
  return took;
}

Specs<1> MultiplyCodes::shapes(const Tensor& a, const Tensor& a_scale,
                               const std::optional<Tensor>& a_amax, const Quantizer& a_quantizer,
                               bool a_column, bool a_transposed, const Tensor& b,
                               const Tensor& b_scale, const std::optional<Tensor>& b_amax,
                               const Quantizer& b_quantizer, bool b_column, bool b_transposed,
                               at::ScalarType dtype) {
  const MatrixSize left = size_of(a, a_scale, a_amax, a_quantizer, a_column, a_transposed),
                   right = size_of(b, b_scale, b_amax, b_quantizer, b_column, b_transposed);
  TORCH_CHECK_VALUE(
      left.cols == padded(a_quantizer, right.rows) || right.rows == padded(b_quantizer, left.cols),
      "multiply_codes: expected matrices [m, k] and [k, n], got [", left.rows, ", ", left.cols,
      "] and [", right.rows, ", ", right.cols, "]. Transpose one of them.");
  constexpr Dtypes kNumbers(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble);
  TORCH_CHECK_TYPE(kNumbers.has(dtype), "multiply_codes: expected dtype float32, bfloat16, ",
                   "float16 or float64, got ", dtype_name(dtype), ". Cast the product.");
  return {ResultSpec{{left.rows, right.cols}, dtype}};
}

void MultiplyCodes::cpu(const Tensor& a, const Tensor& a_scale, const std::optional<Tensor>& a_amax,
                        const Quantizer& a_quantizer, bool a_column, bool a_transposed,
                        const Tensor& b, const Tensor& b_scale, const std::optional<Tensor>& b_amax,
                        const Quantizer& b_quantizer, bool b_column, bool b_transposed,
                        at::ScalarType, Results<1>& results) {
  multiply_codes(coded(a, a_scale, a_amax, a_quantizer, a_column), a_transposed,
                 coded(b, b_scale, b_amax, b_quantizer, b_column), b_transposed,
                 Rows::of_the_result, results[0]);
}

Results<1> MultiplyCodes::reference(const Tensor& a, const Tensor& a_scale,
                                    const std::optional<Tensor>& a_amax,
                                    const Quantizer& a_quantizer, bool a_column, bool a_transposed,
                                    const Tensor& b, const Tensor& b_scale,
                                    const std::optional<Tensor>& b_amax,
                                    const Quantizer& b_quantizer, bool b_column, bool b_transposed,
                                    at::ScalarType dtype) {
  const CodedMatrix left = coded(a, a_scale, a_amax, a_quantizer, a_column),
                    right = coded(b, b_scale, b_amax, b_quantizer, b_column);
  const Tensor first = turned(left, a_transposed), second = turned(right, b_transposed);
  const Product product(factor(left, first), factor(right, second), dtype, Rows::of_the_result,
                        Sums::independent_of_threads);
  const bool is_differentiated =
      detail::is_differentiated(a_scale) || detail::is_differentiated(b_scale);
  if (!is_differentiated && choose(product) != nullptr) {
    const Tensor result = empty_beside(a, {first.size(0), second.size(1)}, dtype);
    multiply(product, result);
    return {result};
  }
  const auto numbers = [](const CodedMatrix& codes, const std::optional<Tensor>& amax) {
    return CodedMatrix{Decode::reference(codes.matrix, codes.scale, *codes.quantizer,
                                         codes.direction == Direction::column, amax)[0]};
  };
  const auto at_end = [](const CodedMatrix& codes) {
    return codes.quantizer->format->layout.applies_at_end ? std::optional(codes.scale)
                                                          : std::nullopt;
  };
  Tensor factor_a = turned(numbers(left, a_amax), a_transposed),
         factor_b = turned(numbers(right, b_amax), b_transposed);
  cut_padding(factor_a, a_quantizer, factor_b, b_quantizer);
  const Tensor sums = at::mm(factor_a, factor_b);
  return ScaleProduct::reference(sums, at_end(left), at_end(right), dtype);
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  constexpr Dtypes kNumbers(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble);
  register_kernel_op<MultiplyCodes>(
      library, {{"cpu", at::kCPU,
                 Takes<kCodes, kScale, kStatistic, kCodes, kScale, kStatistic, kNumbers>::these,
                 MultiplyCodes::cpu}});
}

}  // namespace tandem::kernel_ops
