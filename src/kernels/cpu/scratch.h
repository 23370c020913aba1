// Working memory of kernels, kept by each thread for the next call.
#pragma once

#include <cstddef>
#include <new>

#include "hwy/aligned_allocator.h"

namespace tandem::kernels::cpu {

/// One buffer per purpose, so that what a caller holds is not overwritten by the part of the work
/// that its own thread does.
enum class ScratchUse : size_t { parameters, partial_sums, rows, made, made_beside, count };

/// At least `floats` floats, aligned for any vector, of undefined value; valid until the same
/// thread asks for the same use again.
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
