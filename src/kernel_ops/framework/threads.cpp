// Kernels run on libtorch's threads: the OpenMP runtime that libtorch has loaded. at::parallel_for
// is serial in a library that is not compiled with OpenMP, and compiling with it would bring a
// second runtime under clang++.
#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels/parallel.h"

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*body)(void*), void* data, unsigned threads,
                                         unsigned flags);
__attribute__((weak)) int omp_get_thread_num();
__attribute__((weak)) int omp_get_num_threads();
}

namespace tandem::kernel_ops {

namespace {

struct Job {
  int64_t begin, end;
  void* context;
  void (*body)(void*, int64_t, int64_t);
};

void run_share(void* data) {
  const Job& job = *static_cast<const Job*>(data);
  const int64_t threads = omp_get_num_threads(),
                share = (job.end - job.begin + threads - 1) / threads;
  const int64_t first = job.begin + omp_get_thread_num() * share,
                last = std::min(job.end, first + share);
  if (first < last) job.body(job.context, first, last);
}

void run_pieces(int64_t begin, int64_t end, int64_t grain, void* context,
                void (*body)(void*, int64_t, int64_t)) {
  const int64_t most = (end - begin) / std::max<int64_t>(grain, 1);
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), most);
  if (threads <= 1 || GOMP_parallel == nullptr || at::in_parallel_region()) {
    if (begin < end) body(context, begin, end);
    return;
  }
  Job job{begin, end, context, body};
  GOMP_parallel(run_share, &job, static_cast<unsigned>(threads), 0);
}

const bool installed = [] {
  kernels::set_parallel_for(run_pieces);
  return true;
}();

}  // namespace

}  // namespace tandem::kernel_ops
