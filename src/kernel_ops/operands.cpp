#include "kernel_ops/operands.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace tandem::kernel_ops {

namespace {

size_t elements(at::IntArrayRef sizes) {
  return static_cast<size_t>(c10::multiply_integers(sizes));
}

/// Rows and columns, where a row is the last `dims` dimensions; a scalar is one of one element.
std::pair<size_t, size_t> shape_of_rows(const at::Tensor& tensor, int64_t dims) {
  const size_t leading = static_cast<size_t>(std::max<int64_t>(tensor.dim() - dims, 0));
  return {elements(tensor.sizes().slice(0, leading)), elements(tensor.sizes().slice(leading))};
}

/// True where the leading dimensions are evenly spaced, so that one stride walks all rows.
bool has_even_rows(const at::Tensor& tensor) {
  const int64_t dims = tensor.dim();
  if (dims < 2 || (tensor.size(-1) > 1 && tensor.stride(-1) != 1)) return false;
  for (int64_t d = 0; d + 2 < dims; ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) != tensor.stride(d + 1) * tensor.size(d + 1))
      return false;
  return tensor.stride(dims - 2) >= tensor.size(-1) || tensor.stride(dims - 2) == 0;
}

}  // namespace

RowsIn::RowsIn(const at::Tensor& tensor, int64_t dims) {
  if (!tensor.defined()) return;
  const at::Tensor* source = &tensor;
  size_t stride = 0;
  const auto [rows, cols] = shape_of_rows(tensor, dims);
  if (tensor.is_contiguous()) {
    stride = cols;
  } else if (dims == 1 && has_even_rows(tensor)) {
    stride = static_cast<size_t>(tensor.stride(tensor.dim() - 2));
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

}  // namespace tandem::kernel_ops
