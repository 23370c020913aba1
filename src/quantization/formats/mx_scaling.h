// MXFP8: one E8M0 scale per block of 32 numbers along a row or a column, as OCP MX v1.0 has it.
#pragma once

#include "quantization/formats/format.h"

namespace tandem {

/// dequant_scale is E8M0 in uint8: of rows [up(rows, 128), up(blocks, 4)], of columns [up(blocks,
/// 4), up(cols, 128)], zero where there is no block.
extern const CodeLayout kMxScale;

/// Per block: dequant_scale = the power of two at or above amax / format max, codes = cast(x /
/// dequant_scale), saturating. Each direction is made from x; with square blocks, of 32 by 32, both
/// have the same codes.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenQuantize).
extern const ScalingDef kMxScaling;

}  // namespace tandem
