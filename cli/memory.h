#pragma once

#include <cstdint>
#include <functional>

namespace tandem::cli {

/// Bytes that `forward` hands to autograd to keep until backward: each storage once, storages in
/// `leave_out` not at all.
int64_t saved_for_backward_bytes(const std::function<void()>& forward,
                                 const std::function<bool(const void*)>& leave_out);

/// The most memory this process holds at any time after `start`, beyond what it held then.
///
/// Reads VmHWM of /proc/self/status, which `start` resets through /proc/self/clear_refs where the
/// system permits; otherwise only a growth beyond all that came before is seen.
class PeakMemory {
 public:
  void start();
  int64_t bytes() const;

 private:
  int64_t before_ = 0;
};

}  // namespace tandem::cli
