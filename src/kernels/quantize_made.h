// Quantization of a matrix while its rows are computed.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <variant>

#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// Writes `count` rows of a matrix, from `first` on, to contiguous memory, or only reads rows that
/// exist already. Several threads may call it for different rows at once.
using MakeRows = std::function<void(size_t first, size_t count, void* to)>;

/// A contiguous matrix y, and the function that makes its rows. Quantizers read rows while they are
/// in the cache; where `data` is null, the rows are not kept.
struct MadeRows {
  Rows y;
  MakeRows make;
  /// The operands of `make`, whose row r belongs to row r of y. Quantizers of blocks prefetch them
  /// while they convert earlier rows. Unused entries have null data.
  std::array<ConstRows, 3> sources = {};
  /// One thread gets the rows [k in_order, (k + 1) in_order) in order, because their columns are
  /// summed meanwhile. 32, 64, a multiple of 128, or 1.
  size_t in_order = 1;
  /// `make` gets `first` and `count` as multiples of this, but for the last rows, as blocks of
  /// matrices that are quantized beside y need it. 1, 32 or 128.
  size_t together = 1;
};

/// The rows of one call of `make`, at most `most` unless `together` needs more, and the rows that
/// one thread gets.
struct MadeBands {
  MadeBands(const MadeRows& made, size_t most)
      : height((most + made.together - 1) / made.together * made.together) {
    if (height > made.in_order) height = height / made.in_order * made.in_order;
    together = std::max(height, made.in_order);
    count = made.y.cols == 0 ? 0 : (made.y.rows + together - 1) / together;
  }
  size_t height, together;
  /// The number of parts that threads get.
  size_t count;
};

/// Makes all rows of y, in bands that stay in the cache.
void make_all(const MadeRows& made);

/// Contiguous rows, from `first` on, of a matrix of `of_rows` rows. A kernel that makes rows of
/// another matrix too makes and quantizes this matrix band by band; several threads quantize bands
/// at once. Outputs are those of the whole matrix. A band has whole blocks, but for the last band,
/// and requires takes_bands_of_blocks() if there are blocks. The first band clears the padding of
/// the whole matrix.
struct Band {
  ConstRows rows;
  size_t first, of_rows;
};
/// Whether this processor's vectors have more than one lane.
bool takes_bands_of_blocks();

/// What a quantizer reads: a matrix, a matrix whose rows it makes, or a band. The bits of the codes
/// do not depend on which. Rows that are made are read while they are in the cache, and y is
/// written where it has memory. If one scale depends on all of y, y must have memory, and is read
/// again.
using Input = std::variant<ConstRows, const MadeRows*, Band>;

/// The element and the sizes of the whole matrix, and its memory if it has any.
inline ConstRows whole_of(const Input& x) {
  if (const auto* made = std::get_if<const MadeRows*>(&x)) return (*made)->y;
  if (const auto* band = std::get_if<Band>(&x)) {
    const ConstRows& rows = band->rows;
    return {nullptr, rows.element, band->of_rows, rows.cols, rows.stride};
  }
  return *std::get_if<ConstRows>(&x);
}
/// Whether the first rows of the matrix are among those that are read.
inline bool has_first_rows(const Input& x) {
  const auto* band = std::get_if<Band>(&x);
  return band == nullptr || band->first == 0;
}

/// Returns memory of the calling thread for this many elements, which is valid until the next call.
void* memory_beside(size_t elements);

/// The result of a search for the amax, which skips NaN.
struct Seen {
  float amax = 0.0f;
  bool has_nan = false;
};

}  // namespace tandem::kernels::cpu
