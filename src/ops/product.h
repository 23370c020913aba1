// The three products of a linear layer on plain and on quantized operands, for every op and fusion that has one.
#pragma once

#include <initializer_list>

#include "core/call.h"

namespace tandem::ops {

/// An operand of a product: a read of the step, as a matrix [rows, last dimension], transposed or not.
struct Factor {
  size_t read;
  bool transposed = false;
};

/// What a product does with the rows of x, whose number changes from step to step where lengths do.
enum class Rows : uint8_t { of_the_result, contracted };

/// Whether libtorch's oneDNN product is there and fast here.
bool has_onednn();

/// result = a b, or result += a b where rows are contracted and `accumulate`, on the CPU. oneDNN keeps a compiled kernel of about a megabyte for each shape it has seen: float32 products get it for
/// numbers of rows with two significant bits only, two per octave; other numbers are cut into such pieces, and the rest goes to at::mm.
/// Products of fewer than 2^24 multiplications, and pieces of fewer than 2^25, go to at::mm, which is faster there.
/// bfloat16 ones do not: at::mm would give those to oneDNN too. How a product is cut depends on its shape alone.
///
/// Shapes: a [m, k], b [k, n], result [m, n], of one dtype; rows: m or k.
/// Error:  that of a float32 sum; where rows are contracted, one more rounding per piece.
void multiply_by_onednn(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result,
                        Rows rows, bool accumulate = false);

/// result = a b on the direct path, by the faster of oneDNN and torch's product. Matrices of one dtype, plain and on the CPU.
void multiply_into(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, Rows rows);

/// Throws c10::ValueError unless these reads, where they exist, lie on one device.
void check_one_device(const Call& call, std::initializer_list<size_t> reads);

/// a * b, accumulated in float32 or wider, rounded once to `dtype`; quantized operands are decoded and their scales applied at the end.
///
/// Shapes: the product [m, n] gets the sizes `sizes`, whose numel is m * n.
/// Error:  n * 2^-23 * sum |a||b| from the exact product of the (dequantized) operands, n the contracted length.
at::Tensor product(Call& call, Factor a, Factor b, c10::SymIntArrayRef sizes, at::ScalarType dtype);

/// target += a b, or target = a b unless `accumulate`: a product into a tensor of the caller, in the dtype of that.
///
/// Shapes: target [m, n]; a and b as for `product`.
/// Error:  n * 2^-23 * sum |a||b|, and one rounding of the sum.
void product_into(Call& call, Factor a, Factor b, const at::Tensor& target, bool accumulate);

/// Sizes of y = x W^T: those of x with the last one replaced by the rows of W.
c10::SymDimVector output_sizes(const at::Tensor& x, const at::Tensor& weight);

/// y = x W^T for the reads x and weight, after checking that they fit. Throws c10::ValueError.
at::Tensor linear_product(Call& call, size_t x, size_t weight, at::ScalarType dtype);

}  // namespace tandem::ops
