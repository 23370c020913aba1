// verify: passes where fused is unfused, names the fusion where it is not, touches nothing of the caller.
#include "pipeline/verify.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>

#include "core/call.h"
#include "planner/registry.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

using ::testing::HasSubstr;

const Ops kBlock = {
    R"(make_extra_output {"extra_outputs": [{"channel": "r", "to_caller": false}]})",
    "layer_norm",
    "basic_linear",
    "bias",
    "gelu",
    "basic_linear",
    "bias",
    "dropout",
    R"(add_extra_input {"extra_inputs": [{"channel": "r"}]})"};

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
  const VerifyReport report =
      verified({"basic_linear", "bias"}, {random({2, 4})}, {random({4, 4}), random({4})}, 1);
  EXPECT_TRUE(report.passed);
  EXPECT_EQ(report.comparisons, 2);
}

TEST(Verify, NamesAFusionWithAWrongOutput) {
  const FusionHandle handle =
      register_fusion({.name = "test_wrong_forward",
                       .pattern = {"gelu", "constant_scale"},
                       .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = [](Call& call) {
                                 call.out(0, call.in(0) * 2);
                               }}});
  const VerifyReport report =
      verified({"basic_linear", "bias", "gelu", "constant_scale"}, {leaf({3, 4})},
               {leaf({4, 4}, at::kFloat, 2), leaf({4}, at::kFloat, 3)});
  EXPECT_FALSE(report.passed);
  EXPECT_THAT(report.text,
              ::testing::AllOf(HasSubstr("verify: fused and unfused differ in output 0"),
                               HasSubstr("Without fusion \"test_wrong_forward\" they agree")));
}

TEST(Verify, NamesAFusionWithAWrongGradient) {
  const FusionHandle handle = register_fusion(
      {.name = "test_wrong_backward",
       .pass = Pass::backward,
       .pattern = {"constant_scale.backward", "gelu.backward"},
       .run = {.reads = {{0, "grad_y"}}, .writes = {{1, "grad_x"}}, .run = [](Call& call) {
                 call.out(0, call.in(0) * 0);
               }}});
  const VerifyReport report =
      verified({"basic_linear", "bias", "gelu", "constant_scale"}, {leaf({3, 4})},
               {leaf({4, 4}, at::kFloat, 2), leaf({4}, at::kFloat, 3)});
  EXPECT_FALSE(report.passed);
  EXPECT_THAT(report.text,
              ::testing::AllOf(HasSubstr("differ in gradient"),
                               HasSubstr("Without fusion \"test_wrong_backward\" they agree")));
}

TEST(Verify, SaysWhereNoSingleFusionIsToBlame) {
  std::vector<FusionHandle> handles;
  for (const char* name : {"test_wrong_a", "test_wrong_b"})
    handles.push_back(
        register_fusion({.name = name,
                         .pattern = {"gelu", "constant_scale"},
                         .run = {.reads = {{0, "x"}}, .writes = {{1, "y"}}, .run = [](Call& call) {
                                   call.out(0, call.in(0) * 2);
                                 }}}));
  const VerifyReport report = verified({"gelu", "constant_scale"}, {leaf({3, 4})}, {});
  EXPECT_FALSE(report.passed);
  EXPECT_THAT(report.text, HasSubstr("Leaving out one fusion does not mend it"));
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
  EXPECT_THAT(report.text, HasSubstr("Without fusion \"test_wrong_joint\" they agree"));
}

}  // namespace
}  // namespace tandem::testing
