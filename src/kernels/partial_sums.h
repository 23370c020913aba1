// Sums over the rows of a matrix, for kernels that get some of the rows at a time.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>

namespace tandem::kernels {

/// Sums over the rows of a matrix, one per column, in float32. Each block of rows is summed from
/// its first row to its last, then the sums of the blocks are added in order. The blocks depend
/// only on the number of rows, so that the bits depend neither on threads nor on the rows that a
/// kernel gets at a time.
struct PartialSums {
  /// [blocks, cols], uninitialized; null where no sums are requested.
  float* sums = nullptr;
  size_t cols = 0;
  /// Rows of a block: sum_block_rows of the rows of the matrix.
  size_t block_rows = 1;
  /// The index in the matrix of the kernel's row 0. A kernel that gets the first row of a block
  /// sets the sums of the block to zero before.
  size_t first = 0;

  explicit operator bool() const { return sums != nullptr; }
  PartialSums from_row(size_t row) const { return {sums, cols, block_rows, first + row}; }
};

/// Rows of a block, such that a matrix has at most 32 blocks. Blocks of sums fit the blocks of 32
/// and of 128 rows of quantizers: one size is a multiple of the other.
constexpr size_t sum_block_rows(size_t rows) {
  const size_t least = (rows + 31) / 32;
  return least > 128 ? (least + 127) / 128 * 128 : std::max<size_t>(32, std::bit_ceil(least));
}
/// Blocks of a matrix, at least 1.
constexpr size_t sum_blocks(size_t rows) {
  return std::max<size_t>(1, (rows + sum_block_rows(rows) - 1) / sum_block_rows(rows));
}

}  // namespace tandem::kernels
