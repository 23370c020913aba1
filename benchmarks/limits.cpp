// What no kernel can beat: plain vector loops that move the ideal bytes, and the vector exponential
// on data in cache. A shared library that limits.py loads; it runs on libtorch's threads, as the
// kernels do.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/limits.cpp"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Bytes of each stream that a thread works on at a time: the streams of one block stay in the
/// first-level cache together.
constexpr size_t kBlock = 4096;

/// outputs[o] = the exclusive or of all inputs, for bytes [begin, end) of each: every byte is read
/// once and written once.
template <size_t kInputs, size_t kOutputs>
void move_range(const uint8_t* const* inputs, uint8_t* const* outputs, size_t begin, size_t end,
                bool around_cache) {
  const hn::ScalableTag<uint8_t> d;
  const size_t lanes = hn::Lanes(d);
  const auto sum_at = [&](size_t i) HWY_ATTR {
    auto sum = hn::Load(d, inputs[0] + i);
    for (size_t k = 1; k < kInputs; ++k) sum = hn::Xor(sum, hn::Load(d, inputs[k] + i));
    return sum;
  };
  for (size_t block = begin; block < end; block += kBlock) {
    const size_t last = std::min(block + kBlock, end);
    if (around_cache) {
      for (size_t i = block; i < last; i += lanes)
        for (size_t o = 0; o < kOutputs; ++o) hn::Stream(sum_at(i), d, outputs[o] + i);
    } else {
      for (size_t i = block; i < last; i += lanes)
        for (size_t o = 0; o < kOutputs; ++o) hn::Store(sum_at(i), d, outputs[o] + i);
    }
  }
  if (around_cache) hwy::FlushStream();
}

void move_streams(const uint8_t* const* inputs, size_t input_count, uint8_t* const* outputs,
                  size_t output_count, size_t begin, size_t end, bool around_cache) {
  const auto run = input_count == 1    ? output_count == 1 ? &move_range<1, 1> : &move_range<1, 2>
                      : input_count == 2 ? output_count == 1 ? &move_range<2, 1> : &move_range<2, 2>
                      : output_count == 1 ? &move_range<3, 1>
                                       : &move_range<3, 2>;
  run(inputs, outputs, begin, end, around_cache);
}

/// y = exp(-x) as the activations of 32-bit (else of 16-bit) elements compute it; `count` is a
/// multiple of 256.
void exponentials(const float* x, float* y, size_t count, bool is_short) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < count; i += 2 * lanes) {
    Pack<2> pack;
    for (size_t k = 0; k < 2; ++k) pack.v[k] = hn::LoadU(d, x + i + k * lanes);
    pack = is_short ? exp_negated_short(pack) : exp_negated(pack);
    for (size_t k = 0; k < 2; ++k) hn::StoreU(pack.v[k], d, y + i + k * lanes);
  }
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*body)(void*), void* data, unsigned threads,
                                         unsigned flags);
__attribute__((weak)) int omp_get_thread_num();
}

namespace tandem::kernels::cpu {

HWY_EXPORT(move_streams);
HWY_EXPORT(exponentials);

namespace {

struct Job {
  const uint8_t* const* inputs;
  size_t input_count;
  uint8_t* const* outputs;
  size_t output_count, share, bytes;
  bool around_cache;
};

void run_share(void* data) {
  const Job& job = *static_cast<const Job*>(data);
  const size_t begin = static_cast<size_t>(omp_get_thread_num()) * job.share;
  const size_t end = std::min(begin + job.share, job.bytes);
  if (begin < end) HWY_DYNAMIC_DISPATCH(move_streams)
  (job.inputs, job.input_count, job.outputs, job.output_count, begin, end, job.around_cache);
}

}  // namespace

}  // namespace tandem::kernels::cpu

#define TANDEM_LIMITS_API extern "C" __attribute__((visibility("default")))

/// Moves `bytes` of each stream, 1 to 3 inputs and 1 or 2 outputs, aligned to 64 bytes, on
/// `threads` threads. Returns 0 where there are no threads to run on.
TANDEM_LIMITS_API int tandem_limits_move(const uint8_t* const* inputs, size_t input_count,
                                         uint8_t* const* outputs, size_t output_count, size_t bytes,
                                         int around_cache, unsigned threads) {
  if (GOMP_parallel == nullptr) return 0;
  const size_t share = (bytes / threads + 4095) / 4096 * 4096;
  tandem::kernels::cpu::Job job{inputs, input_count, outputs,          output_count,
                                share,  bytes,       around_cache != 0};
  GOMP_parallel(tandem::kernels::cpu::run_share, &job, threads, 0);
  return 1;
}

/// Runs the exponential of `count` elements `repeats` times on this thread.
TANDEM_LIMITS_API void tandem_limits_exp(const float* x, float* y, size_t count, int is_short,
                                         size_t repeats) {
  for (size_t r = 0; r < repeats; ++r)
    HWY_DYNAMIC_DISPATCH(tandem::kernels::cpu::exponentials)(x, y, count, is_short != 0);
}

#endif  // HWY_ONCE
