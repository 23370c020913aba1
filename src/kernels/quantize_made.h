// Codes of a matrix while it is made.
#pragma once

#include <algorithm>
#include <array>
#include <functional>

#include "kernels/fp8_block.h"
#include "kernels/mxfp8.h"
#include "kernels/nvfp4.h"
#include "kernels/quantize.h"

namespace tandem::kernels::cpu {

/// Writes `count` rows of a matrix, from `first` on, to contiguous memory; where they are there
/// already, looks at them. Several threads may ask for different rows at once.
using MakeRows = std::function<void(size_t first, size_t count, void* to)>;

/// A contiguous matrix y, and what makes its rows. It is quantized while some rows of it are in the
/// cache; where `data` is null nothing else of it remains.
struct MadeRows {
  Rows y;
  MakeRows make;
  /// What rows are made of, those of y's number: quantizers of blocks fetch it into the cache while
  /// they convert the rows before. Fewer are absent.
  std::array<ConstRows, 3> sources = {};
  /// So many rows, of each multiple of it on, are asked for in order and by one thread: those whose
  /// columns are summed meanwhile. 32, 64 or a multiple of 128, or 1.
  size_t in_order = 1;
  /// Rows are asked for in numbers, and from multiples on, of so many, the last ones excepted: for
  /// blocks of what is made beside. 1, 32 or 128.
  size_t together = 1;
};

/// Rows that are asked for at a time, at most `most` unless more must be together, and rows that a
/// thread gets at once.
struct MadeBands {
  MadeBands(const MadeRows& made, size_t most)
      : height((most + made.together - 1) / made.together * made.together) {
    if (height > made.in_order) height = height / made.in_order * made.in_order;
    together = std::max(height, made.in_order);
    count = made.y.cols == 0 ? 0 : (made.y.rows + together - 1) / together;
  }
  size_t height, together;
  /// Of those that threads get.
  size_t count;
};

/// quantize_current of y, which has memory: the same bits.
///
/// Bytes: writes y, reads it once, writes one byte per element.
void quantize_current_made(const MadeRows& made, const CurrentScaling& scaling, Fp8Output out);

/// quantize_delayed of y: the same bits.
///
/// Bytes: writes y where it has memory, and one byte per element.
void quantize_delayed_made(const MadeRows& made, Fp8Format format, float quant_scale,
                           Fp8Output out);

/// fp8_block_quantize of y: the same bits.
///
/// Bytes: writes y where it has memory; one byte per element and shape, and 1/32 of that in scales.
void fp8_block_quantize_made(const MadeRows& made, const Fp8BlockScaling& scaling,
                             Fp8BlockOutput row, Fp8BlockOutput column, Fp8BlockOutput square,
                             float* amax);

/// mxfp8_quantize of y: the same bits.
///
/// Bytes: writes y where it has memory; one byte per element and direction, and 1/32 of that in
///        scales.
void mxfp8_quantize_made(const MadeRows& made, const Mxfp8Scaling& scaling, Mxfp8Output row,
                         Mxfp8Output column, float* amax);

/// nvfp4_quantize of y, which has memory: the same bits.
///
/// Bytes: writes y, reads it once, for column codes that are rotated once more; writes half a byte
///        per element and direction, and 1/8 of that in scales.
void nvfp4_quantize_made(const MadeRows& made, const Fp4Scaling& scaling, Fp4Output row,
                         Fp4Output column, float* amax);

/// Makes all of y, which has memory; returns its amax, NaN skipped.
float amax_made(const MadeRows& made);

/// Makes all of y, in bands that stay in the cache.
void make_all(const MadeRows& made);

/// Contiguous rows, from `first` on, of a matrix of `of_rows` rows that is quantized band by band
/// while these are made beside another's, several bands at once by several threads.
struct Band {
  ConstRows rows;
  size_t first, of_rows;
};

/// Memory of the calling thread for so many elements of a band, until it asks again.
void* memory_beside(size_t elements);

/// What a search for the amax has found, NaN skipped.
struct Seen {
  float amax = 0.0f;
  bool has_nan = false;
};
Seen look_at_band(const Band& band);

/// Writes the codes of a band among `codes`, those of the whole matrix: the bits of
/// quantize_delayed.
Seen quantize_delayed_band(const Band& band, Fp8Format format, float quant_scale, uint8_t* codes);

/// The same of blocks, of which a band has whole ones but at the end, with their scales. The first
/// band clears the padding of all. Not where takes_bands_of_blocks() is false.
Seen fp8_block_quantize_band(const Band& band, const Fp8BlockScaling& scaling, Fp8BlockOutput row,
                             Fp8BlockOutput column, Fp8BlockOutput square);
Seen mxfp8_quantize_band(const Band& band, const Mxfp8Scaling& scaling, Mxfp8Output row,
                         Mxfp8Output column);
/// Whether this processor's vectors have more than one lane.
bool takes_bands_of_blocks();

/// quantize_current and nvfp4_quantize of a matrix whose amax is known: the same bits.
void quantize_current_seen(ConstRows y, const Seen& seen, const CurrentScaling& scaling,
                           Fp8Output out);
void nvfp4_quantize_seen(ConstRows y, const Seen& seen, const Fp4Scaling& scaling, Fp4Output row,
                         Fp4Output column, float* amax);

}  // namespace tandem::kernels::cpu
