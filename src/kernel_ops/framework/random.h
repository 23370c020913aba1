// Counter-based random words in ATen operations.
#pragma once

#include <ATen/core/Tensor.h>

namespace tandem::kernel_ops {

/// The words of Philox4x32-10 for linear indices 0 to count - 1, in int64, [count], as in
/// kernels/philox.h with the counter (index / 4, offset, stream) and the key seed. `seed`: one
/// int64, or two with the offset.
at::Tensor philox_words(const at::Tensor& seed, const c10::SymInt& count, int64_t stream = 0);

/// Throws c10::ValueError unless `seed` is one int64, or two.
void check_seed(const char* op, const at::Tensor& seed);

}  // namespace tandem::kernel_ops
