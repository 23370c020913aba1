// Which tensors share elements, by the addresses of the elements.
#pragma once

#include <ATen/core/Tensor.h>

namespace tandem {

/// Whether an element of one tensor occupies memory of an element of the other. For strided tensors
/// with memory only. Interleaved parts of one tensor, such as its columns, do not overlap.
bool overlap(const at::Tensor& a, const at::Tensor& b);

/// Whether two tensors have the same elements at equal positions.
bool same_elements(const at::Tensor& a, const at::Tensor& b);

}  // namespace tandem
