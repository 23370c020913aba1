// The three products of a linear layer on plain and on quantized operands, for every op and fusion
// that has one.
#pragma once

#include <initializer_list>

#include "core/call.h"
#include "kernel_ops/product/product.h"

namespace tandem::ops {

/// An operand of a product: a read of the step, as a matrix [rows, last dimension], transposed or
/// not.
struct Factor {
  size_t read;
  bool transposed = false;
};

/// Throws c10::ValueError unless these reads, where they exist, lie on one device.
void check_one_device(const Call& call, std::initializer_list<size_t> reads);

/// What a product does with its sums: alpha (a b + bias) + addend. Null: none.
struct Epilogue {
  double alpha = 1;
  /// [n], of the product's dtype.
  const at::Tensor* bias = nullptr;
  /// Of the product's sizes.
  const at::Tensor* addend = nullptr;
};

/// alpha (a b + bias) + addend, accumulated in float32 or wider, rounded once to `dtype`; quantized
/// operands are decoded and their scales applied at the end, unless an implementation multiplies
/// their codes.
///
/// Shapes: the product [m, n] gets the sizes `sizes`, whose numel is m * n.
/// Error:  n * 2^-23 * sum |a||b| from the exact product of the (dequantized) operands, n the
///         contracted length, and the rounding of the result. Of numbers in 16 bits, for which
///         libraries have no float32 results, bias + addend is rounded before the product is added
///         to it; with a bias and an alpha, or an addend of another dtype, the product is.
/// Throws: c10::ValueError where the addend has other sizes.
at::Tensor product(Call& call, Factor a, Factor b, c10::SymIntArrayRef sizes, at::ScalarType dtype,
                   Epilogue epilogue = {});

/// Whether libraries multiply products by it: at 0 they lose NaN, and they refuse what is no
/// float32.
bool multiplies_by(double alpha);

/// target += alpha a b, or target = alpha a b unless `accumulate`: a product into a tensor of the
/// caller, in the dtype of that.
///
/// Shapes: target [m, n]; a and b as for `product`.
/// Error:  n * 2^-23 * sum |a||b|, and one rounding of the sum.
void product_into(Call& call, Factor a, Factor b, const at::Tensor& target, bool accumulate,
                  double alpha = 1);

/// Sizes of y = x W^T: those of x with the last one replaced by the rows of W.
c10::SymDimVector output_sizes(const at::Tensor& x, const at::Tensor& weight);

/// Throws c10::ValueError unless the reads x and weight fit.
void check_linear(const Call& call, size_t x, size_t weight);
/// y = x W^T for the reads x and weight, after checking that they fit.
at::Tensor linear_product(Call& call, size_t x, size_t weight, at::ScalarType dtype,
                          Epilogue epilogue = {});
/// Whether some product on the device of read x takes a bias or a unit.
inline bool may_do_more(const Call& call, size_t x) {
  return call.path() == Path::direct && kernel_ops::takes_epilogues(call.in(x).device().type());
}
/// y = unit(x W^T + bias), and z, its argument, where that is wanted.
struct ProductAndUnit {
  at::Tensor y, z;
};
/// What stands behind x W^T: `unit` as kernel ops take it, or empty.
struct BehindProduct {
  std::optional<at::Tensor> bias = std::nullopt;
  std::string_view unit = {};
  bool is_gated = false, wants_z = false;
};
/// All of it by one implementation of the product, rounded once to `dtype`; undefined tensors where
/// none does that, and then nothing has been computed. Only where may_do_more.
ProductAndUnit linear_product_and(Call& call, size_t x, size_t weight, at::ScalarType dtype,
                                  const BehindProduct& behind);
/// grad_x = grad_y W and grad_weight = grad_y^T x for these reads.
at::Tensor linear_grad_x(Call& call, size_t grad_y, size_t weight, at::ScalarType dtype,
                         Epilogue epilogue = {});
at::Tensor linear_grad_weight(Call& call, size_t grad_y, size_t x, at::ScalarType dtype,
                              Epilogue epilogue = {});

}  // namespace tandem::ops
