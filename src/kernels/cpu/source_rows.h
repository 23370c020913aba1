// Prefetching of the rows from which later rows are computed.
#pragma once

#include "kernels/quantize_made.h"

namespace tandem::kernels::cpu {

/// Starts to bring a line into the second-level cache. The first-level cache is left to the rows
/// that are being converted.
inline void fetch_line(const void* line) {
  __builtin_prefetch(line, /*for writing=*/0, /*locality=*/2);
}

/// Rows [first, end) of the sources of a matrix that is being computed.
class SourceRows {
 public:
  SourceRows(const MadeRows& made, size_t first, size_t end)
      : made_(made), first_(first), end_(end) {}

  /// Starts to fetch what columns [col, col + cols) of the nth row are computed from, taken as an
  /// equal share of each source's row.
  void fetch(size_t n, size_t col, size_t cols) const {
    if (first_ + n >= end_) return;
    constexpr size_t kLine = 64;
    for (const ConstRows& source : made_.sources) {
      if (!source) continue;
      const size_t bytes = bytes_per_element(source.element),
                   begin = col * source.cols / made_.y.cols * bytes,
                   end = (col + cols) * source.cols / made_.y.cols * bytes;
      const auto* row =
          static_cast<const char*>(source.data) + (first_ + n) * source.stride * bytes;
      for (size_t b = begin; b < end; b += kLine) fetch_line(row + b);
    }
  }

 private:
  const MadeRows& made_;
  size_t first_, end_;
};

}  // namespace tandem::kernels::cpu
