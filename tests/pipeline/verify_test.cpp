// verify: passes where fused is unfused, names the fusion where it is not, touches nothing of the
// caller.
#include "pipeline/verify.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <optional>

#include "core/call.h"
#include "kernel_ops/norm/norm.h"
#include "pipeline/compare.h"
#include "planner/registry.h"
#include "quantization/recipe.h"
#include "support/plans.h"
#include "support/throws.h"
#include "tandem/autocast.h"

namespace tandem::testing::pipeline_verify {
namespace {

using ::testing::HasSubstr;

const Ops kBlock = {to_channel(),   "layer_norm", "basic_linear", "bias",        "gelu",
                    "basic_linear", "bias",       "dropout",      from_channel()};

Tensors block_params(at::ScalarType dtype = at::kFloat) {
  return {leaf({8}, dtype, 2),  leaf({8}, dtype, 3),     leaf({12, 8}, dtype, 4),
          leaf({12}, dtype, 5), leaf({8, 12}, dtype, 6), leaf({8}, dtype, 7)};
}

VerifyReport verified(const Ops& ops, const Tensors& inputs, const Tensors& params, int masks = 8) {
  Pipeline pipeline(ops_json(ops));
  pipeline(inputs, params, true);
  return verify(pipeline, inputs, params, true, masks);
}

TEST(Verify, PassesOnBuiltInFusions) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const VerifyReport report = verified(kBlock, {leaf({5, 8}, dtype)}, block_params(dtype));
    EXPECT_TRUE(report.passed) << dtype << ": " << report.text;
    EXPECT_GT(report.comparisons, 9);
    EXPECT_THAT(report.text, HasSubstr("of 9 backward masks agree"));
  }
}

TEST(Verify, PassesUnderARecipe) {
  const Autocast region;
  const VerifyReport report = verified(kBlock, {leaf({5, 8})}, block_params());
  EXPECT_TRUE(report.passed) << report.text;
}

TEST(Verify, PassesWherePackedCodesEndInPadding) {
  const Autocast region(true, NVFP4BlockScaling{});
  for (const int64_t features : {1, 7, 17}) {
    const VerifyReport report =
        verified({"geglu", "basic_linear", "bias"}, {leaf({3, 2 * features})},
                 {leaf({2, features}, at::kFloat, 2), leaf({2}, at::kFloat, 3)});
    EXPECT_TRUE(report.passed) << features << ": " << report.text;
  }
}

TEST(Verify, LeavesGeneratorAndTensorsAlone) {
  const Tensors inputs{leaf({5, 8})}, params = block_params();
  const at::Tensor x = inputs[0].detach().clone();
  Pipeline pipeline(ops_json(kBlock));
  pipeline(inputs, params, true);
  const at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const at::Tensor before = generator.get_state();
  verify(pipeline, inputs, params, true);
  EXPECT_TRUE(same(generator.get_state(), before));
  EXPECT_TRUE(same(inputs[0].detach(), x));
  EXPECT_FALSE(inputs[0].grad().defined());
}

TEST(Verify, WithoutGradientsComparesOutputs) {
  const at::NoGradGuard no_grad;
  const VerifyReport report =
      verified({"basic_linear", "bias"}, {random({2, 4})}, {random({4, 4}), random({4})}, 1);
  EXPECT_TRUE(report.passed);
  EXPECT_EQ(report.comparisons, 2) << "the fused step's result, and the output";
}

/// A fusion of gelu and constant_scale that computes what they do and then what `wrong` makes of
/// it.
FusionHandle forward_fusion(std::string name, Run run) {
  return register_fusion({.name = std::move(name),
                          .pattern = {"gelu", "constant_scale"},
                          .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = run}});
}
at::Tensor scaled_gelu(Call& call) {  // factor 1
  return at::gelu(call.in(0).to(at::kDouble), "tanh").to(call.in(0).scalar_type());
}
const Ops kScaledGelu = {"basic_linear", "bias", "gelu", "constant_scale", "basic_linear"};
Tensors scaled_gelu_params(at::ScalarType dtype = at::kFloat) {
  return {leaf({8, 4}, dtype, 2), leaf({8}, dtype, 3), leaf({4, 8}, dtype, 4)};
}

enum class Around { nothing, recipe, torch_autocast };

/// A region of the thread, or none.
class Surroundings {
 public:
  explicit Surroundings(Around around) : around_(around) {
    if (around == Around::recipe) region_.emplace();
    if (around == Around::torch_autocast) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    }
  }
  ~Surroundings() {
    if (around_ == Around::torch_autocast) at::autocast::set_autocast_enabled(at::kCPU, false);
  }

 private:
  Around around_;
  std::optional<Autocast> region_;
};

