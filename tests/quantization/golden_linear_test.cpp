// A linear layer under current scaling against the vectors of tests/data/README.md.
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/tensor.h>

#include "support/plans.h"
#include "support/safetensors.h"

namespace tandem::testing {
namespace {

const Safetensors& golden() {
  static const Safetensors file(TANDEM_SOURCE_DIR "/tests/data/golden_linear.safetensors");
  return file;
}

std::vector<int64_t> shape_of(const std::string& name) {
  const auto shape = golden().shape("linear_current/" + name);
  return {shape.begin(), shape.end()};
}

/// An operand in bfloat16, as stored.
at::Tensor operand(const std::string& name) {
  std::vector<float> values;
  for (const uint16_t bits : golden().read<uint16_t>("linear_current/" + name))
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
  return at::tensor(values, at::kFloat).view(shape_of(name)).to(at::kBFloat16);
}

at::Tensor expected(const std::string& name) {
  std::vector<float> values;
  for (const uint32_t bits : golden().read<uint32_t>("linear_current/" + name))
    values.push_back(std::bit_cast<float>(bits));
  return at::tensor(values, at::kFloat).view(shape_of(name)).to(at::kDouble);
}

::testing::AssertionResult is_right(const at::Tensor& got, const std::string& name,
                                    int64_t contracted) {
  const at::Tensor want = expected(name);
  at::Tensor allowed = static_cast<double>(contracted) * 0x1p-23 * expected(name + "_abs");
  if (got.scalar_type() == at::kBFloat16) allowed = allowed + 0x1p-8 * at::abs(want);
  const double excess = (at::abs(got.to(at::kDouble) - want) - allowed).max().item<double>();
  if (excess <= 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << name << ": expected an error within the bound, got " << excess << " more";
}

class GoldenLinear : public ::testing::TestWithParam<std::tuple<at::ScalarType, bool, Path>> {};
INSTANTIATE_TEST_SUITE_P(Current, GoldenLinear,
                         ::testing::Combine(::testing::Values(at::kBFloat16, at::kFloat),
                                            ::testing::Bool(),
                                            ::testing::Values(Path::direct, Path::dispatch)),
                         [](const auto& info) {
                           return std::string(c10::toString(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_fused" : "_unfused") +
                                  (std::get<2>(info.param) == Path::direct ? "_direct"
                                                                           : "_dispatch");
                         });

TEST_P(GoldenLinear, OutputAndGradients) {
  const auto [dtype, fuse, path] = GetParam();
  const at::Tensor x = operand("x").to(dtype).requires_grad_(true),
                   weight = operand("w").to(dtype).requires_grad_(true);
  const Planned planned({"basic_linear"}, {x}, {weight},
                        std::string(R"({"recipe": {"name": "Float8CurrentScaling"}, "fuse": )") +
                            (fuse ? "true" : "false") + "}");
  const Tensors inputs{x}, params{weight};
  const Outputs outputs = run_pipeline(planned.shared_plan(), {inputs, params, {}}, path);
  EXPECT_EQ(outputs[0].scalar_type(), dtype);
  EXPECT_TRUE(is_right(outputs[0].detach(), "y", 48));
  const Tensors grad_y{operand("dy").to(dtype)}, asked{x, weight};
  const auto gradients = gradients_of(outputs, asked, grad_y);
  EXPECT_TRUE(is_right(gradients[0], "dx", 32));
  EXPECT_TRUE(is_right(gradients[1], "dw", 32));
}

}  // namespace
}  // namespace tandem::testing
