// One scale per tensor: the layout of its formats, scales from the tensor's own amax, and scales
// that are passed in.
#pragma once

#include "quantization/formats/format.h"

namespace tandem {

/// dequant_scale is one float32 for both directions.
extern const CodeLayout kTensorScale;

/// scale = format max / max(amax(x), epsilon), rounded down to a power of two if `power_of_two`;
/// codes = cast(x * scale), saturating.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenQuantize).
extern const ScalingDef kCurrentScaling;

/// codes = cast(x * scale), saturating, with the scale that is passed in; dequant_scale = 1 /
/// scale. It is pure: other steps record the returned amax and compute later scales from it.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenDelayedRun).
extern const ScalingDef kDelayedScaling;

}  // namespace tandem
