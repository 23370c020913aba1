// FP8 with one scale per tensor: scales, current and delayed scaling.
#pragma once

#include "kernels/quantize_made.h"
#include "kernels/quantize_options.h"

namespace tandem::kernels {

/// scale = format max / amax; 1 for an amax of 0, infinity or NaN. `big` replaces an infinite
/// scale.
float scale_from_amax(float amax, const Fp8Scaling& scaling, float big);

/// The output of a quantization: source ~= decode(codes) * dequant_scale. A null scale or amax is
/// not written.
struct Fp8Output {
  /// [rows, cols], contiguous.
  uint8_t* codes = nullptr;
  /// One element.
  float* dequant_scale = nullptr;
  /// One element.
  float* amax = nullptr;
};

namespace cpu {

/// max |x|, NaN skipped, infinities not, and whether x has NaN; 0 and false for an empty x. Rows
/// that are made are written to y.
Seen seen_in(const Input& x);

/// Computes the amax of x, the scale from it, and codes = fp8_from_float(x * scale). Every target
/// and thread count gives the same bits.
///
/// Bytes:   reads x twice (the second time from cache where it fits), writes one byte per element.
/// Limits:  x is no band, as the scale depends on the whole matrix.
void quantize_current(const Input& x, const Fp8Scaling& scaling, Fp8Output out);
/// quantize_current of a matrix whose amax is known, with the same bits.
void quantize_current_seen(ConstRows x, const Seen& seen, const Fp8Scaling& scaling, Fp8Output out);

/// codes = fp8_from_float(x * quant_scale) with a scale from past steps, dequant_scale = 1 /
/// quant_scale, and the amax of x for the scales of later steps (delayed.h). Every target and
/// thread count gives the same bits.
///
/// Bytes:   reads x once, writes one byte per element.
void quantize_delayed(const Input& x, Fp8Format format, float quant_scale, Fp8Output out);

/// y = decode(codes) * dequant_scale in float32, rounded once to y's element.
void dequantize(const uint8_t* codes, Fp8Format format, float dequant_scale, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
