// The distance of two tensors that should hold equal numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tandem {

/// The distance from 1 to the next number of a dtype; 0 for dtypes that are not floating.
double unit_of(at::ScalarType dtype);

/// The smallest normal number of a dtype: smaller numbers have no finer spacing.
double smallest_normal_of(at::ScalarType dtype);

/// The largest finite magnitude; 0 if there is none.
double largest_of(const at::Tensor& tensor);
/// The largest finite magnitude of each row, in float64: [..., 1] for [..., cols]. The tensor must
/// be floating and have columns.
at::Tensor largest_of_rows(const at::Tensor& tensor);

/// What was expected and what was got if the tensors differ, else empty. Undefined equals
/// undefined; dtypes and sizes must agree; NaN equals NaN; an infinity equals the infinity of its
/// sign, and a number within `tolerance` of the dtype's largest.
///
/// `difference`: each element may differ by `tolerance` times its own size, `scale` or the dtype's
/// smallest normal number, whichever is largest; integers must be equal. `scale` is one number, or
/// float64 that broadcasts over the tensor. `difference_in_norm`: the norm of the difference may be
/// `tolerance` times the norm of the expected tensor.
std::string difference(const at::Tensor& got, const at::Tensor& expected, double tolerance,
                       double scale);
std::string difference(const at::Tensor& got, const at::Tensor& expected, double tolerance,
                       const at::Tensor& scale);
std::string difference_in_norm(const at::Tensor& got, const at::Tensor& expected, double tolerance);

}  // namespace tandem
