// Memory for large CPU tensors. The first touch of a fresh page is a fault, and the C library maps
// and unmaps the megabytes of a training step anew in every step; Tandem therefore keeps freed
// blocks and hands them out again (benchmarks/memory.py counts).
#pragma once

#include <cstdint>

#include "tandem/export.h"

namespace tandem {

/// Bytes of freed blocks that are kept for the next tensors of this process. Blocks that many
/// allocations passed by are given back, and what is kept and used together is at most twice what
/// was in use at once a short while ago.
TANDEM_API int64_t cached_bytes();

/// Gives all cached bytes back to the system.
TANDEM_API void empty_cache();

/// Keeps at most `bytes` cached from now on, 0: none. At first an eighth of the machine's memory.
/// Returns the limit before. Throws ValueError where `bytes` is negative.
TANDEM_API int64_t set_cache_limit(int64_t bytes);

}  // namespace tandem
