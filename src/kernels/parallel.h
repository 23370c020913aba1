// Threads of kernels: one function, which the host of the kernels installs. Tandem installs
// libtorch's pool.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tandem::kernels {

/// Calls `body(context, begin, end)` for disjoint ranges that cover [begin, end), possibly on
/// several threads, and returns when all calls are done. Only the last range may be shorter than
/// `grain`. Kernels split sums at fixed places, never by range, so that no result depends on the
/// number of threads.
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, void* context,
                             void (*body)(void* context, int64_t begin, int64_t end));

/// Installs the thread pool; kernels run serially before. No kernel may run meanwhile.
void set_parallel_for(ParallelFor function);

/// Calls `body(context, begin, end)` for ranges of [begin, end) through the installed pool.
void run_parallel(int64_t begin, int64_t end, int64_t grain, void* context,
                  void (*body)(void* context, int64_t begin, int64_t end));

template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, Body&& body) {
  run_parallel(begin, end, grain, &body, [](void* context, int64_t first, int64_t last) {
    (*static_cast<std::remove_reference_t<Body>*>(context))(first, last);
  });
}

}  // namespace tandem::kernels
