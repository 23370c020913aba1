// MXFP8: one E8M0 scale per block of 32 numbers along a row or a column, as in OCP MX v1.0.
#pragma once

#include "quantization/formats/format.h"

namespace tandem {

/// dequant_scale is E8M0 in uint8 and zero beyond the blocks: for rows [up(rows, 128), up(blocks,
/// 4)], for columns [up(blocks, 4), up(cols, 128)].
extern const CodeLayout kMxScale;

/// Per block: dequant_scale = the least power of two not below amax / format max; codes = cast(x /
/// dequant_scale), saturating. The codes of each direction are computed from x; with square blocks,
/// of 32 by 32, both directions have equal codes.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenQuantize).
extern const ScalingDef kMxScaling;

}  // namespace tandem
