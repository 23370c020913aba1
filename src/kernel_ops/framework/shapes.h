// Arithmetic of shapes that several families of kernel ops share. It is symbolic, so that tracing
// with dynamic shapes works.
#pragma once

#include <ATen/native/TypeProperties.h>

#include <algorithm>

#include "kernel_ops/framework/results.h"

namespace tandem::kernel_ops {

/// The number of rows of x, whose last `row_dims` dimensions form a row.
inline c10::SymInt rows_of(const Tensor& x, int64_t row_dims = 1) {
  c10::SymInt rows = 1;
  const auto sizes = x.sym_sizes();
  for (size_t d = 0; d + static_cast<size_t>(row_dims) < sizes.size(); ++d) rows = rows * sizes[d];
  return rows;
}

inline c10::SymDimVector sizes_of(const Tensor& x) {
  return c10::SymDimVector(x.sym_sizes().begin(), x.sym_sizes().end());
}

/// Whether sums of elements of this dtype are kept in a wider one.
inline bool is_narrow(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }
/// The dtype in which a reference computes: float32 for 16-bit elements, else the dtype itself, so
/// that torch promotes or raises.
inline at::ScalarType wide(at::ScalarType dtype) { return is_narrow(dtype) ? at::kFloat : dtype; }
/// The dtype of x + bias. at::result_type is an op for which DTensor has no sharding rule, so a
/// decomposition must not call it.
inline at::ScalarType sum_dtype(const at::Tensor& x, const std::optional<at::Tensor>& bias) {
  using at::native::update_result_type_state;
  if (!bias) return x.scalar_type();
  return at::native::result_type(update_result_type_state(*bias, update_result_type_state(x, {})));
}

/// The dtype of a row's statistics: float32, or float64 if the computation is in float64.
inline at::ScalarType statistics(at::ScalarType compute) {
  return compute == at::kDouble ? at::kDouble : at::kFloat;
}

inline ResultSpec like(const Tensor& x, at::ScalarType dtype, bool wanted = true) {
  return {sizes_of(x), dtype, wanted};
}
inline ResultSpec like(const Tensor& x) { return like(x, x.scalar_type()); }

inline ResultSpec scalar(at::ScalarType dtype) { return {{}, dtype, true}; }

}  // namespace tandem::kernel_ops
