#include "kernel_ops/operands.h"

namespace tandem::kernel_ops {

namespace {

size_t last_dim(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? 1 : static_cast<size_t>(tensor.size(-1));
}

size_t rows_in(const at::Tensor& tensor, size_t cols) {
  if (cols != 0) return static_cast<size_t>(tensor.numel()) / cols;
  size_t rows = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) rows *= static_cast<size_t>(tensor.size(d));
  return rows;
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

RowsIn::RowsIn(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const at::Tensor* source = &tensor;
  size_t stride = 0;
  const size_t cols = last_dim(tensor);
  if (tensor.is_contiguous()) {
    stride = cols;
  } else if (has_even_rows(tensor)) {
    stride = static_cast<size_t>(tensor.stride(tensor.dim() - 2));
  } else {
    contiguous_ = tensor.contiguous();
    source = &contiguous_;
    stride = cols;
  }
  view_ = {source->const_data_ptr(), element_of(tensor.scalar_type()), rows_in(tensor, cols), cols,
           stride};
}

VectorIn::VectorIn(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (!tensor.is_contiguous()) contiguous_ = tensor.contiguous();
  const at::Tensor& source = contiguous_.defined() ? contiguous_ : tensor;
  view_ = {source.const_data_ptr(), element_of(tensor.scalar_type()),
           static_cast<size_t>(tensor.numel())};
}

kernels::Rows rows_out(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const size_t cols = last_dim(tensor);
  return {tensor.data_ptr(), element_of(tensor.scalar_type()), rows_in(tensor, cols), cols, cols};
}

kernels::Vector vector_out(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.data_ptr(), element_of(tensor.scalar_type()), static_cast<size_t>(tensor.numel())};
}

}  // namespace tandem::kernel_ops
