// FP8 codes of a matrix while it is made.
#pragma once

#include <functional>

#include "kernels/quantize.h"

namespace tandem::kernels::cpu {

/// Writes `count` rows of a matrix, from `first` on. Several threads may ask for different rows at
/// once.
using MakeRows = std::function<void(size_t first, size_t count)>;

/// quantize_current of y, which is contiguous and whose rows `make` writes: the same bits, and y is
/// looked at while it is in the cache.
///
/// Bytes: writes y, reads it once, writes one byte per element.
void quantize_current_made(ConstRows y, const MakeRows& make, const CurrentScaling& scaling,
                           Fp8Output out);

/// quantize_delayed of y, likewise.
///
/// Bytes: writes y, and one byte per element.
void quantize_delayed_made(ConstRows y, const MakeRows& make, Fp8Format format, float quant_scale,
                           Fp8Output out);

}  // namespace tandem::kernels::cpu
