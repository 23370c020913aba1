// FP8 with one float32 scale per block: of 128 numbers of a row or a column, or of 128 by 128.
#pragma once

#include "quantization/formats/format.h"

namespace tandem {

/// 1x128: dequant_scale is float32, of rows [blocks, up(rows, 4)], of columns [blocks, up(cols,
/// 4)], zero where there is no block.
extern const CodeLayout kLineScale;
/// 128x128: [blocks, up(blocks, 4)], for both directions.
extern const CodeLayout kSquareScale;

/// Per block: scale = format max / max(amax, epsilon), rounded down to a power of two where asked,
/// codes = cast(x * scale), saturating, dequant_scale = 1 / scale. Each direction is made from x.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenQuantize).
extern const ScalingDef kBlockScaling;

/// scale = format max / max(amax, eps) in ATen operations, with the rules for 0, infinity and
/// overflow, where `big` replaces an infinite scale. amax: float32, no NaN.
at::Tensor scale_from_amax(const at::Tensor& amax, const Quantizer& quantizer, double big);
/// 1 / scale in float32, rounded once.
at::Tensor inverse_of(const at::Tensor& scale);

}  // namespace tandem
