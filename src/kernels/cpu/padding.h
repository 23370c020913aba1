// What lies behind the numbers of a padded matrix.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// Zeros what lies behind [rows, cols] of a contiguous matrix; nothing where it is null.
template <typename T>
void clear_padding(T* matrix, const MatrixShape& shape, size_t rows, size_t cols) {
  if (matrix == nullptr) return;
  for (size_t r = 0; r < rows && cols < shape.cols; ++r)
    std::fill_n(matrix + r * shape.cols + cols, shape.cols - cols, T{});
  std::fill_n(matrix + rows * shape.cols, (shape.rows - rows) * shape.cols, T{});
}

}  // namespace tandem::kernels::cpu
