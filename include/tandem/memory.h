// The cache of memory for large CPU tensors. The first touch of a fresh page is a fault, and the C
// library maps and unmaps megabytes in every training step; Tandem therefore keeps freed blocks and
// uses them for later tensors. benchmarks/memory.py measures the effect.
#pragma once

#include <cstdint>

#include "tandem/export.h"

namespace tandem {

/// Returns the bytes of freed blocks that are kept for later tensors of this process. Blocks that
/// many allocations did not use are freed, and kept and used blocks together are at most twice the
/// recent peak of used ones.
///
/// Units:   bytes.
TANDEM_API int64_t cached_bytes();

/// Returns all kept blocks to the system.
TANDEM_API void empty_cache();

/// Limits the kept blocks to `bytes` from now on, and returns the limit before. At first the limit
/// is an eighth of the machine's memory.
///
/// Units:   bytes; 0 keeps nothing.
/// Throws:  c10::ValueError where `bytes` is negative.
TANDEM_API int64_t set_cache_limit(int64_t bytes);

}  // namespace tandem