struct Setting {
  Around around;
  at::ScalarType dtype;
};
std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  static constexpr const char* kNames[] = {"Plain", "Recipe", "TorchAutocast"};
  return out << kNames[static_cast<size_t>(setting.around)] << c10::toString(setting.dtype);
}

class VerifyEverywhere : public ::testing::TestWithParam<Setting> {
 protected:
  VerifyReport verified_here(const Ops& ops, const Tensors& inputs, const Tensors& params) {
    const Surroundings surroundings(GetParam().around);
    return verified(ops, inputs, params);
  }
  VerifyReport scaled_gelu_verified() {
    return verified_here(kScaledGelu, {leaf({5, 4}, GetParam().dtype)},
                         scaled_gelu_params(GetParam().dtype));
  }
};

INSTANTIATE_TEST_SUITE_P(
    Settings, VerifyEverywhere,
    ::testing::Values(Setting{Around::nothing, at::kFloat}, Setting{Around::nothing, at::kBFloat16},
                      Setting{Around::nothing, at::kHalf}, Setting{Around::nothing, at::kDouble},
                      Setting{Around::recipe, at::kFloat}, Setting{Around::recipe, at::kBFloat16},
                      Setting{Around::recipe, at::kHalf},
                      Setting{Around::torch_autocast, at::kFloat},
                      Setting{Around::torch_autocast, at::kBFloat16}),
    ::testing::PrintToStringParamName());

TEST_P(VerifyEverywhere, ABlockPasses) {
  const VerifyReport report =
      verified_here(kBlock, {leaf({5, 8}, GetParam().dtype)}, block_params(GetParam().dtype));
  EXPECT_TRUE(report.passed) << report.text;
}

TEST_P(VerifyEverywhere, ARightFusionPasses) {
  const FusionHandle handle =
      forward_fusion("test_right", [](Call& call) { call.out(0, scaled_gelu(call)); });
  const VerifyReport report = scaled_gelu_verified();
  EXPECT_TRUE(report.passed) << report.text;
}

auto Names(const std::string& fusion, const std::string& value) {
  return HasSubstr("verify: fusion \"" + fusion + "\" differs from the ops that it replaces (" +
                   value);
}

TEST_P(VerifyEverywhere, TenPercentTooLargeIsNamed) {
  const FusionHandle handle =
      forward_fusion("test_wrong", [](Call& call) { call.out(0, scaled_gelu(call) * 1.1); });
  const VerifyReport report = scaled_gelu_verified();
  EXPECT_FALSE(report.passed);
  EXPECT_THAT(report.text, Names("test_wrong",
                                 "2.gelu, 3.constant_scale) in 3.constant_scale.y: "
                                 "expected "));
}

TEST_P(VerifyEverywhere, TheSmallestWrongFactorIsThatOfTheRoundings) {
  // gelu in float64 and a product by 1: two roundings of the dtype, and what arithmetic in float32
  // allows. In 16 bits one rounding is the test's own.
  static double factor = 1;
  const FusionHandle handle =
      forward_fusion("test_wrong", [](Call& call) { call.out(0, scaled_gelu(call) * factor); });
  const bool casts = GetParam().around == Around::torch_autocast;
  const at::ScalarType dtype = casts ? at::kBFloat16 : GetParam().dtype;
  const double unit = dtype == at::kBFloat16 ? 0x1p-7
                      : dtype == at::kHalf   ? 0x1p-10
                      : dtype == at::kFloat  ? 0x1p-23
                                             : 0x1p-52;
  const bool is_wide = dtype == at::kFloat || dtype == at::kDouble;
  factor = 1 + (is_wide ? 1 : 0.125) * unit;
  EXPECT_TRUE(scaled_gelu_verified().passed) << scaled_gelu_verified().text;
  factor = 1 + (is_wide ? 64 : 1.5) * unit;
  EXPECT_THAT(scaled_gelu_verified().text, Names("test_wrong", "2.gelu"));
}

TEST_P(VerifyEverywhere, OneWrongElementIsNamed) {
  const FusionHandle handle = forward_fusion("test_wrong", [](Call& call) {
    at::Tensor y = scaled_gelu(call);
    y.view(-1)[y.numel() / 2].add_(0.5);
    call.out(0, y);
  });
  EXPECT_THAT(scaled_gelu_verified().text,
              ::testing::AllOf(Names("test_wrong", "2.gelu"), HasSubstr(" at element 20 within ")));
}

