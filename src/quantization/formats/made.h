// Matrices that a kernel op computes and quantizes in one pass, on the CPU.
#pragma once

#include <atomic>

#include "kernel_ops/framework/arguments.h"
#include "kernels/partial_sums.h"
#include "kernels/quantize_made.h"
#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

/// `count` rows that begin at `first`; an absent view stays absent.
template <typename View>
View rows_from(View whole, size_t first, size_t count) {
  if (!whole) return whole;
  const size_t offset = first * whole.stride * bytes_per_element(whole.element);
  if constexpr (std::is_same_v<View, kernels::Rows>) {
    whole.data = static_cast<std::byte*>(whole.data) + offset;
  } else {
    whole.data = static_cast<const std::byte*>(whole.data) + offset;
  }
  whole.rows = count;
  return whole;
}

/// `count` contiguous rows at `to`, with the columns and elements of `whole`.
inline kernels::Rows rows_at(void* to, kernels::Rows whole, size_t count) {
  return {to, whole.element, count, whole.cols, whole.cols};
}

/// Sums of columns that are computed while the rows of a matrix are; empty if they are not wanted.
class SumsOfMade {
 public:
  /// `cols`: the number of columns; 0 if sums are not wanted.
  SumsOfMade(size_t rows, size_t cols);
  /// The sums to which rows from `row` on are added.
  kernels::PartialSums from_row(size_t row) const { return part_.from_row(row); }
  /// The value for MadeRows::in_order.
  size_t in_order() const { return part_ ? part_.block_rows : 1; }
  /// Writes the sums of columns, after all rows were added.
  void finish(kernels::Vector totals) const;

 private:
  size_t rows_;
  Tensor memory_;
  kernels::PartialSums part_;
};

/// Computes the rows of y, whose sizes are `sizes`, and writes their codes, bitwise as Quantize. If
/// the kind of scale allows, rows are quantized while they are in the cache, and y is not stored
/// unless it is defined; else y is stored and quantized afterwards. Without requested codes, only y
/// is computed. On the CPU.
void make_and_quantize(kernels::cpu::MadeRows made, const Tensor& y, c10::SymIntArrayRef sizes,
                       const RequestedCodes& requested, tandem::Group group);

/// The codes of a matrix y whose rows a kernel computes beside another matrix, bitwise as Quantize.
/// If the kind of scale allows, rows are quantized while they are in the cache. Without a quantizer
/// only y is stored, if it is wanted.
class CodesBeside {
 public:
  /// `y`: element, rows and columns; `memory`: the tensor y if it is wanted, else undefined;
  /// `sizes`: the sizes of y.
  CodesBeside(kernels::Rows y, const Tensor& memory, c10::SymIntArrayRef sizes,
              const RequestedCodes& requested, tandem::Group group);
  /// The value for MadeRows::together.
  size_t together() const;
  /// Memory for this thread to write `count` rows that begin at `first`; absent if they are not
  /// wanted. It is valid until the thread's next call.
  kernels::Rows rows(size_t first, size_t count) const;
  /// Must be called when these rows have been written.
  void take(kernels::ConstRows rows, size_t first) const;
  /// Must be called when all rows have been written.
  void finish() const;

 private:
  enum class Way {
    nowhere,
    /// Codes are written for each band.
    in_bands,
    /// The amax is computed for each band, and all codes are written at the end.
    once_seen,
    at_the_end
  };
  Way way() const;

  kernels::Rows y_;
  c10::SymDimVector sizes_;
  const RequestedCodes& requested_;
  tandem::Group group_;
  Way way_;
  Tensor memory_;
  mutable std::atomic<float> amax_{0.0f};
  mutable std::atomic<bool> has_nan_{false};
};

}  // namespace tandem::kernel_ops
