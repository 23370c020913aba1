// Which tensors share elements, by the addresses of these.
#pragma once

#include <ATen/core/Tensor.h>

namespace tandem {

/// Whether an element of one tensor lies in the memory of one of the other. Strided tensors with
/// memory only. Parts of one tensor that lie between each other, as its columns do, do not overlap.
bool overlap(const at::Tensor& a, const at::Tensor& b);

/// Whether two tensors are the same elements at the same places.
bool same_elements(const at::Tensor& a, const at::Tensor& b);

}  // namespace tandem
