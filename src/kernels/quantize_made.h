// Quantization of a matrix while its rows are computed.
#pragma once

#include <algorithm>
#include <array>
#include <functional>

#include "kernels/fp8_block.h"
#include "kernels/mxfp8.h"
#include "kernels/nvfp4.h"
#include "kernels/quantize.h"

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

/// quantize_current of y, which has memory, with the same bits.
///
/// Bytes:   writes y, reads it once, writes one byte per element.
void quantize_current_made(const MadeRows& made, const CurrentScaling& scaling, Fp8Output out);

/// quantize_delayed of y, with the same bits.
///
/// Bytes:   writes y where it has memory, and one byte per element.
void quantize_delayed_made(const MadeRows& made, Fp8Format format, float quant_scale,
                           Fp8Output out);

/// fp8_block_quantize of y, with the same bits.
///
/// Bytes:   writes y where it has memory; one byte per element and shape, and 1/32 of that in
///          scales.
void fp8_block_quantize_made(const MadeRows& made, const Fp8BlockScaling& scaling,
                             Fp8BlockOutput row, Fp8BlockOutput column, Fp8BlockOutput square,
                             float* amax);

/// mxfp8_quantize of y, with the same bits.
///
/// Bytes:   writes y where it has memory; one byte per element and direction, and 1/32 of that in
///          scales.
void mxfp8_quantize_made(const MadeRows& made, const Mxfp8Scaling& scaling, Mxfp8Output row,
                         Mxfp8Output column, float* amax);

/// nvfp4_quantize of y, which has memory, with the same bits.
///
/// Bytes:   writes y, reads it once, and once more for rotated column codes; writes half a byte per
///          element and direction, and 1/8 of that in scales.
void nvfp4_quantize_made(const MadeRows& made, const Fp4Scaling& scaling, Fp4Output row,
                         Fp4Output column, float* amax);

/// Makes all rows of y, which has memory; returns the amax of y, NaN skipped.
float amax_made(const MadeRows& made);

/// Makes all rows of y, in bands that stay in the cache.
void make_all(const MadeRows& made);

/// Contiguous rows, from `first` on, of a matrix of `of_rows` rows. A kernel that makes rows of
/// another matrix too makes and quantizes this matrix band by band; several threads quantize bands
/// at once.
struct Band {
  ConstRows rows;
  size_t first, of_rows;
};

/// Returns memory of the calling thread for this many elements, which is valid until the next call.
void* memory_beside(size_t elements);

/// The result of a search for the amax, which skips NaN.
struct Seen {
  float amax = 0.0f;
  bool has_nan = false;
};
Seen look_at_band(const Band& band);

/// Writes the codes of a band into `codes`, the codes of the whole matrix, with the bits of
/// quantize_delayed.
Seen quantize_delayed_band(const Band& band, Fp8Format format, float quant_scale, uint8_t* codes);

/// Write the codes and scales of a band into the outputs of the whole matrix. A band has whole
/// blocks, but for the last band. The first band clears the padding of the whole matrix. Requires
/// takes_bands_of_blocks().
Seen fp8_block_quantize_band(const Band& band, const Fp8BlockScaling& scaling, Fp8BlockOutput row,
                             Fp8BlockOutput column, Fp8BlockOutput square);
Seen mxfp8_quantize_band(const Band& band, const Mxfp8Scaling& scaling, Mxfp8Output row,
                         Mxfp8Output column);
/// Whether this processor's vectors have more than one lane.
bool takes_bands_of_blocks();

/// quantize_current and nvfp4_quantize of a matrix whose amax is known, with the same bits.
void quantize_current_seen(ConstRows y, const Seen& seen, const CurrentScaling& scaling,
                           Fp8Output out);
void nvfp4_quantize_seen(ConstRows y, const Seen& seen, const Fp4Scaling& scaling, Fp4Output row,
                         Fp4Output column, float* amax);

}  // namespace tandem::kernels::cpu
