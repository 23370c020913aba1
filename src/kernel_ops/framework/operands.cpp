#include "kernel_ops/framework/operands.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace tandem::kernel_ops {

c10::DimVector strides_of(const at::Tensor& tensor) {
  c10::DimVector strides(tensor.strides().begin(), tensor.strides().end());
  int64_t dense = 1;
  for (size_t d = strides.size(); d-- > 0;) {
    const int64_t size = tensor.size(static_cast<int64_t>(d));
    if (size <= 1) strides[d] = dense;
    dense = strides[d] * size;
  }
  return strides;
}

namespace {

size_t elements(at::IntArrayRef sizes) {
  return static_cast<size_t>(c10::multiply_integers(sizes));
}

/// Rows and columns of a tensor whose last `dims` dimensions form a row. A scalar is one row of one
/// element.
std::pair<size_t, size_t> shape_of_rows(const at::Tensor& tensor, int64_t dims) {
  const size_t leading = static_cast<size_t>(std::max<int64_t>(tensor.dim() - dims, 0));
  return {elements(tensor.sizes().slice(0, leading)), elements(tensor.sizes().slice(leading))};
}

/// The stride between rows of `tensor`. nullopt if the last dimension is not dense, if the leading
/// dimensions are not evenly spaced, or if distinct rows overlap. Strides of dimensions of one
/// element are not read: they mean nothing, and strides_of cannot tell which value would fit here.
std::optional<size_t> stride_of_rows(const at::Tensor& tensor) {
  const int64_t cols = tensor.size(-1);
  if (cols > 1 && tensor.stride(-1) != 1) return std::nullopt;
  std::optional<int64_t> stride;
  int64_t even = 0;  // the stride that makes rows evenly spaced across dimension d
  for (int64_t d = tensor.dim() - 2; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    if (!stride) stride = even = tensor.stride(d);
    if (tensor.stride(d) != even) return std::nullopt;
    even *= tensor.size(d);
  }
  if (!stride) return static_cast<size_t>(cols);
  if (*stride != 0 && *stride < cols) return std::nullopt;
  return static_cast<size_t>(*stride);
}

}  // namespace

RowsIn::RowsIn(const at::Tensor& tensor, int64_t dims) {
  if (!tensor.defined()) return;
  const at::Tensor* source = &tensor;
  size_t stride = 0;
  const auto [rows, cols] = shape_of_rows(tensor, dims);
  if (tensor.is_contiguous()) {
    stride = cols;
  } else if (const auto even = dims == 1 ? stride_of_rows(tensor) : std::nullopt) {
    stride = *even;
  } else {
    contiguous_ = tensor.contiguous();
    source = &contiguous_;
    stride = cols;
  }
  view_ = {source->const_data_ptr(), element_of(tensor.scalar_type()), rows, cols, stride};
}

VectorIn::VectorIn(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (!tensor.is_contiguous()) contiguous_ = tensor.contiguous();
  const at::Tensor& source = contiguous_.defined() ? contiguous_ : tensor;
  view_ = {source.const_data_ptr(), element_of(tensor.scalar_type()),
           static_cast<size_t>(tensor.numel())};
}

kernels::Rows rows_out(const at::Tensor& tensor, int64_t dims) {
  if (!tensor.defined()) return {};
  const auto [rows, cols] = shape_of_rows(tensor, dims);
  return {tensor.data_ptr(), element_of(tensor.scalar_type()), rows, cols, cols};
}

kernels::Vector vector_out(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.data_ptr(), element_of(tensor.scalar_type()), static_cast<size_t>(tensor.numel())};
}

at::Tensor masked_out(const at::Tensor& like, std::optional<at::ScalarType> dtype) {
  return like.new_empty({0}, like.options().dtype(dtype.value_or(like.scalar_type())));
}

}  // namespace tandem::kernel_ops
