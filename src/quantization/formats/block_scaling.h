// FP8 with one float32 scale per block: 128 numbers of a row or a column, or 128 by 128 numbers.
#pragma once

#include "quantization/formats/format.h"

namespace tandem {

/// 1x128 blocks. dequant_scale is float32 and zero beyond the blocks: for rows [blocks, up(rows,
/// 4)], for columns [blocks, up(cols, 4)].
extern const CodeLayout kLineScale;
/// 128x128 blocks: dequant_scale [blocks, up(blocks, 4)] serves both directions.
extern const CodeLayout kSquareScale;

/// Per block: scale = format max / max(amax, epsilon), rounded down to a power of two if
/// `power_of_two`; codes = cast(x * scale), saturating; dequant_scale = 1 / scale. The codes of
/// each direction are computed from x.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenQuantize).
extern const ScalingDef kBlockScaling;

/// scale = format max / max(amax, epsilon) in ATen operations, with the rules for 0, infinity and
/// overflow. `big` replaces an infinite scale. amax: float32, no NaN.
at::Tensor scale_from_amax(const at::Tensor& amax, const Quantizer& quantizer, double big);
/// 1 / scale in float32, rounded once.
at::Tensor inverse_of(const at::Tensor& scale);

}  // namespace tandem
