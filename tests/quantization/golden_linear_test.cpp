// A linear layer under each recipe against the vectors of tests/data/README.md.
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/tensor.h>

#include "support/plans.h"
#include "support/safetensors.h"

namespace tandem::testing::quantization_golden_linear {
namespace {

const Safetensors& golden() {
  static const Safetensors file(TANDEM_SOURCE_DIR "/tests/data/golden_linear.safetensors");
  return file;
}

std::vector<int64_t> shape_of(const std::string& name) {
  const auto shape = golden().shape(name);
  return {shape.begin(), shape.end()};
}

/// An operand in bfloat16, as stored.
at::Tensor operand(const std::string& name) {
  std::vector<float> values;
  for (const uint16_t bits : golden().read<uint16_t>(name))
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
  return at::tensor(values, at::kFloat).view(shape_of(name)).to(at::kBFloat16);
}

at::Tensor expected(const std::string& name) {
  std::vector<float> values;
  for (const uint32_t bits : golden().read<uint32_t>(name))
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

/// A family of vectors and the recipe that they are of.
struct Family {
  const char *name, *recipe;
  int64_t features;
  const char* options = "";
};
std::ostream& operator<<(std::ostream& out, const Family& family) { return out << family.name; }

class GoldenLinear
    : public ::testing::TestWithParam<std::tuple<Family, at::ScalarType, bool, Path>> {};
INSTANTIATE_TEST_SUITE_P(
    Recipes, GoldenLinear,
    ::testing::Combine(::testing::Values(Family{"linear_current", "Float8CurrentScaling", 48},
                                         Family{"linear_block", "Float8BlockScaling", 48},
                                         Family{"linear_mxfp8", "MXFP8BlockScaling", 64},
                                         Family{"linear_nvfp4", "NVFP4BlockScaling", 64,
                                                R"(, "disable_stochastic_rounding": true)"}),
                       ::testing::Values(at::kBFloat16, at::kFloat), ::testing::Bool(),
                       ::testing::Values(Path::direct, Path::dispatch)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" +
             c10::toString(std::get<1>(info.param)) +
             (std::get<2>(info.param) ? "_fused" : "_unfused") +
             (std::get<3>(info.param) == Path::direct ? "_direct" : "_dispatch");
    });

TEST_P(GoldenLinear, OutputAndGradients) {
  const auto& [family, dtype, fuse, path] = GetParam();
  const std::string prefix = std::string(family.name) + "/";
  const at::Tensor x = operand(prefix + "x").to(dtype).requires_grad_(true),
                   weight = operand(prefix + "w").to(dtype).requires_grad_(true);
  const Planned planned({"basic_linear"}, {x}, {weight},
                        std::string(R"({"recipe": {"name": ")") + family.recipe + "\"" +
                            family.options + R"(}, "fuse": )" + (fuse ? "true" : "false") + "}");
  const Tensors inputs{x}, params{weight};
  const Outputs outputs = run_pipeline(planned.shared_plan(), {inputs, params, {}}, path);
  EXPECT_EQ(outputs[0].scalar_type(), dtype);
  EXPECT_TRUE(is_right(outputs[0].detach(), prefix + "y", family.features));
  const Tensors grad_y{operand(prefix + "dy").to(dtype)}, requested{x, weight};
  const auto gradients = gradients_of(outputs, requested, grad_y);
  EXPECT_TRUE(is_right(gradients[0], prefix + "dx", 32));
  EXPECT_TRUE(is_right(gradients[1], prefix + "dw", 32));
}

}  // namespace
}  // namespace tandem::testing::quantization_golden_linear
