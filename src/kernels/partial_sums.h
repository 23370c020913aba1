// Sums over the rows of a matrix, a part of the rows at a time.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>

namespace tandem::kernels {

/// Sums over the rows of a matrix, one per column, in float32: blocks of rows are summed apart,
/// each from its first row to its last, then added in order. Blocks depend on the number of rows
/// alone, so bits depend neither on threads nor on which rows a kernel is given at a time.
struct PartialSums {
  /// [blocks, cols], of undefined value; null where no sums are wanted.
  float* sums = nullptr;
  size_t cols = 0;
  /// Of a block; sum_block_rows of all rows.
  size_t block_rows = 1;
  /// Which row of the matrix is row 0 of what a kernel is given. A kernel that is given the first
  /// row of a block sets the sums of the block to zero before.
  size_t first = 0;

  explicit operator bool() const { return sums != nullptr; }
  PartialSums from_row(size_t row) const { return {sums, cols, block_rows, first + row}; }
};

/// Rows of a block, at most 32 of which are in a matrix. They fit the blocks of 32 and of 128 rows
/// that quantizers work in: one is a whole number of the other.
constexpr size_t sum_block_rows(size_t rows) {
  const size_t least = (rows + 31) / 32;
  return least > 128 ? (least + 127) / 128 * 128 : std::max<size_t>(32, std::bit_ceil(least));
}
/// Blocks of a matrix, at least 1.
constexpr size_t sum_blocks(size_t rows) {
  return std::max<size_t>(1, (rows + sum_block_rows(rows) - 1) / sum_block_rows(rows));
}

}  // namespace tandem::kernels
