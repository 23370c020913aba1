// NVFP4: E2M1 codes, two per byte, with an E4M3 scale per block of 16 numbers along a row or a
// column, and an amax per tensor behind these.
#pragma once

#include "quantization/formats/format.h"

namespace tandem {

/// Codes of rows [..., up(cols, 16) / 2], of columns [up(rows, 16) / 2, cols], two neighbours per
/// byte, the first in the low half. dequant_scale is E4M3 in uint8: of rows [up(rows, 128),
/// up(blocks, 4)], of columns [up(blocks, 4), up(cols, 128)], zero where there is no block. The
/// scale of a block whose amax is the tensor's is 448, or 256.
extern const CodeLayout kFp4Scale, kFp4Scale256;

/// codes = cast(x / (dequant_scale * amax / (6 * largest))), with dequant_scale = E4M3(amax of the
/// block * largest / amax) and the largest scale that the layout says, each operation as
/// kernels/nvfp4.h says; with four over six, that or 1.5 times as much. With square blocks, of 16
/// by 16, both directions have the same codes; with the Hadamard transform those of columns are of
/// rotated columns, and their amax too.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenQuantize).
extern const ScalingDef kFp4Scaling;

}  // namespace tandem
