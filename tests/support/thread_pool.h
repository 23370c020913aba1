// A pool for kernels::set_parallel_for: a fixed number of ranges, each on its own thread.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "kernels/parallel.h"

namespace tandem::testing {

/// Splits every loop into `size` equal ranges (fewer where the grain forbids it), one per thread,
/// but loops within such a range: a thread runs those whole. Restores serial execution at its end.
/// Threads wait by spinning and are bound to processors in turn, so a benchmark sees neither
/// wake-ups nor two threads on one core.
class ScopedThreadPool {
 public:
  explicit ScopedThreadPool(int size) : size_(size) {
    current() = this;
    for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
    bind(0);
    kernels::set_parallel_for(&ScopedThreadPool::parallel_for);
  }
  ~ScopedThreadPool() {
    kernels::set_parallel_for(nullptr);
    stop_ = true;
    ++generation_;
    for (std::thread& thread : threads_) thread.join();
    if (bound_) pthread_setaffinity_np(pthread_self(), sizeof(before_), &before_);
    current() = nullptr;
  }
  ScopedThreadPool(const ScopedThreadPool&) = delete;
  ScopedThreadPool& operator=(const ScopedThreadPool&) = delete;

 private:
  struct Work {
    int64_t begin, end, step;
    void* context;
    void (*body)(void*, int64_t, int64_t);
  };

  static ScopedThreadPool*& current() {
    static ScopedThreadPool* pool = nullptr;
    return pool;
  }

  static bool& is_within_range() {
    thread_local bool is_within = false;
    return is_within;
  }

  static void parallel_for(int64_t begin, int64_t end, int64_t grain, void* context,
                           void (*body)(void*, int64_t, int64_t)) {
    if (is_within_range()) return body(context, begin, end);
    current()->run({begin, end, 0, context, body}, grain);
  }

  void run(Work work, int64_t grain) {
    work.step = std::max(grain, (work.end - work.begin + size_ - 1) / size_);
    work_ = work;
    pending_ = size_ - 1;
    ++generation_;
    run_part(0);
    while (pending_ > 0) pause();
  }

  void run_part(int i) {
    const int64_t begin = work_.begin + i * work_.step,
                  end = std::min(work_.end, begin + work_.step);
    is_within_range() = true;
    if (begin < end) work_.body(work_.context, begin, end);
    is_within_range() = false;
  }

  void serve(int i) {
    bind(i);
    for (uint64_t seen = 0;;) {
      for (int spins = 0; generation_ == seen; ++spins)
        spins < 100000 ? pause() : std::this_thread::yield();
      seen = generation_;
      if (stop_) return;
      run_part(i);
      --pending_;
    }
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void bind(int i) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (pthread_getaffinity_np(pthread_self(), sizeof(allowed), &allowed) != 0) return;
    if (i == 0) before_ = allowed;
    const int count = CPU_COUNT(&allowed);
    if (count < size_) return;
    int skip = i;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed) || skip-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      if (pthread_setaffinity_np(pthread_self(), sizeof(one), &one) == 0 && i == 0) bound_ = true;
      return;
    }
  }

  int size_;
  bool bound_ = false;
  cpu_set_t before_;
  Work work_{};
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace tandem::testing
