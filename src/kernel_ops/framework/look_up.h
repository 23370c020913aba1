// Codes by a table of their numbers, in ATen operations.
#pragma once

#include <ATen/ops/from_blob.h>
#include <ATen/ops/index.h>

#include <array>

namespace tandem::kernel_ops {

/// table[code] of each code. The table is no at::tensor, which fills what a transform of torch.func
/// has wrapped by then.
inline at::Tensor look_up(const std::array<float, 256>& table, const at::Tensor& codes) {
  const at::Tensor numbers =
      at::from_blob(const_cast<float*>(table.data()), {int64_t{256}}, at::kFloat)
          .to(codes.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  return numbers.index({codes.to(at::kLong)});
}

}  // namespace tandem::kernel_ops
