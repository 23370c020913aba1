// Whether memory holds what it held before.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::kernels::cpu {

/// 64 bits that depend on every byte and its place: another content has the same with a chance of
/// 2^-64, unless it was made for that. Two contents that differ in one aligned word of 8 bytes
/// never do. Equal on every target and thread count.
///
/// Bytes: reads `size`, once.
uint64_t digest(const void* data, size_t size);

}  // namespace tandem::kernels::cpu
