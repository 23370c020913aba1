// One scale per tensor: the layout of its formats, and scales from the tensor's own amax.
#pragma once

#include "kernel_ops/format.h"

namespace tandem {

/// dequant_scale is one float32 for both directions.
extern const ScaleLayout kTensorScale;

/// scale = format max / max(amax(x), epsilon), rounded down to a power of two where asked: codes = cast(x * scale), saturating.
///
/// Error: none: bitwise what the numerics page specifies (test GoldenCurrent).
extern const ScalingDef kCurrentScaling;

}  // namespace tandem
