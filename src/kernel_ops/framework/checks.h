// Checks of arguments that kernel ops share. An error text says what was expected and where that
// follows from, what was given, and what to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <string_view>

namespace tandem {

/// The name of a dtype in Python.
inline auto dtype_name(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

/// `tensor` must have a dtype for which norms and dropout are defined.
inline void check_floating(std::string_view op, const at::Tensor& tensor, std::string_view name) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble,
      op, ": expected ", name, " of dtype float32, bfloat16, float16 or float64, got ",
      dtype_name(dtype), ". Convert it before the call.");
}

/// `dtype` must be one that codes can be dequantized to.
inline void check_decoded_dtype(std::string_view op, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble,
      op, ": expected numbers in float32, bfloat16, float16 or float64, got ",
      dtype == at::ScalarType::Undefined ? "none" : dtype_name(dtype),
      ". Take float32, and convert that.");
}

inline void check_codes(std::string_view op, const at::Tensor& codes) {
  TORCH_CHECK_TYPE(codes.scalar_type() == at::kByte, op, ": expected uint8 codes, got ",
                   dtype_name(codes.scalar_type()), ". Pass what a quantize op returned.");
}

/// `parameter` must be a vector with one element per element of x's last dimension.
inline void check_last_dim(std::string_view op, const at::Tensor& x, const at::Tensor& parameter,
                           std::string_view name) {
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": expected x with at least 1 dimension, got a scalar. ",
                    "Pass x.reshape({1}) if one element is meant.");
  TORCH_CHECK_VALUE(parameter.dim() == 1 && parameter.sym_size(0) == x.sym_size(-1), op,
                    ": expected ", name, " of shape [", x.sym_size(-1),
                    "], the last dimension of x ", x.sym_sizes(), ", got ", parameter.sym_sizes(),
                    ". Build the op with ", x.sym_size(-1), " features or reshape x.");
}

inline void check_same_shape(std::string_view op, const at::Tensor& a, std::string_view a_name,
                             const at::Tensor& b, std::string_view b_name) {
  TORCH_CHECK_VALUE(a.sym_sizes() == b.sym_sizes(), op, ": expected ", a_name, " of the shape of ",
                    b_name, ", ", b.sym_sizes(), ", got ", a.sym_sizes(), ". Expand or reshape ",
                    a_name, " before the call.");
}

/// `statistic` must have one element per row of x; a row is the last `row_dims` dimensions.
inline void check_statistic(std::string_view op, const at::Tensor& x, const at::Tensor& statistic,
                            std::string_view name, int64_t row_dims) {
  c10::SymInt rows = 1;
  const auto sizes = x.sym_sizes();
  for (const c10::SymInt& size : sizes.slice(0, sizes.size() - static_cast<size_t>(row_dims)))
    rows *= size;
  TORCH_CHECK_VALUE(statistic.sym_numel() == rows, op, ": expected ", name, " with ", rows,
                    " elements, one per row of x ", x.sym_sizes(), ", got shape ",
                    statistic.sym_sizes(), ". Pass what the forward op returned.");
}

inline void check_one_element(std::string_view op, const at::Tensor& tensor,
                              std::string_view name) {
  TORCH_CHECK_VALUE(tensor.sym_numel() == 1, op, ": expected ", name,
                    " with one element, got shape ", tensor.sym_sizes(), ". Pass a scalar tensor.");
}

inline void check_even_last_dim(std::string_view op, const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) % 2 == 0, op,
                    ": expected x with an even last dimension, two halves, got ", x.sym_sizes(),
                    ". Let the product before it write twice the features.");
}

}  // namespace tandem
