// Fresh tensors, on the CPU large ones in blocks that Tandem keeps and hands out again
// (tandem/memory.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace tandem::kernel_ops {

/// A contiguous CPU tensor of undefined contents, aligned to 64 bytes. Its memory may be what an
/// earlier tensor of about that size left. Throws what at::empty throws where there is no memory.
at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype);

/// The same on the device of `neighbour`: on another than the CPU as torch allocates there.
at::Tensor empty_beside(const at::Tensor& neighbour, at::IntArrayRef sizes, at::ScalarType dtype);

/// Whether AddressSanitizer watches, under which everything takes several times as long.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
constexpr bool kSanitized = __has_feature(address_sanitizer);
#else
constexpr bool kSanitized = false;
#endif

/// Whether the host reads the tensor's bytes without waiting for anybody.
inline bool is_on_host(const at::Tensor& tensor) { return tensor.is_cpu(); }

}  // namespace tandem::kernel_ops
