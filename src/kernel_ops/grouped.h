// Products of groups of rows, each with a matrix of its own: the linear layers of experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tandem::kernel_ops {

/// The first row of each group and, last, the end of the last one. Waits for the device on which
/// `splits` lies.
///
/// splits: integers [groups], rows of each group. Rows behind the last group belong to none.
/// Throws: c10::ValueError where a number is negative or the sum exceeds `rows`, c10::TypeError
///         where they are no integers.
std::vector<int64_t> group_offsets(const at::Tensor& splits, int64_t groups, int64_t rows);

/// y_g = x_g M_g^T + bias_g, or x_g M_g where not `transposed`, for the rows x_g of group g; zeros
/// for rows of no group.
///
/// Shapes: x [rows, k], matrices [n, k] each (or [k, n]), biases [n] each or none -> y [rows, n],
///         in the dtype of x.
at::Tensor grouped_product(const at::Tensor& x, const at::Tensor& splits, at::TensorList matrices,
                           at::TensorList biases, bool transposed);

/// The same in differentiable ATen operations, which every device and dtype has.
namespace composite {
at::Tensor grouped_product(const at::Tensor& x, const at::Tensor& splits, at::TensorList matrices,
                           at::TensorList biases, bool transposed);
}

/// grad_g = grad_y_g^T x_g, zeros for a group without rows.
///
/// Shapes: grad_y [rows, n], x [rows, k] -> [groups, n, k].
at::Tensor grouped_grad_weight(const at::Tensor& grad_y, const at::Tensor& x,
                               const at::Tensor& splits, int64_t groups);

/// sums_g = sum over the rows of grad_y_g, in float32, rounded once.
///
/// Shapes: grad_y [rows, n] -> [groups, n].
at::Tensor grouped_sum_rows(const at::Tensor& grad_y, const at::Tensor& splits, int64_t groups);

}  // namespace tandem::kernel_ops
