// One scale per tensor: the layout of its formats, scales from the tensor's own amax, and scales
// from the past.
#pragma once

#include "quantization/formats/format.h"

namespace tandem {

/// dequant_scale is one float32 for both directions.
extern const CodeLayout kTensorScale;

/// scale = format max / max(amax(x), epsilon), rounded down to a power of two where asked: codes =
/// cast(x * scale), saturating.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenQuantize).
extern const ScalingDef kCurrentScaling;

/// codes = cast(x * scale), saturating, dequant_scale = 1 / scale, with the scale that is passed
/// in; the amax is for the next one. Pure: who records the amax and makes scales of it is another
/// step.
///
/// Error: none, likewise (test GoldenDelayedRun).
extern const ScalingDef kDelayedScaling;

}  // namespace tandem
