// Memory in tests: bytes of tensors that were made on this thread and are still alive, and the
// cache of what was freed.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

#include "tandem/memory.h"

namespace tandem::testing {

/// While one lives, `bytes()` is what this thread's CPU allocations since then still hold.
class LiveBytes {
 public:
  LiveBytes()
      : counter_(std::make_shared<Counter>()),
        guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}
  int64_t bytes() const { return counter_->bytes; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t change, size_t, size_t, c10::Device) override {
      bytes += change;
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t bytes = 0;
  };
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

/// The cache of freed memory, empty and on: it is off under the address sanitizer, to which a
/// cached block is alive.
class CachedMemory {
 public:
  CachedMemory() : before_(set_cache_limit(int64_t{1} << 30)) { empty_cache(); }
  CachedMemory(const CachedMemory&) = delete;
  CachedMemory& operator=(const CachedMemory&) = delete;
  ~CachedMemory() {
    set_cache_limit(before_);
    empty_cache();
  }

 private:
  int64_t before_;
};

}  // namespace tandem::testing
