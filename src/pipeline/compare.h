// How far two tensors are apart that ought to hold the same numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tandem {

/// Distance from one number of a dtype to the next, relative to 1; 0 for dtypes that are not
/// floating.
double unit_of(at::ScalarType dtype);

/// Below it numbers are no finer than there.
double smallest_normal_of(at::ScalarType dtype);

/// The largest finite magnitude; 0 where there is none.
double largest_of(const at::Tensor& tensor);
/// The same of each row, in float64: [..., 1] of [..., cols], which must be floating and have
/// columns.
at::Tensor largest_of_rows(const at::Tensor& tensor);

/// What was expected and what was got where they differ, else empty. Undefined equals undefined;
/// dtypes and sizes must agree; NaN equals NaN, infinity the infinity of its sign, or what rounds
/// to it: a number within `tolerance` of the dtype's largest.
///
/// `difference`: each element within `tolerance` of its own size, of `scale` or of the dtype's
/// smallest normal number, whichever is largest; integers are equal. `scale` is one number for all,
/// or float64 and broadcast over the tensor. `difference_in_norm`: the norm of the difference is at
/// most `tolerance` times that of what was expected.
std::string difference(const at::Tensor& got, const at::Tensor& expected, double tolerance,
                       double scale);
std::string difference(const at::Tensor& got, const at::Tensor& expected, double tolerance,
                       const at::Tensor& scale);
std::string difference_in_norm(const at::Tensor& got, const at::Tensor& expected, double tolerance);

}  // namespace tandem
