// Exact conversion of float32 numbers to bfloat16, which processors multiply faster.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::kernels::cpu {

/// Writes out = x in bfloat16 and returns true, if this is exact for every element: no element has
/// more than 8 significant bits, and none is denormal, because units that multiply bfloat16 read
/// denormal numbers as 0. Otherwise returns false, and `out` is undefined. NaN stays NaN.
///
/// Bytes:   reads 4 and writes 2 per element, until one element is not exact.
bool to_bfloat16_if_exact(const float* x, size_t count, uint16_t* out);

}  // namespace tandem::kernels::cpu
