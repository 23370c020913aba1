// The table of built-in fusions: that each entry is whole.
#include "fusions/table.h"

#include <gmock/gmock.h>

#include <set>

#include "core/fusion.h"
#include "core/step.h"
#include "planner/registry.h"

namespace tandem::testing::fusions_table {
namespace {

TEST(FusionTable, NamedOnceAndWithAPicture) {
  std::set<std::string> names, joint;
  for (const Pass pass : {Pass::joint, Pass::forward, Pass::backward}) {
    for (const Fusion& fusion : built_in_fusions(pass)) {
      EXPECT_EQ(fusion.pass, pass) << fusion.name;
      // A fusion of both directions may have the same of forward alone, for calls without a
      // backward.
      const bool is_half = pass == Pass::forward && joint.erase(fusion.name) != 0;
      EXPECT_TRUE(names.insert(fusion.spelled()).second || is_half) << fusion.name;
      if (pass == Pass::joint) joint.insert(fusion.name);
      EXPECT_NE(fusion.run.run, nullptr) << fusion.name;
      EXPECT_FALSE(fusion.picture.empty()) << fusion.name;
      for (const auto* operands : {&fusion.run.reads, &fusion.run.writes})
        for (const MemberOperand& operand : *operands)
          EXPECT_LT(operand.member, fusion.pattern.size()) << fusion.name;
    }
  }
  const std::string of_gradients = "[_bias][_quantize][_quantize_y]";
  EXPECT_THAT(names, ::testing::IsSupersetOf<std::string>({"grouped_mlp_activation",
                                                           "grouped_mlp_glu",
                                                           "grouped_mlp_scaled_activation",
                                                           "grouped_mlp_scaled_glu",
                                                           "grouped_mlp_glu_forward",
                                                           "linear[_bias][_scale][_add]",
                                                           "linear[_bias]_activation[_quantize]",
                                                           "linear[_bias]_glu[_quantize]",
                                                           "bias_activation[_quantize]",
                                                           "bias_glu[_quantize]",
                                                           "activation_quantize",
                                                           "glu_quantize",
                                                           "dropout_add",
                                                           "bias_dropout_add",
                                                           "add_rms_norm",
                                                           "add_layer_norm",
                                                           "add_rms_norm_quantize",
                                                           "add_layer_norm_quantize",
                                                           "rms_norm_quantize",
                                                           "layer_norm_quantize",
                                                           "linear_backward_add",
                                                           "linear_backward_scale[_x][_weight]",
                                                           "bias_backward_quantize",
                                                           "scale_backward[_bias]_quantize",
                                                           "dropout_backward[_bias][_quantize]",
                                                           "rms_norm_backward" + of_gradients,
                                                           "rms_norm_backward_add" + of_gradients,
                                                           "layer_norm_backward" + of_gradients,
                                                           "layer_norm_backward_add" + of_gradients,
                                                           "activation_backward" + of_gradients,
                                                           "glu_backward" + of_gradients}));
}

TEST(FusionTable, NamesStepsThatThereAre) {
  for (const Pass pass : {Pass::joint, Pass::forward, Pass::backward})
    for (Fusion fusion : built_in_fusions(pass)) {
      fusion.name = "test_" + fusion.name;
      EXPECT_NO_THROW(register_fusion(fusion)) << fusion.name;
    }
}

TEST(FusionMatch, FindsOperandsByMemberAndName) {
  Step first, second;
  first.read_names = {"x"};
  first.reads = {Value{0}};
  first.write_names = {"y"};
  first.writes = {Value{1}};
  second.read_names = {"a", "b"};
  second.reads = {Value{1}, Value{2}};
  second.write_names = {"y"};
  second.writes = {Value{3}};
  const std::vector<const Step*> steps{&first, &second};
  std::vector<Type> types(4);
  types[0].dtype = at::kHalf;
  const Match match{steps, types};
  EXPECT_EQ((match[{0, "x"}]), Value{0});
  EXPECT_EQ((match[{1, "b"}]), Value{2});
  EXPECT_EQ((match[{1, "y"}]), Value{3});
  EXPECT_EQ((match[{1, kOtherRead}]), Value{2}) << "the read that no member writes";
  EXPECT_EQ((match[{0, "weight"}]), Value::none);
  EXPECT_EQ((match.type({0, "x"}).dtype), at::kHalf);
  second.reads = {Value{1}, Value{1}};
  EXPECT_EQ((match[{1, kOtherRead}]), Value::none);
}

}  // namespace
}  // namespace tandem::testing::fusions_table
