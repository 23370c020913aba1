// FP8 with one scale per tensor: scales, current and delayed scaling.
#pragma once

#include "kernels/fp8.h"
#include "kernels/views.h"

namespace tandem::kernels {

/// scale = format max / amax with the rules for 0, infinity, NaN and overflow (`big` replaces an
/// infinite scale).
float scale_from_amax(float amax, Fp8Format format, float eps, bool power_of_two, float big);

/// How a per-tensor current scale is made from the tensor's own amax.
struct CurrentScaling {
  Fp8Format format = Fp8Format::e4m3;
  /// Lower bound of amax.
  float eps = 0.0f;
  /// Round the scale down to a power of two.
  bool power_of_two = false;
};

/// A quantized matrix to be written: source ~= decode(codes) * dequant_scale.
struct Fp8Output {
  /// [rows, cols], contiguous.
  uint8_t* codes = nullptr;
  /// One element.
  float* dequant_scale = nullptr;
  /// One element.
  float* amax = nullptr;
};

namespace cpu {

/// max |x|, NaN skipped, infinities not; 0 for an empty x.
float amax(ConstRows x);

/// amax over x, the scale from it, codes = fp8_from_float(x * scale). Bitwise equal on every target
/// and thread count.
///
/// Bytes: reads x twice (the second time from cache where it fits), writes one byte per element.
void quantize_current(ConstRows x, const CurrentScaling& scaling, Fp8Output out);

/// codes = fp8_from_float(x * quant_scale) with a scale of the past, dequant_scale = 1 /
/// quant_scale, and the amax of x for the scale of the future (see delayed.h). Bitwise equal on
/// every target and thread count.
///
/// Bytes: reads x once, writes one byte per element.
void quantize_delayed(ConstRows x, Fp8Format format, float quant_scale, Fp8Output out);

/// y = decode(codes) * dequant_scale in float32, rounded once to y's element.
void dequantize(const uint8_t* codes, Fp8Format format, float dequant_scale, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
