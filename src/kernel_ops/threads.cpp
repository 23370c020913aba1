// Kernels run on libtorch's threads.
#include <ATen/Parallel.h>

#include "kernels/parallel.h"

namespace tandem::kernel_ops {

namespace {
const bool installed = [] {
  kernels::set_parallel_for([](int64_t begin, int64_t end, int64_t grain, void* context,
                               void (*body)(void*, int64_t, int64_t)) {
    at::parallel_for(begin, end, grain,
                     [&](int64_t first, int64_t last) { body(context, first, last); });
  });
  return true;
}();
}  // namespace

}  // namespace tandem::kernel_ops
