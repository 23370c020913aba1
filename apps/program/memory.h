#pragma once

#include <cstdint>
#include <functional>

namespace tandem::apps {

/// The bytes that `forward` makes autograd keep for backward. Each storage counts once; storages
/// for which `leave_out` holds do not count.
int64_t saved_for_backward_bytes(const std::function<void()>& forward,
                                 const std::function<bool(const void*)>& leave_out);

/// The largest memory of this process after `start`, minus its memory at `start`.
///
/// Reads VmHWM from /proc/self/status, which `start` resets through /proc/self/clear_refs if the
/// system permits. Otherwise only growth beyond the earlier maximum is seen.
class PeakMemory {
 public:
  void start();
  int64_t bytes() const;

 private:
  int64_t before_ = 0;
};

}  // namespace tandem::apps
