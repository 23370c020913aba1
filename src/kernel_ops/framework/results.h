// The results of a kernel op: their sizes and dtypes, and the tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>

namespace tandem::kernel_ops {

using at::Tensor;

/// Sizes and dtype of one result. A result that is not wanted is not computed: an implementation
/// gets it undefined, and the dispatcher returns an empty tensor.
struct ResultSpec {
  c10::SymDimVector sizes;
  at::ScalarType dtype = at::kFloat;
  bool wanted = true;
};

template <size_t N>
using Specs = std::array<ResultSpec, N>;
template <size_t N>
using Results = std::array<Tensor, N>;

/// A set of dtypes.
struct Dtypes {
  template <typename... Dtype>
  constexpr explicit Dtypes(Dtype... dtypes)
      : bits((uint64_t{0} | ... | (uint64_t{1} << static_cast<int>(dtypes)))) {}
  constexpr bool has(at::ScalarType dtype) const {
    return (bits >> static_cast<int>(dtype) & 1) != 0;
  }
  static_assert(static_cast<int>(at::ScalarType::NumOptions) <= 64, "a bit per dtype");
  uint64_t bits;
};

/// Dtypes that kernels compute on, and dtypes of their other operands.
inline constexpr Dtypes kArithmetic(at::kFloat, at::kBFloat16, at::kHalf), kStatistic(at::kFloat),
    kCodes(at::kByte), kScale(at::kFloat, at::kByte), kSeed(at::kLong),
    kGiven(at::kFloat, at::kLong), kNumbers(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble);

}  // namespace tandem::kernel_ops
