// Delayed scaling: scales of quantization from the amaxes of past steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/fp8.h"

namespace tandem::kernels {

/// The amax of the window from which the scale is computed.
enum class AmaxAlgorithm : uint8_t { max, most_recent };

struct DelayedScaling {
  Fp8Format format = Fp8Format::e4m3;
  /// An exponent: scales are 2^margin times smaller than the largest possible ones.
  int margin = 0;
  AmaxAlgorithm algorithm = AmaxAlgorithm::max;
};

/// The state of `slots` tensors with delayed scaling, all of one format.
struct DelayedState {
  /// [length, slots], contiguous. Row 0 has the amaxes since the last update; rows length-1, ..., 1
  /// have the amaxes of earlier updates, the newest first.
  float* amax_history = nullptr;
  /// [slots].
  float* quant_scale = nullptr;
  size_t length = 0, slots = 0;
};

/// Ends a step: quant_scale = (format max * 2^-margin) / amax of the window, for each slot, and the
/// history advances by one row.
///
/// The window is row 0, and rows 1 to length-1 before the history advances; NaN is skipped. A slot
/// with a 0 in row 0 was not used, and changes nothing. An amax that is infinite, NaN or 0 leaves
/// the scale unchanged. An infinite scale becomes the largest float32.
///
/// Shapes:  amax_history [length >= 1, slots], quant_scale [slots]; reduced_amax [slots] or null:
///          row 0 after a maximum over ranks, which counts where it is not 0.
/// Error:   none: one rounding of the product, one of the quotient (tests GoldenDelayed, Delayed).
/// Source:  the fused kernel of TransformerEngine, which is its default.
void update_delayed(const DelayedState& state, const DelayedScaling& scaling,
                    const float* reduced_amax = nullptr);

}  // namespace tandem::kernels
