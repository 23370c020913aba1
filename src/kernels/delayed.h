// Delayed scaling: quantization scales from the amaxes of past steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/fp8.h"

namespace tandem::kernels {

/// Which amax of the window makes the scale.
enum class AmaxAlgorithm : uint8_t { max, most_recent };

struct DelayedScaling {
  Fp8Format format = Fp8Format::e4m3;
  /// Scales are 2^margin times smaller than they could be.
  int margin = 0;
  AmaxAlgorithm algorithm = AmaxAlgorithm::max;
};

/// The state of `slots` tensors that are quantized with delayed scaling, all of one format.
struct DelayedState {
  /// [length, slots], contiguous. Row 0: the amax of what was quantized since the last update; rows
  /// length-1, ..., 1: those of the updates before, the newest first.
  float* amax_history = nullptr;
  /// [slots].
  float* quant_scale = nullptr;
  size_t length = 0, slots = 0;
};

/// Ends a step: per slot, quant_scale = (format max * 2^-margin) / amax of the window, and the
/// history moves on by one.
///
/// The window is row 0 and rows 1 to length-1 before they move; NaN is skipped. A slot whose row 0
/// is 0 was not used and changes nothing; an amax that is infinite, NaN or 0 leaves the scale as it
/// is; an infinite scale becomes the largest float32.
///
/// Shapes: amax_history [length >= 1, slots], quant_scale [slots]; reduced_amax [slots] or null:
///         row 0 after a maximum over ranks, which counts where it is not 0.
/// Error:  none: one rounding of the product, one of the quotient (tests GoldenDelayed, Delayed).
/// Source: the fused kernel of TransformerEngine, which is its default.
void update_delayed(const DelayedState& state, const DelayedScaling& scaling,
                    const float* reduced_amax = nullptr);

}  // namespace tandem::kernels
