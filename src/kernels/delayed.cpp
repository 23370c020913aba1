#include "kernels/delayed.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

#include "kernels/cpu/float_mode.h"

namespace tandem::kernels {
namespace {

// Amaxes are compared as integers: those of numbers that are not negative order alike, and a
// calling thread that takes subnormals for zero does not change them.
constexpr int32_t kInfinity = 0x7F800000;

int32_t bits_of(float value) { return std::bit_cast<int32_t>(value); }
bool is_zero(float value) { return (bits_of(value) & 0x7FFFFFFF) == 0; }

/// format max * 2^-margin, rounded once. Volatile keeps the conversion behind the change of mode.
float largest_scaled(const DelayedScaling& scaling) {
  const cpu::ScopedFloatMode mode;
  volatile double exact = std::ldexp(double{fp8_max(scaling.format)}, -scaling.margin);
  volatile float rounded = static_cast<float>(exact);
  return rounded;
}

}  // namespace

void update_delayed(const DelayedState& state, const DelayedScaling& scaling,
                    const float* reduced_amax) {
  const float largest = largest_scaled(scaling);
  for (size_t slot = 0; slot < state.slots; ++slot) {
    const auto row = [&](size_t i) -> float& { return state.amax_history[i * state.slots + slot]; };
    const bool is_reduced = reduced_amax != nullptr && !is_zero(reduced_amax[slot]);
    const float last = is_reduced ? reduced_amax[slot] : row(0);
    if (is_zero(last)) continue;
    int32_t amax = 0;
    const auto count = [&](float value) {
      if (bits_of(value) <= kInfinity) amax = std::max(amax, bits_of(value));
    };
    count(last);
    if (scaling.algorithm == AmaxAlgorithm::max) {
      for (size_t i = 1; i < state.length; ++i) count(row(i));
    }
    for (size_t i = 1; i + 1 < state.length; ++i) row(i) = row(i + 1);
    if (state.length > 1) row(state.length - 1) = last;
    row(0) = 0.0f;
    if (amax == 0 || amax == kInfinity) continue;
    const float scale = cpu::divide(largest, std::bit_cast<float>(amax));
    state.quant_scale[slot] = bits_of(scale) == kInfinity ? FLT_MAX : scale;
  }
}

}  // namespace tandem::kernels
