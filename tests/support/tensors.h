// Tensors for tests: made from a seed, in every layout, compared with a reason where they differ.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace tandem::testing {

using Tensors = std::vector<at::Tensor>;

/// Where tests put their tensors: the device that the environment variable TANDEM_TEST_DEVICE names
/// ("cuda:0"), else the CPU. What they expect is compared on the CPU.
at::Device device();

/// Normal numbers that depend on nothing but the arguments, on the device of tests.
at::Tensor random(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat, uint64_t seed = 1);
/// The same, a leaf that requires grad.
at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat, uint64_t seed = 1);

/// Sets the state of torch's generator.
void seed_torch(uint64_t seed);

/// A matrix-like layout that kernels meet.
struct Layout {
  const char* name;
  at::Tensor (*make)(at::ScalarType dtype, int64_t rows, int64_t cols, uint64_t seed);
};
std::ostream& operator<<(std::ostream& out, const Layout& layout);
/// Contiguous, rows with gaps, transposed, one row expanded, three dimensions that no single stride
/// walks, four of which one has a single element and the stride of the one before it (as the heads
/// of queries, keys and values have that are unbound from one tensor for one sequence).
const std::vector<Layout>& layouts();

/// The dtypes that CPU kernels compute on.
inline const std::vector<at::ScalarType> kKernelDtypes = {at::kFloat, at::kBFloat16, at::kHalf};

/// Same bits, or NaN in the same places; same sizes and dtypes.
::testing::AssertionResult same(const at::Tensor& got, const at::Tensor& expected);
/// Same sizes and dtypes; elements within one unit of the dtype, and the error of a sum relative to
/// the largest element or, where terms cancel, to their `magnitude`.
::testing::AssertionResult near(const at::Tensor& got, const at::Tensor& expected,
                                double magnitude = 0);
/// The same for lists; undefined tensors match undefined ones.
::testing::AssertionResult near(at::TensorList got, at::TensorList expected, double magnitude = 0);

using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Compares the gradients of a random combination of `function`'s outputs with central differences.
/// Inputs are float64; those that require grad are varied.
::testing::AssertionResult gradients_match(const Function& function,
                                           const std::vector<at::Tensor>& inputs);

}  // namespace tandem::testing