/// Rows of which the first is larger: the others are small beside the tensor's largest element, and
/// as large as they are to a user.
at::Tensor with_a_large_row(const Setting& setting, int64_t cols) {
  at::Tensor x = random({6, cols}, setting.dtype);
  const bool is_wide = setting.around == Around::nothing && unit_of(setting.dtype) < 0x1p-20;
  x[0].mul_(is_wide ? 0.1 / unit_of(setting.dtype) : setting.dtype == at::kHalf ? 1e3 : 1e4);
  return x.requires_grad_();
}

TEST_P(VerifyEverywhere, RowsAreWrongHoweverLargeAnotherRowIs) {
  const FusionHandle handle = forward_fusion("test_wrong", [](Call& call) {
    at::Tensor y = scaled_gelu(call);
    y.slice(0, 1).zero_();
    call.out(0, y);
  });
  const at::ScalarType dtype = GetParam().dtype;
  const Tensors params = scaled_gelu_params(dtype);
  params[1].detach().zero_();
  EXPECT_THAT(verified_here(kScaledGelu, {with_a_large_row(GetParam(), 4)}, params).text,
              Names("test_wrong", "2.gelu, 3.constant_scale) in 3.constant_scale.y"));
}

TEST_P(VerifyEverywhere, RightFusionsPassHoweverLargeARowIs) {
  const FusionHandle handle =
      forward_fusion("test_right", [](Call& call) { call.out(0, scaled_gelu(call)); });
  const at::ScalarType dtype = GetParam().dtype;
  VerifyReport report =
      verified_here(kScaledGelu, {with_a_large_row(GetParam(), 4)}, scaled_gelu_params(dtype));
  EXPECT_TRUE(report.passed) << report.text;
  report = verified_here(kBlock, {with_a_large_row(GetParam(), 8)}, block_params(dtype));
  EXPECT_TRUE(report.passed) << report.text;
}

TEST_P(VerifyEverywhere, RowsOfOneElementThatCancelPass) {
  // A product of one column is what is left of terms that are larger than it.
  const at::ScalarType dtype = GetParam().dtype;
  const VerifyReport report =
      verified_here({"basic_linear", "bias", "gelu"}, {leaf({512, 64}, dtype)},
                    {leaf({1, 64}, dtype, 2), leaf({1}, dtype, 3)});
  EXPECT_TRUE(report.passed) << report.text;
}

TEST_P(VerifyEverywhere, AWrongGradientAloneIsNamed) {
  const FusionHandle handle = register_fusion(
      {.name = "test_wrong",
       .pass = Pass::backward,
       .pattern = {"constant_scale.backward", "gelu.backward"},
       .run = {
           .reads = {{0, "grad_y"}, {1, "x"}}, .writes = {{1, "grad_x"}}, .run = [](Call& call) {
             call.out(0, at::gelu_backward(call.in(0), call.in(1), "tanh") * 1.1);
           }}});
  const VerifyReport report = scaled_gelu_verified();
  EXPECT_FALSE(report.passed);
  EXPECT_THAT(report.text,
              ::testing::AllOf(Names("test_wrong", "2.gelu backward, 3.constant_scale backward)"),
                               HasSubstr("asked for of x, ")));
}

TEST_P(VerifyEverywhere, AWrongKeptValueAloneIsNamed) {
  const FusionHandle handle = register_fusion(
      {.name = "test_wrong",
       .pattern = {"constant_scale", "gelu"},
       .run = {.reads = {{0, "x"}}, .writes = {{0, "y"}, {1, "y"}}, .run = [](Call& call) {
                 call.out(1,
                          at::gelu(call.in(0).to(at::kDouble), "tanh").to(call.out_type(1).dtype));
                 if (call.wants(0)) call.out(0, call.in(0) * 1.1);
               }}});
  const VerifyReport report =
      verified_here({"relu", "constant_scale", "gelu"}, {leaf({5, 8}, GetParam().dtype)}, {});
  EXPECT_THAT(report.text, Names("test_wrong", "1.constant_scale, 2.gelu) in 1.constant_scale.y"));
}

TEST(Verify, AMissingGradientIsNamed) {
  const FusionHandle handle = register_fusion(
      {.name = "test_wrong",
       .pass = Pass::backward,
       .pattern = {"constant_scale.backward", "gelu.backward"},
       .run = {.reads = {{0, "grad_y"}}, .writes = {{1, "grad_x"}}, .run = [](Call& call) {
                 call.out(0, at::zeros_like(call.in(0)));
               }}});
  EXPECT_THAT(verified({"gelu", "constant_scale"}, {leaf({3, 4})}, {}).text,
              Names("test_wrong", "0.gelu backward"));
}

