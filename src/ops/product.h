// The three products of a linear layer, on unquantized and on quantized operands, for ops and
// fusions.
#pragma once

#include <initializer_list>

#include "core/call.h"
#include "kernel_ops/product/product.h"

namespace tandem::ops {

/// An operand of a product: a read of the step as a matrix [rows, last dimension], which the
/// product may transpose.
struct Factor {
  size_t read;
  bool transposed = false;
};

/// Throws c10::ValueError unless the reads that are present lie on one device.
void check_one_device(const Call& call, std::initializer_list<size_t> reads);

/// The arithmetic after a product: alpha (a b + bias) + addend. A null pointer leaves its term out.
struct Epilogue {
  double alpha = 1;
  /// [n], in the dtype of the product.
  const at::Tensor* bias = nullptr;
  /// In the sizes of the product.
  const at::Tensor* addend = nullptr;
};

/// Returns alpha (a b + bias) + addend, accumulated in float32 or wider and rounded once to
/// `dtype`. Quantized operands are decoded and their scales applied at the end, unless an
/// implementation multiplies their codes.
///
/// Shapes:  a b is [m, n]; the result has `sizes`, whose numel is m * n.
/// Error:   n * 2^-23 * sum |a||b| from the exact product of the (dequantized) operands, where n is
///          the contracted length, and the rounding of the result. A product of unquantized
///          operands of 16 bits is rounded before the sum where the addend has another dtype and,
///          on other devices than the CPU, where a bias has another dtype or comes with an alpha or
///          an addend.
/// Throws:  c10::ValueError where the addend has other sizes.
at::Tensor product(Call& call, Factor a, Factor b, c10::SymIntArrayRef sizes, at::ScalarType dtype,
                   Epilogue epilogue = {});

/// Whether libraries may get this alpha: finite in float32, and not 0, at which they lose NaN.
bool multiplies_by(double alpha);

/// target += alpha a b, or target = alpha a b unless `accumulate`, in the dtype of `target`, which
/// is a tensor of the caller.
///
/// Shapes:  target [m, n]; a and b as in `product`.
/// Error:   n * 2^-23 * sum |a||b|, and one rounding of the sum.
void product_into(Call& call, Factor a, Factor b, const at::Tensor& target, bool accumulate,
                  double alpha = 1);

/// Throws c10::ValueError if the step writes `target`, a tensor of the caller, while it reads a
/// tensor that shares elements with it; not where the step computes in its own memory and copies.
void check_own_memory(Call& call, const char* op, const char* name, const at::Tensor& target);

/// Returns the sizes of y = x W^T: the sizes of x with the rows of W as the last one.
c10::SymDimVector output_sizes(const at::Tensor& x, const at::Tensor& weight);

/// Throws c10::ValueError unless the features of x and weight fit.
void check_linear(const Call& call, size_t x, size_t weight);
/// Checks the reads x and weight, and returns y = x W^T.
at::Tensor linear_product(Call& call, size_t x, size_t weight, at::ScalarType dtype,
                          Epilogue epilogue = {});
/// Whether an implementation of products on the device of read x adds a bias or applies a unit.
inline bool may_do_more(const Call& call, size_t x) {
  return call.path() == Path::direct && kernel_ops::takes_epilogues(call.in(x).device().type());
}
/// y = unit(x W^T + bias), and the unit's operand z where it is requested.
struct ProductAndUnit {
  at::Tensor y, z;
};
/// The arithmetic after x W^T. `unit` is a function's name as in kernel ops, or empty.
struct BehindProduct {
  std::optional<at::Tensor> bias = std::nullopt;
  std::string_view unit = {};
  bool is_gated = false, wants_z = false;
};
/// Computes the product and the arithmetic after it by one implementation, rounded once to `dtype`.
/// Returns undefined tensors, and computes nothing, where no implementation does. Requires
/// may_do_more.
ProductAndUnit linear_product_and(Call& call, size_t x, size_t weight, at::ScalarType dtype,
                                  const BehindProduct& behind);
/// grad_x = grad_y W, and grad_weight = grad_y^T x, for these reads.
at::Tensor linear_grad_x(Call& call, size_t grad_y, size_t weight, at::ScalarType dtype,
                         Epilogue epilogue = {});
at::Tensor linear_grad_weight(Call& call, size_t grad_y, size_t x, at::ScalarType dtype,
                              Epilogue epilogue = {});

}  // namespace tandem::ops
