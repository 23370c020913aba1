// Working memory of kernels, which each thread keeps for the next call.
#pragma once

#include <cstddef>
#include <new>

#include "hwy/aligned_allocator.h"

namespace tandem::kernels::cpu {

/// One buffer per purpose: a caller's buffer is not overwritten by its own thread's share of the
/// work.
enum class ScratchUse : size_t { parameters, partial_sums, rows, made, made_beside, count };

/// At least `floats` floats, aligned for any vector, with undefined contents; valid until the
/// thread's next call with the same `use`.
inline float* scratch(ScratchUse use, size_t floats) {
  struct Buffer {
    hwy::AlignedFreeUniquePtr<float[]> data;
    size_t size = 0;
  };
  thread_local Buffer buffers[static_cast<size_t>(ScratchUse::count)];
  Buffer& buffer = buffers[static_cast<size_t>(use)];
  if (buffer.size < floats) {
    buffer.data = hwy::AllocateAligned<float>(floats);
    if (!buffer.data) throw std::bad_alloc();
    buffer.size = floats;
  }
  return buffer.data.get();
}

}  // namespace tandem::kernels::cpu
