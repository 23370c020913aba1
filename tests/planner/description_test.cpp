// Descriptions: what they hold, and what is wrong with those that are refused.
#include "planner/description.h"

#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

auto parsing(Ops ops, std::string fields = "{}") {
  return [=] { parse_description(description_of(ops, fields)); };
}

TEST(Description, HoldsWhatItSays) {
  const auto description = parse_description(description_of(
      {"rms_norm", R"(basic_linear {"params": [1], "label": "qkv"})", "swiglu",
       R"(basic_linear {"params": [1]})"},
      R"({"training": false, "fuse": false, "cache_weights": true, "skipped_fusions": ["a"],
          "recipe": {"name": "Float8CurrentScaling"}, "fusions_version": 7})"));
  EXPECT_EQ(description->ops.size(), 4u);
  EXPECT_EQ(description->ops[1].label, "1.qkv");
  EXPECT_EQ(description->ops[3].label, "3.basic_linear");
  EXPECT_EQ(description->param_count(), 2u) << "two ops share a weight";
  EXPECT_EQ(description->extra_input_count(), 0u);
  EXPECT_FALSE(description->training);
  EXPECT_FALSE(description->fuse);
  EXPECT_TRUE(description->cache_weights);
  EXPECT_TRUE(description->recipe.has_value());
  EXPECT_EQ(description->fusions_version, 7u);
  EXPECT_THAT(description->skipped_fusions, ::testing::ElementsAre("a"));
}

TEST(Description, CountsUnboundExtraInputs) {
  const auto description = parse_description(
      description_of({R"(make_extra_output {"extra_outputs": [{"channel": "r"}]})",
                      R"(add_extra_input {"extra_inputs": [{"channel": "r"}]})", "add_extra_input",
                      R"(add_extra_input {"extra_inputs": [null]})"}));
  EXPECT_EQ(description->extra_input_count(), 2u);
}

TEST(DescriptionErrors, NotJson) {
  EXPECT_THAT([] { parse_description("{"); },
              ThrowsText<c10::ValueError>("description: expected JSON, got ",
                                          "Descriptions are made by the fronts"));
}

TEST(DescriptionErrors, MissingOrWrongFields) {
  EXPECT_THAT([] { parse_description("{}"); },
              ThrowsText<c10::ValueError>("description: expected the fields of a pipeline, got ",
                                          "ops", "Descriptions are made by the fronts"));
  EXPECT_THAT(parsing({"gelu"}, R"({"training": 3})"),
              ThrowsText<c10::ValueError>("description: expected the fields of a pipeline, got "));
}

TEST(DescriptionErrors, UnknownOp) {
  EXPECT_THAT([] { parse_description(R"({"ops": [{"op": "softmax"}]})"); },
              ThrowsText<c10::ValueError>("op: expected one of ", "got \"softmax\""));
}

TEST(DescriptionErrors, WrongParameterCount) {
  EXPECT_THAT(
      parsing({R"(layer_norm {"params": [0]})"}),
      ThrowsText<c10::ValueError>("0.layer_norm: expected 2 parameters, got 1", " parameters, got ",
                                  "Give the position of each in the parameter list"));
}

TEST(DescriptionErrors, WrongNumberOfBindings) {
  EXPECT_THAT(parsing({R"(add_extra_input {"extra_inputs": []})"}),
              ThrowsText<c10::ValueError>(
                  "0.add_extra_input: expected 1 entries in \"extra_inputs\", got 0",
                  " entries in \"", "Give one per slot, null where it is unbound"));
}

TEST(DescriptionErrors, ChannelWithTwoProducers) {
  const std::string output = R"(make_extra_output {"extra_outputs": [{"channel": "r"}]})";
  EXPECT_THAT(parsing({output, "gelu", output}),
              ThrowsText<c10::ValueError>("channel \"r\"",
                                          "\": expected one producer, got multiple producers, op ",
                                          "op 0 and op 2", "Rename one of the channels"));
}

TEST(DescriptionErrors, ChannelWithoutProducer) {
  EXPECT_THAT(parsing({R"(add_extra_input {"extra_inputs": [{"channel": "r"}]})"}),
              ThrowsText<c10::ValueError>("channel \"r\": expected a producer before op 0",
                                          ", but it has no producer, got only its reader",
                                          "set_extra_output_channel"));
}

TEST(DescriptionErrors, ChannelWithoutEarlierProducer) {
  EXPECT_THAT(parsing({R"(add_extra_input {"extra_inputs": [{"channel": "r"}]})",
                       R"(make_extra_output {"extra_outputs": [{"channel": "r"}]})"}),
              ThrowsText<c10::ValueError>("channel \"r\": expected a producer before op 0",
                                          ", but it has no earlier producer, got op 1",
                                          ", but it has no earlier producer, got op ",
                                          "Move the producer to the front"));
}

TEST(DescriptionErrors, BadOptions) {
  EXPECT_THAT(parsing({R"(gelu {"options": {"tanh": true}})"}),
              ThrowsText<c10::ValueError>("op options: expected one of []", "got \"tanh\"",
                                          "op options: expected one of ", "Remove it"));
  EXPECT_THAT(parsing({R"(gelu {"options": [1]})"}),
              ThrowsText<c10::ValueError>("op options: expected a JSON object, got [1]",
                                          "op options: expected a JSON object, got ",
                                          "Pass {} for the defaults"));
  EXPECT_THAT(parsing({R"(rms_norm {"options": {"eps": "small"}})"}),
              ThrowsText<c10::ValueError>("op options: expected \"eps\" to be like 1e-05",
                                          "op options: expected \"", "\" to be like ",
                                          "got \"small\"", "Correct its type"));
  EXPECT_THAT(parsing({R"(rms_norm {"options": {"eps": -1.0}})"}),
              ThrowsText<c10::ValueError>("norm: expected eps >= 0, got -1",
                                          "norm: expected eps >= 0, got ", "such as 1e-5"));
  EXPECT_THAT(parsing({R"(dropout {"options": {"p": 2}})"}),
              ThrowsText<c10::ValueError>("dropout: expected a probability p in [0, 1], got 2",
                                          "p is the share that becomes zero"));
  EXPECT_THAT(
      parsing({R"(reshape {"options": {"shape": [-1, -1]}})"}),
      ThrowsText<c10::ValueError>("reshape: expected sizes >= 0 and at most one -1, got [-1,-1]",
                                  "reshape: expected sizes >= 0 and at most one -1, got ",
                                  "One size can be inferred"));
  EXPECT_THAT(parsing({R"(reshape {"options": {"shape": [-2]}})"}),
              ThrowsText<c10::ValueError>("at most one -1, got [-2]"));
}

TEST(DescriptionErrors, UnknownRecipe) {
  EXPECT_THAT(
      parsing({"gelu"}, R"({"recipe": {"name": "MXFP4"}})"),
      ThrowsText<c10::ValueError>("recipe: expected \"Float8CurrentScaling\", got \"MXFP4"));
}

}  // namespace
}  // namespace tandem::testing