TEST(Verify, ARightFusionIsNeverBlamed) {
  const FusionHandle right =
      forward_fusion("test_right", [](Call& call) { call.out(0, scaled_gelu(call)); });
  const FusionHandle wrong =
      register_fusion({.name = "test_wrong",
                       .pattern = {"relu", "constant_scale"},
                       .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = [](Call& call) {
                                 call.out(0, at::relu(call.in(0)) * 1.1);
                               }}});
  const VerifyReport report =
      verified({"gelu", "constant_scale", "relu", "constant_scale", "gelu", "constant_scale"},
               {leaf({3, 4})}, {});
  EXPECT_THAT(report.text, Names("test_wrong", "2.relu, 3.constant_scale)"));
}

TEST(Verify, AWrongFusionAtAQuantizePointIsNamed) {
  const FusionHandle handle = register_fusion(
      {.name = "test_wrong",
       .pattern = {"rms_norm", StepKind::quantize},
       .run = {
           .reads = {{0, "x"}, {0, "weight"}, {1, "given"}},
           .writes = {{0, "y"}, {0, "inv_rms"}, {1, "row_codes"}, {1, "column_codes"}, {1, "amax"}},
           .run = [](Call& call) {
             using Norm = kernel_ops::NormForward;
             const at::Tensor wrong = call.in(1) * 1.1;
             call.write<Norm>({.x = call.in(0),
                               .weight = wrong,
                               .eps = 1e-5,
                               .zero_centered_gamma = false,
                               .output_mask = {false, call.wants(0)},
                               .codes = call.codes(&call.options<Quantizer>(1), /*given=*/2,
                                                   /*write=*/2)},
                              {Norm::y, Norm::inv_norm});
           }}});
  const Autocast region;
  const VerifyReport report =
      verified({"rms_norm", "basic_linear"}, {leaf({5, 8})}, {leaf({8}), leaf({4, 8})});
  EXPECT_THAT(report.text, Names("test_wrong", "0.rms_norm)"));
}

/// Writes every result into the same memory, so that a second one replaces the first.
at::Tensor& shared_memory() {
  static at::Tensor memory;
  return memory;
}

TEST(Verify, WhatIsWrongOnlyInTheWholeIsFoundByLeavingFusionsOut) {
  shared_memory() = random({3, 4});
  const FusionHandle handle =
      register_fusion({.name = "test_shared",
                       .pattern = {"gelu", "constant_scale"},
                       .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = [](Call& call) {
                                 shared_memory().copy_(scaled_gelu(call));
                                 call.out(0, shared_memory());
                               }}});
  const std::string output = R"(make_extra_output {"extra_outputs": [{"channel": "r"}]})";
  const VerifyReport report =
      verified({"gelu", "constant_scale", output, "gelu", "constant_scale"}, {random({3, 4})}, {});
  EXPECT_FALSE(report.passed);
  EXPECT_THAT(report.text,
              ::testing::AllOf(HasSubstr("verify: fused and unfused differ in output 1: expected "),
                               HasSubstr("Without fusion \"test_shared\" they agree.")));
}

TEST(Verify, NamesAJointFusionThatKeepsTheWrongThing) {
  const FusionHandle handle = register_fusion(
      {.name = "test_wrong_joint",
       .pass = Pass::joint,
       .pattern = {"constant_scale"},
       .run = {.reads = {{0, "x"}},
               .writes = {{0, "y"}},
               .run =
                   [](Call& call) {
                     call.out(0, call.in(0) * 1.0);
                     call.out(1, call.in(0).clone());
                   }},
       .backward = {.reads = {{0, "grad_y"}},
                    .writes = {{0, "grad_x"}},
                    .run = [](Call& call) { call.out(0, call.in(0) * call.in(1)); }},
       .keeps = {"slope"}});
  const VerifyReport report = verified({"gelu", "constant_scale"}, {leaf({3, 4})}, {});
  EXPECT_FALSE(report.passed);
  EXPECT_THAT(report.text, Names("test_wrong_joint", "1.constant_scale backward)"));
}

TEST(Verify, NanAndInfinityEqualThemselves) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    at::Tensor x = random({5, 8}, dtype);
    x[0][1] = kInf;
    x[1][2] = -kInf;
    x[2][3] = nan;
    x[3].mul_(60000);
    const VerifyReport report = verified(kBlock, {x.requires_grad_()}, block_params(dtype));
    EXPECT_TRUE(report.passed) << dtype << report.text;
  }
  const Ops overflow = {R"(constant_scale {"options": {"factor": 1e38}})",
                        R"(constant_scale {"options": {"factor": 1e38}})"};
  EXPECT_TRUE(verified(overflow, {leaf({3})}, {}).passed);
}

