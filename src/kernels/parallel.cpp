#include "kernels/parallel.h"

namespace tandem::kernels {
namespace {

ParallelFor installed = nullptr;

}  // namespace

void set_parallel_for(ParallelFor function) { installed = function; }

void run_parallel(int64_t begin, int64_t end, int64_t grain, void* context,
                  void (*body)(void* context, int64_t begin, int64_t end)) {
  if (begin >= end) return;
  if (installed != nullptr && end - begin > grain) {
    installed(begin, end, grain, context, body);
  } else {
    body(context, begin, end);
  }
}

}  // namespace tandem::kernels
