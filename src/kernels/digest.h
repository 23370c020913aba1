// A digest of memory, which shows whether its contents changed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::kernels::cpu {

/// Returns 64 bits that depend on every byte and its position. Different contents have one digest
/// with probability 2^-64, unless they are constructed to; contents that differ in one aligned word
/// of 8 bytes never do. Every target and thread count gives the same bits.
///
/// Bytes:   reads `size`, once.
uint64_t digest(const void* data, size_t size);

}  // namespace tandem::kernels::cpu