TEST(Verify, InfinityOfAnotherSignAndNanElsewhereAreDifferences) {
  static double value = 0;
  const FusionHandle handle = forward_fusion("test_wrong", [](Call& call) {
    at::Tensor y = scaled_gelu(call);
    y[0][1] = value;
    call.out(0, y);
  });
  at::Tensor x = random({3, 4});
  x[0][1] = std::numeric_limits<float>::infinity();
  for (const double wrong :
       {-std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN(), 1.0}) {
    value = wrong;
    EXPECT_THAT(verified({"gelu", "constant_scale"}, {x}, {}).text, Names("test_wrong", "0.gelu"))
        << wrong;
  }
  value = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(verified({"gelu", "constant_scale"}, {x}, {}).passed);
}

TEST(Verify, NoRowsIntegersAndWhatIsRequired) {
  EXPECT_TRUE(verified(kBlock, {leaf({0, 8})}, block_params()).passed);
  EXPECT_TRUE(verified({"gelu", "add_extra_input"}, {leaf({3, 4}), at::ones({3, 4}, at::kLong)}, {})
                  .passed);
  Pipeline pipeline(ops_json({"basic_linear", "bias"}), {"linear_bias"});
  const Tensors inputs{leaf({2, 4})}, params{leaf({4, 4}), leaf({4})};
  EXPECT_TRUE(verify(pipeline, inputs, params, true).passed)
      << "a fusion that is required may be left out to compare with";
}

TEST(Verify, GivenGradientsAreVariedToo) {
  // Wrong only where the first output's gradient is missing.
  const FusionHandle handle = register_fusion(
      {.name = "test_wrong",
       .pass = Pass::backward,
       .pattern = {"constant_scale.backward", "gelu.backward"},
       .run = {
           .reads = {{0, "grad_y"}, {1, "x"}}, .writes = {{1, "grad_x"}}, .run = [](Call& call) {
             const bool is_sum = at::abs(call.in(0)).max().item<float>() > 1e-3;
             call.out(0, at::gelu_backward(call.in(0), call.in(1), "tanh") * (is_sum ? 1 : 2));
           }}});
  const std::string small = R"(constant_scale {"options": {"factor": 1e-6}})";
  const VerifyReport report =
      verified({"gelu", "constant_scale", "make_extra_output", small}, {leaf({3, 4})}, {});
  EXPECT_THAT(report.text, ::testing::AllOf(Names("test_wrong", "0.gelu backward"),
                                            HasSubstr("gradients given of outputs 0; ")));
}

/// Reads as many elements as x has from where it begins.
at::Tensor as_if_contiguous(const at::Tensor& x) {
  return x.as_strided(x.sizes(), at::empty(x.sizes(), x.options()).strides());
}

TEST(Verify, AFusionThatReadsOneLayoutIsNamed) {
  const FusionHandle handle = forward_fusion("test_dense", [](Call& call) {
    call.out(0, at::gelu(as_if_contiguous(call.in(0)), "tanh"));
  });
  const VerifyReport report = verified({"gelu", "constant_scale"}, {leaf({3, 4})}, {});
  EXPECT_THAT(report.text, Names("test_dense", "0.gelu, 1.constant_scale"));
}

TEST(Verify, AFusionThatReadsOneLayoutOfAGradientIsNamed) {
  const FusionHandle handle = register_fusion(
      {.name = "test_dense",
       .pass = Pass::backward,
       .pattern = {"constant_scale.backward", "gelu.backward"},
       .run = {
           .reads = {{0, "grad_y"}, {1, "x"}}, .writes = {{1, "grad_x"}}, .run = [](Call& call) {
             call.out(0, at::gelu_backward(as_if_contiguous(call.in(0)), call.in(1), "tanh"));
           }}});
  const VerifyReport report = verified({"gelu", "constant_scale"}, {leaf({3, 4})}, {});
  EXPECT_THAT(report.text, Names("test_dense", "0.gelu backward"));
}

TEST(Verify, LeavesTheGeneratorAloneWhereARunThrows) {
  const FusionHandle handle = forward_fusion("test_throws", [](Call& call) {
    at::randn({4}, call.in(0).options());
    TORCH_CHECK(false, "test_throws");
  });
  Pipeline pipeline(ops_json({"dropout", "gelu", "constant_scale"}));
  const at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const at::Tensor before = generator.get_state();
  const Tensors inputs{leaf({3, 4})};
  EXPECT_THROW(verify(pipeline, inputs, {}, true), c10::Error);
  EXPECT_TRUE(same(generator.get_state(), before));
}

}  // namespace
}  // namespace tandem::testing::pipeline_verify
