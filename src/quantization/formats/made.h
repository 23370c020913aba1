// What a kernel op makes and quantizes in one, on the CPU.
#pragma once

#include <atomic>

#include "kernel_ops/framework/arguments.h"
#include "kernels/partial_sums.h"
#include "kernels/quantize_made.h"
#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

/// `count` rows from `first` on; of a view that is absent nothing.
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

/// `count` contiguous rows as those of a matrix of this shape.
inline kernels::Rows rows_at(void* to, kernels::Rows whole, size_t count) {
  return {to, whole.element, count, whole.cols, whole.cols};
}

/// The sums of columns while the rows of a matrix are made; nothing where nobody wants them.
class SumsOfMade {
 public:
  /// `cols`: of the sums; 0 where nobody wants them.
  SumsOfMade(size_t rows, size_t cols);
  /// What adds rows from this one on.
  kernels::PartialSums from_row(size_t row) const { return part_.from_row(row); }
  /// As of MadeRows.
  size_t in_order() const { return part_ ? part_.block_rows : 1; }
  /// Once all rows are made: the sums of as many columns as there are.
  void finish(kernels::Vector totals) const;

 private:
  size_t rows_;
  Tensor memory_;
  kernels::PartialSums part_;
};

/// Makes the rows of y, of these sizes, and writes their codes, with the bits of Quantize. Where
/// the kind of scale can, y is quantized while rows of it are in the cache, and does not come to
/// memory unless `y` is defined; else one after the other. Where no codes are asked for it is made
/// alone. On the CPU.
void make_and_quantize(kernels::cpu::MadeRows made, const Tensor& y, c10::SymIntArrayRef sizes,
                       const AskedCodes& asked, tandem::Group group);

/// The codes of a matrix y whose rows are made beside those of another, with the bits of Quantize:
/// where the kind of scale can, while they are in the cache. Without a quantizer nothing but y, if
/// that is wanted.
class CodesBeside {
 public:
  /// `y`: its element, rows and columns; `memory`: y where it is wanted itself; `sizes`: of y.
  CodesBeside(kernels::Rows y, const Tensor& memory, c10::SymIntArrayRef sizes,
              const AskedCodes& asked, tandem::Group group);
  /// As of MadeRows.
  size_t together() const;
  /// Where this thread is to write `count` rows from `first` on; absent where nobody wants them.
  /// Valid until it asks for the next.
  kernels::Rows rows(size_t first, size_t count) const;
  /// Once these are written.
  void take(kernels::ConstRows rows, size_t first) const;
  /// Once all are.
  void finish() const;

 private:
  enum class Way {
    nowhere,
    /// The codes of each band as it comes.
    in_bands,
    /// The amax of each, and the codes at the end.
    once_seen,
    at_the_end
  };
  Way way() const;

  kernels::Rows y_;
  c10::SymDimVector sizes_;
  const AskedCodes& asked_;
  tandem::Group group_;
  Way way_;
  Tensor memory_;
  mutable std::atomic<float> amax_{0.0f};
  mutable std::atomic<bool> has_nan_{false};
};

/// The same matrix, in memory: this one's own where it had none.
class MadeInMemory {
 public:
  explicit MadeInMemory(kernels::cpu::MadeRows made);
  const kernels::cpu::MadeRows& rows() const { return made_; }

 private:
  kernels::cpu::MadeRows made_;
  Tensor memory_;
};

}  // namespace tandem::kernel_ops
