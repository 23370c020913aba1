// Padding around the numbers of a matrix.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// Sets the padding outside of [rows, cols] of a contiguous matrix to zero; does nothing for
/// nullptr.
template <typename T>
void clear_padding(T* matrix, const MatrixShape& shape, size_t rows, size_t cols) {
  if (matrix == nullptr) return;
  for (size_t r = 0; r < rows && cols < shape.cols; ++r)
    std::fill_n(matrix + r * shape.cols + cols, shape.cols - cols, T{});
  std::fill_n(matrix + rows * shape.cols, (shape.rows - rows) * shape.cols, T{});
}

}  // namespace tandem::kernels::cpu
