// Fresh tensors on the CPU: large ones in blocks that Tandem keeps and hands out again (tandem/memory.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace tandem::kernel_ops {

/// A contiguous CPU tensor of undefined contents, aligned to 64 bytes. Its memory may be what an earlier tensor of about that size left.
/// Throws what at::empty throws where there is no memory.
at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace tandem::kernel_ops
