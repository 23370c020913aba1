// Allocation of tensors. On the CPU, large ones take blocks that Tandem caches (tandem/memory.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace tandem::kernel_ops {

/// A contiguous CPU tensor with undefined contents, aligned to 64 bytes. Its memory may be a cached
/// block of about that size. Throws what at::empty throws if there is no memory.
at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype);

/// An uninitialized tensor on the device of `neighbour`: by empty_cpu on the CPU, else by torch.
at::Tensor empty_beside(const at::Tensor& neighbour, at::IntArrayRef sizes, at::ScalarType dtype);

/// Whether the code is compiled with AddressSanitizer, which makes it several times as slow.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
constexpr bool kSanitized = __has_feature(address_sanitizer);
#else
constexpr bool kSanitized = false;
#endif

/// Whether the host can read the tensor's bytes without waiting for a device.
inline bool is_on_host(const at::Tensor& tensor) { return tensor.is_cpu(); }

}  // namespace tandem::kernel_ops
