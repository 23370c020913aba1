// Whether float32 numbers are bfloat16 ones, which processors multiply faster.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::kernels::cpu {

/// out = x in bfloat16, and true, if that is exact for every element: none has more than 8
/// significant bits, and none is denormal, as units that multiply bfloat16 take these for 0.
/// Otherwise false, and what is written is undefined. NaN stays NaN.
///
/// Bytes: reads 4 and writes 2 per element, until one does not fit.
bool to_bfloat16_if_exact(const float* x, size_t count, uint16_t* out);

}  // namespace tandem::kernels::cpu
