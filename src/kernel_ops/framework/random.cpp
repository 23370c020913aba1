#include "kernel_ops/framework/random.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <array>

#include "kernel_ops/framework/checks.h"

namespace tandem::kernel_ops {

using at::Tensor;

/// Computes in int64, whose products wrap as unsigned ones do.
Tensor philox_words(const Tensor& seed, const c10::SymInt& count, int64_t stream) {
  constexpr int64_t kLow = 0xFFFFFFFF;
  const Tensor numbers = seed.reshape({-1}), key = numbers.select(0, 0);
  const Tensor counter = at::arange((count + 3) / 4, seed.options());
  const auto high = [](const Tensor& words) { return words.bitwise_right_shift(32) & kLow; };
  const Tensor zeros = at::zeros_like(counter);
  std::array<Tensor, 4> c{counter & kLow, high(counter), zeros, zeros + stream};
  if (numbers.sym_numel() != 1) c[2] = c[2] + (numbers.select(0, 1) & kLow);
  Tensor k0 = key & kLow, k1 = high(key);
  for (int round = 0; round < 10; ++round) {
    const Tensor p0 = c[0] * int64_t{0xD2511F53}, p1 = c[2] * int64_t{0xCD9E8D57};
    c = std::array<Tensor, 4>{high(p1).bitwise_xor(c[1]).bitwise_xor(k0), p1 & kLow,
                              high(p0).bitwise_xor(c[3]).bitwise_xor(k1), p0 & kLow};
    k0 = (k0 + int64_t{0x9E3779B9}) & kLow;
    k1 = (k1 + int64_t{0xBB67AE85}) & kLow;
  }
  return at::stack({c[0], c[1], c[2], c[3]}, 1).flatten().slice_symint(0, 0, count);
}

void check_seed(const char* op, const Tensor& seed) {
  TORCH_CHECK_VALUE(seed.scalar_type() == at::kLong && seed.dim() <= 1 &&
                        (seed.sym_numel() == 1 || seed.sym_numel() == 2),
                    op, ": expected a seed of one int64, or of two with an offset, got ",
                    dtype_name(seed.scalar_type()), " of shape ", seed.sym_sizes(),
                    ". Draw it with torch.randint.");
}

}  // namespace tandem::kernel_ops
