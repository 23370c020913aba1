// Codes of a matrix while it is made.
#pragma once

#include <functional>

#include "kernels/fp8_block.h"
#include "kernels/mxfp8.h"
#include "kernels/quantize.h"

namespace tandem::kernels::cpu {

/// Writes `count` rows of a matrix, from `first` on, to contiguous memory. Several threads may ask
/// for different rows at once.
using MakeRows = std::function<void(size_t first, size_t count, void* to)>;

/// A contiguous matrix y, and what makes its rows. It is quantized while some rows of it are in the
/// cache; where `data` is null nothing else of it remains.
struct MadeRows {
  Rows y;
  MakeRows make;
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

}  // namespace tandem::kernels::cpu
