#pragma once

#include <cstdint>
#include <functional>

namespace tandem::cli {

/// The bytes that `forward` makes autograd keep for backward. Each storage counts once; storages
/// for which `leave_out` holds do not count.
int64_t saved_for_backward_bytes(const std::function<void()>& forward,
                                 const std::function<bool(const void*)>& leave_out);

}  // namespace tandem::cli
