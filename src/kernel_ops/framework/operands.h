// Tensors as the raw views that CPU kernels take.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>

#include "kernels/views.h"

namespace tandem::kernel_ops {

inline kernels::Element element_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return kernels::Element::float32;
  if (dtype == at::kBFloat16) return kernels::Element::bfloat16;
  TORCH_INTERNAL_ASSERT(dtype == at::kHalf, "no kernel computes on ", dtype);
  return kernels::Element::float16;
}

/// The strides of `tensor` in elements. A dimension of at most one element gets the stride that it
/// would have in a contiguous tensor: its own may be any number, because nothing steps along it.
c10::DimVector strides_of(const at::Tensor& tensor);

/// A tensor read as rows over its last dimension. Copies only if the rows are not contiguous or not
/// evenly spaced.
class RowsIn {
 public:
  /// `dims`: how many of the last dimensions form a row.
  explicit RowsIn(const at::Tensor& tensor, int64_t dims = 1);
  explicit RowsIn(const std::optional<at::Tensor>& tensor, int64_t dims = 1)
      : RowsIn(tensor ? *tensor : at::Tensor(), dims) {}
  operator kernels::ConstRows() const {
    return view_;
  }  // NOLINT(google-explicit-constructor): this is what it is for
  int64_t rows() const { return static_cast<int64_t>(view_.rows); }

 private:
  at::Tensor contiguous_;
  kernels::ConstRows view_;
};

/// A tensor read as one contiguous vector.
class VectorIn {
 public:
  explicit VectorIn(const at::Tensor& tensor);
  explicit VectorIn(const std::optional<at::Tensor>& tensor)
      : VectorIn(tensor ? *tensor : at::Tensor()) {}
  operator kernels::ConstVector() const { return view_; }  // NOLINT(google-explicit-constructor)

 private:
  at::Tensor contiguous_;
  kernels::ConstVector view_;
};

/// The view of a result to write; empty for an undefined tensor.
kernels::Rows rows_out(const at::Tensor& tensor, int64_t dims = 1);
kernels::Vector vector_out(const at::Tensor& tensor);

/// The tensor that the dispatcher returns for an unwanted result: it has no elements.
at::Tensor masked_out(const at::Tensor& like, std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace tandem::kernel_ops
