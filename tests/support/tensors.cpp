#include "support/tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <cstdlib>

#include "autograd/run.h"
#include "support/tolerances.h"

namespace tandem::testing {

at::Device device() {
  static const at::Device device = [] {
    const char* const name = std::getenv("TANDEM_TEST_DEVICE");
    return at::Device(name == nullptr ? "cpu" : name);
  }();
  return device;
}

at::Tensor random(at::IntArrayRef sizes, at::ScalarType dtype, uint64_t seed) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator, at::TensorOptions().dtype(at::kDouble)).to(device(), dtype);
}

at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype, uint64_t seed) {
  return random(sizes, dtype, seed).set_requires_grad(true);
}

void seed_torch(uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(seed);
}

std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << layout.name; }

const std::vector<Layout>& layouts() {
  using at::ScalarType;
  static const std::vector<Layout> kLayouts = {
      {"contiguous",
       [](ScalarType dtype, int64_t rows, int64_t cols, uint64_t seed) {
         return random({rows, cols}, dtype, seed);
       }},
      {"gaps",
       [](ScalarType dtype, int64_t rows, int64_t cols, uint64_t seed) {
         return random({rows, cols + 3}, dtype, seed).narrow(1, 2, cols);
       }},
      {"transposed",
       [](ScalarType dtype, int64_t rows, int64_t cols, uint64_t seed) {
         return random({cols, rows}, dtype, seed).t();
       }},
      {"expanded",
       [](ScalarType dtype, int64_t rows, int64_t cols, uint64_t seed) {
         return random({1, cols}, dtype, seed).expand({rows, cols});
       }},
      {"permuted",
       [](ScalarType dtype, int64_t rows, int64_t cols, uint64_t seed) {
         return random({2, rows, cols}, dtype, seed).transpose(0, 1);
       }},
      {"one_inside",
       [](ScalarType dtype, int64_t rows, int64_t cols, uint64_t seed) {
         return random({rows, 3, 2, cols}, dtype, seed)
             .as_strided({rows, 1, 2, cols}, {6 * cols, 6 * cols, cols, 1});
       }},
  };
  return kLayouts;
}

namespace {

::testing::AssertionResult same_kind(const at::Tensor& got, const at::Tensor& expected) {
  if (got.defined() != expected.defined())
    return ::testing::AssertionFailure() << "expected " << (expected.defined() ? "a" : "no")
                                         << " tensor, got " << (got.defined() ? "one" : "none");
  if (!got.defined()) return ::testing::AssertionSuccess();
  if (got.sizes() != expected.sizes() || got.scalar_type() != expected.scalar_type())
    return ::testing::AssertionFailure()
           << "expected " << expected.scalar_type() << " " << expected.sizes() << ", got "
           << got.scalar_type() << " " << got.sizes();
  return ::testing::AssertionSuccess();
}

/// Fails at the element whose difference exceeds what is allowed the most.
::testing::AssertionResult within(const at::Tensor& got, const at::Tensor& expected,
                                  double relative, double of_largest, double magnitude) {
  if (auto kind = same_kind(got, expected); !kind || !got.defined() || got.numel() == 0)
    return kind;
  const at::Tensor have = got.detach().to(at::kCPU, at::kDouble).flatten(),
                   want = expected.detach().to(at::kCPU, at::kDouble).flatten();
  const at::Tensor is_equal =
      (have == want).bitwise_or(at::isnan(have).bitwise_and(at::isnan(want)));
  const at::Tensor allowed =
      relative * at::abs(want) + of_largest * at::abs(want).max().clamp_min(magnitude);
  const at::Tensor excess =
      at::where(is_equal, at::zeros_like(want), at::abs(have - want) - allowed).nan_to_num(1e300);
  if (excess.max().item<double>() <= 0) return ::testing::AssertionSuccess();
  const int64_t worst = excess.argmax().item<int64_t>();
  return ::testing::AssertionFailure()
         << "element " << worst << ": expected " << want[worst].item<double>() << ", got "
         << have[worst].item<double>() << " where a difference of " << allowed[worst].item<double>()
         << " is allowed";
}

}  // namespace

::testing::AssertionResult same(const at::Tensor& got, const at::Tensor& expected) {
  return within(got, expected, 0, 0, 0);
}

::testing::AssertionResult near(const at::Tensor& got, const at::Tensor& expected,
                                double magnitude) {
  if (!expected.defined()) return same_kind(got, expected);
  return within(got, expected, unit_of(expected.scalar_type()),
                sum_error_of(expected.scalar_type()), magnitude);
}

::testing::AssertionResult near(at::TensorList got, at::TensorList expected, double magnitude) {
  if (got.size() != expected.size())
    return ::testing::AssertionFailure()
           << "expected " << expected.size() << " tensors, got " << got.size();
  for (size_t i = 0; i < got.size(); ++i)
    if (auto result = near(got[i], expected[i], magnitude); !result)
      return ::testing::AssertionFailure() << "tensor " << i << ": " << result.message();
  return ::testing::AssertionSuccess();
}

namespace {

double combined(const Function& function, const std::vector<at::Tensor>& inputs) {
  double sum = 0;
  uint64_t seed = 100;
  for (const at::Tensor& output : function(inputs))
    sum += (output.detach() * random(output.sizes(), at::kDouble, ++seed)).sum().item<double>();
  return sum;
}

}  // namespace

::testing::AssertionResult gradients_match(const Function& function,
                                           const std::vector<at::Tensor>& inputs) {
  const auto outputs = function(inputs);
  std::vector<at::Tensor> differentiable, weights, requested;
  uint64_t seed = 100;
  for (const at::Tensor& output : outputs) {
    const at::Tensor weight = random(output.sizes(), at::kDouble, ++seed);
    if (!output.requires_grad()) continue;
    differentiable.push_back(output);
    weights.push_back(weight);
  }
  for (const at::Tensor& input : inputs)
    if (input.requires_grad()) requested.push_back(input);
  const auto gradients = gradients_of(differentiable, requested, weights);
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad()) continue;
    const at::Tensor& gradient = gradients[next++];
    if (!gradient.defined() || gradient.sizes() != inputs[i].sizes())
      return ::testing::AssertionFailure() << "input " << i << ": expected a gradient of shape "
                                           << inputs[i].sizes() << ", got another or none";
    for (int64_t e = 0; e < inputs[i].numel(); ++e) {
      double difference = 0;
      for (const double sign : {1.0, -1.0}) {
        std::vector<at::Tensor> moved;
        for (const at::Tensor& input : inputs) moved.push_back(input.detach().clone());
        moved[i].view(-1)[e].add_(sign * kDifferenceStep);
        difference += sign * combined(function, moved) / (2 * kDifferenceStep);
      }
      const double got = gradient.reshape(-1)[e].item<double>();
      if (std::abs(got - difference) > kDifferenceError * std::max(1.0, std::abs(difference)))
        return ::testing::AssertionFailure() << "input " << i << ", element " << e << ": expected "
                                             << difference << ", got " << got;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tandem::testing
