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
};

/// Rows that are asked for at a time, at most `most`, and rows that a thread gets at once.
struct MadeBands {
  MadeBands(const MadeRows& made, size_t most)
      : height(most > made.in_order ? most / made.in_order * made.in_order : most),
        together(std::max(height, made.in_order)),
        count(made.y.cols == 0 ? 0 : (made.y.rows + together - 1) / together) {}
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

}  // namespace tandem::kernels::cpu
