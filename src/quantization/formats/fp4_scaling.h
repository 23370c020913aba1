// NVFP4: E2M1 codes, two per byte, with an E4M3 scale per block of 16 numbers along a row or a
// column, and an amax per tensor as the second level of scale.
#pragma once

#include "quantization/formats/format.h"

namespace tandem {

/// Row codes are [..., up(cols, 16) / 2], column codes [up(rows, 16) / 2, cols]: two neighbours per
/// byte, the first in the low half. dequant_scale is E4M3 in uint8 and zero beyond the blocks: for
/// rows [up(rows, 128), up(blocks, 4)], for columns [up(blocks, 4), up(cols, 128)]. A block with
/// the amax of the tensor has the scale 448 (kFp4Scale) or 256 (kFp4Scale256).
extern const CodeLayout kFp4Scale, kFp4Scale256;

/// codes = cast(x / (dequant_scale * amax / (6 * largest))) with dequant_scale = E4M3(amax of the
/// block * largest / amax), where `largest` is the layout's largest scale and each operation is as
/// in kernels/nvfp4.h. With four over six, dequant_scale is this or 1.5 times as much. With square
/// blocks, of 16 by 16, both directions have equal codes. With the Hadamard transform, column codes
/// and their amax are those of the rotated columns.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenQuantize).
extern const ScalingDef kFp4Scaling;

}  // namespace tandem
