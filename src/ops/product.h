// The three products of a linear layer on plain and on quantized operands, for every op and fusion that has one.
#pragma once

#include "core/call.h"

namespace tandem::ops {

/// An operand of a product: a read of the step, as a matrix [rows, last dimension], transposed or not.
struct Factor {
  size_t read;
  bool transposed = false;
};

/// a * b, accumulated in float32 or wider, rounded once to `dtype`; quantized operands are decoded and their scales applied at the end.
///
/// Shapes: the product [m, n] gets the sizes `sizes`, whose numel is m * n.
/// Error:  n * 2^-23 * sum |a||b| from the exact product of the (dequantized) operands, n the contracted length.
at::Tensor product(Call& call, Factor a, Factor b, c10::SymIntArrayRef sizes, at::ScalarType dtype);

/// Sizes of y = x W^T: those of x with the last one replaced by the rows of W.
c10::SymDimVector output_sizes(const at::Tensor& x, const at::Tensor& weight);

/// y = x W^T for the reads x and weight, after checking that they fit. Throws c10::ValueError.
at::Tensor linear_product(Call& call, size_t x, size_t weight, at::ScalarType dtype);

}  // namespace tandem::ops
