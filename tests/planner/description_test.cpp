// Descriptions: what they hold, and what is wrong with those that are refused.
#include "planner/description.h"

#include <nlohmann/json.hpp>

#include "core/build_id.h"
#include "pipeline/pipeline.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::planner_description {
namespace {

void parse(const Ops& ops, const std::string& fields = "{}") {
  parse_description(description_of(ops, fields));
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

TEST(Description, IsReadAsItWasWritten) {
  const OpEntry sum{.op = "add_extra_input",
                    .label = "sum",
                    .extra_inputs = {{.channel = "r"}},
                    .in_place = true,
                    .instance = "one"};
  const OpEntry product{.op = "basic_linear",
                        .options = {{"accumulate_into_main_grad", true}},
                        .params = {2},
                        .main_grads = {2},
                        .state = StateSlots{1, 2, 3}};
  const OpEntry split{.op = "make_extra_output",
                      .extra_outputs = {{.channel = "r", .to_caller = false}}};
  const auto description = parse_description(write_description(write_ops({split, sum, product}),
                                                               R"({"name": "MXFP8BlockScaling"})",
                                                               {.training = false,
                                                                .fuse = false,
                                                                .cache_weights = true,
                                                                .skipped_fusions = {"a"},
                                                                .required_fusions = {"b", "c"},
                                                                .fusions_version = 7},
                                                               "process"));
  ASSERT_EQ(description->ops.size(), 3u);
  EXPECT_EQ(description->ops[0].extra_outputs[0].channel, "r");
  EXPECT_FALSE(description->ops[0].extra_outputs[0].to_caller);
  const OpNode& add = description->ops[1];
  EXPECT_EQ(add.label, "1.sum");
  EXPECT_EQ(add.extra_inputs[0].channel, "r");
  EXPECT_TRUE(add.in_place);
  EXPECT_EQ(add.instance, "one");
  const OpNode& linear = description->ops[2];
  EXPECT_THAT(linear.params, ::testing::ElementsAre(2));
  EXPECT_THAT(linear.buffers, ::testing::ElementsAre(0));
  ASSERT_TRUE(linear.state);
  EXPECT_EQ(linear.state->holder, 1u);
  EXPECT_EQ(linear.state->forward, 2u);
  EXPECT_EQ(linear.state->backward, 3u);
  EXPECT_FALSE(description->training);
  EXPECT_FALSE(description->fuse);
  EXPECT_TRUE(description->cache_weights);
  EXPECT_THAT(description->skipped_fusions, ::testing::ElementsAre("a"));
  EXPECT_THAT(description->required_fusions, ::testing::ElementsAre("b", "c"));
  EXPECT_EQ(description->fusions_version, 7u);
  EXPECT_TRUE(description->recipe.has_value());
}

TEST(Description, AParameterMayBeSeveralTensors) {
  const std::string written =
      write_ops({{.op = "basic_linear", .params = {0, 2, 1}, .joins = {3}}, {.op = "gelu"}});
  const auto description = parse_description(write_description(written, "null", {}));
  EXPECT_THAT(description->ops[0].params, ::testing::ElementsAre(0, 2, 1));
  EXPECT_THAT(description->ops[0].joins, ::testing::ElementsAre(3));
  EXPECT_TRUE(description->ops[1].joins.empty());
}

TEST(Description, BuffersAreMainGradsThenDeferredThenGivenTensors) {
  const auto written = nlohmann::json::parse(write_ops({
      {.op = "a", .params = {0, 1}, .main_grads = {1}, .given = 1},
      {.op = "b", .deferred = 2},
      {.op = "c", .params = {1, 2}, .main_grads = {1, 2}, .deferred = 1, .given = 1},
  }));
  EXPECT_EQ(written[0]["buffers"], nlohmann::json({0, 5}));
  EXPECT_EQ(written[1]["buffers"], nlohmann::json({2, 3}));
  EXPECT_EQ(written[2]["buffers"], nlohmann::json({0, 1, 4, 6}));
}

TEST(DescriptionErrors, JoinedParameters) {
  EXPECT_ERROR(parse({R"(basic_linear {"params": [0, 1], "joins": [1, 1]})"}), c10::ValueError,
               "0.basic_linear: expected 1 numbers in \"joins\", got 2. Say of each parameter how "
               "many tensors it is.");
  EXPECT_ERROR(parse({R"(basic_linear {"params": [0, 1], "joins": [3]})"}), c10::ValueError,
               "0.basic_linear: expected 3 parameters, got 2.");
  EXPECT_ERROR(parse({R"(basic_linear {"params": [0], "joins": [0]})"}), c10::ValueError,
               "\"joins\"");
}

TEST(DescriptionErrors, WhatCannotBeWritten) {
  EXPECT_ERROR(write_ops({{.op = "all_reduce", .options = {{"group", std::string("\xff")}}}}),
               c10::ValueError, "all_reduce: expected options in UTF-8, got group \"",
               "\". Encode it so.");
  EXPECT_ERROR(write_ops({{.op = "dropout", .options = {{"\xff", true}}}}), c10::ValueError,
               "dropout: expected options in UTF-8, got ? \"\". Encode it so.");
  EXPECT_ERROR(write_ops({{.op = "dropout", .options = {{"p", std::nan("")}}}}), c10::ValueError,
               "dropout: expected option p to be a finite number, got nan. Give another one.");
  EXPECT_ERROR(write_ops({{.op = "dropout", .options = {{"p", 0.1}, {"p", 0.2}}}}), c10::ValueError,
               "dropout: expected each option once, got one twice. ");
  EXPECT_ERROR(write_ops({{.op = "bias", .extra_inputs = {{.channel = "\xff"}}}}), c10::ValueError,
               "bias: expected a channel named in UTF-8, got \"");
}

TEST(Description, MayBeWrittenByHand) {
  EXPECT_NO_THROW(parse({"gelu"}));
  EXPECT_NO_THROW(parse({"gelu"}, R"({"version": 1, "build": ")" + build_id() + "\"}"));
}

TEST(DescriptionErrors, OfAnotherLibrary) {
  EXPECT_ERROR(parse({"gelu"}, R"({"version": 2})"), c10::ValueError,
               "description: expected version 1, got 2. Export or compile the model again with "
               "this version of Tandem.");
  EXPECT_ERROR(parse({"gelu"}, R"({"version": "1"})"), c10::ValueError,
               "description: expected \"version\" to be an integer");
  EXPECT_ERROR(parse({"gelu"}, R"({"build": "0123"})"), c10::ValueError,
               "description: expected one of this build of Tandem, ",
               build_id() +
                   ", got one of another build, 0123. Export or compile the model again, or call "
                   "run_decompositions() before saving it");
  EXPECT_ERROR(parse({"gelu"}, R"({"budget": 3})"), c10::ValueError,
               "description: expected one of [", "got \"budget\". Remove it.");
}

TEST(Description, CountsUnboundExtraInputs) {
  const auto description = parse_description(
      description_of({R"(make_extra_output {"extra_outputs": [{"channel": "r"}]})", from_channel(),
                      "add_extra_input", R"(add_extra_input {"extra_inputs": [null]})"}));
  EXPECT_EQ(description->extra_input_count(), 2u);
}

TEST(DescriptionErrors, NotJson) {
  for (const std::string text :
       {"", "{", R"({"ops": NaN})", R"({"ops": 1e999})", "{\"ops\": \"\xff\"}"})
    EXPECT_ERROR(parse_description(text), c10::ValueError, "description: expected JSON, got ",
                 "Descriptions are made by the fronts")
        << text;
}

TEST(DescriptionErrors, MissingOrWrongFields) {
  EXPECT_ERROR(parse_description("{}"), c10::ValueError,
               "description: expected a field \"ops\", got none in {}. Add it.");
  EXPECT_ERROR(parse_description("[]"), c10::ValueError,
               "description: expected a JSON object, got []");
  EXPECT_ERROR(parse_description(R"({"ops": {"op": "gelu"}})"), c10::ValueError,
               "description: expected a list of at most 65536 ops, got ",
               "Cut the pipeline into several");
  EXPECT_ERROR(parse_description(R"({"ops": ["gelu"]})"), c10::ValueError,
               "description: op 0: expected a JSON object, got ");
  EXPECT_ERROR(parse_description(R"({"ops": [{}]})"), c10::ValueError,
               "description: op 0: expected a field \"op\", got none");
  for (const char* fields :
       {R"({"training": 3})", R"({"fuse": null})", R"({"cache_weights": "yes"})"})
    EXPECT_ERROR(parse({"gelu"}, fields), c10::ValueError, "description: expected \"",
                 "true or false", "got ")
        << fields;
  for (const char* number : {"-1", "18446744073709551616", "1.0", "\"1\""})
    EXPECT_ERROR(
        parse({"gelu"}, std::string(R"({"fusions_version": )") + number + "}"), c10::ValueError,
        "description: expected \"fusions_version\" to be an integer from 0 to 2^64 - 1, got ")
        << number;
  EXPECT_ERROR(parse({"gelu"}, R"({"skipped_fusions": [1]})"), c10::ValueError,
               "description: expected \"skipped_fusions\" to be a list of at most 1024, each a "
               "text of at most 1024 bytes, got [1]. Correct it.");
}

TEST(DescriptionErrors, UnknownFieldsAreNamedWithThoseThereAre) {
  EXPECT_ERROR(parse({"gelu"}, R"({"recipes": null})"), c10::ValueError,
               "description: expected one of [\"version\",\"build\",\"ops\",\"recipe\",",
               "\"fusions_version\"", "got \"recipes\". Remove it.");
  EXPECT_ERROR(parse({R"(gelu {"param": [0]})"}), c10::ValueError,
               "description: op 0: expected one of [\"op\",\"label\",",
               "got \"param\". Remove it.");
  EXPECT_ERROR(parse({R"(make_extra_output {"extra_outputs": [{"chanel": "r"}]})"}),
               c10::ValueError, "0.make_extra_output: extra_outputs: expected one of ",
               "got \"chanel\"");
}

std::string nested(size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); }

TEST(DescriptionErrors, Depth) {
  for (const size_t depth : {size_t{100}, size_t{100'000}})
    EXPECT_ERROR(
        parse_description(R"({"ops": [{"op": "identity", "options": )" + nested(depth) + "}]}"),
        c10::ValueError,
        "description: expected lists and objects at most 64 deep in one another, got more");
  EXPECT_ERROR(parse({R"(identity {"options": )" + nested(40) + "}"}), c10::ValueError,
               "identity: expected a JSON object, got [[[");
}

TEST(DescriptionErrors, LongTextsAreQuotedInPart) {
  const std::string text(1'000'000, 'a');
  const auto message = [&](const std::string& ops) {
    try {
      parse_description(R"({"ops": [)" + ops + "]}");
    } catch (const c10::ValueError& error) {
      return error.msg();
    }
    return std::string(100'000, '?');
  };
  for (const std::string& op :
       {R"({"op": ")" + text + "\"}", R"({"op": "gelu", "label": ")" + text + "\"}",
        R"({"op": "gelu", "instance": ")" + text + "\"}",
        R"({"op": "gelu", "options": ")" + text + "\"}",
        R"({"op": "gelu", "options": {")" + text + "\": 1}}",
        R"({"op": "make_extra_output", "extra_outputs": [{"channel": ")" + text + "\"}]}",
        R"({"op": "gelu", "label": )" + text + "}"})
    EXPECT_LT(message(op).size(), 2000u) << op.substr(0, 60);
  EXPECT_THAT(message(R"({"op": "gelu", "label": ")" + text + "\"}"),
              ::testing::AllOf(
                  ::testing::HasSubstr("expected \"label\" to be a text of at most 1024 bytes"),
                  ::testing::HasSubstr("aaa... (1000002 bytes). Correct it.")));
}

TEST(DescriptionErrors, TooLongOrTooManyOps) {
  EXPECT_ERROR(parse_description(std::string((64 << 20) + 1, ' ')), c10::ValueError,
               "description: expected JSON of at most 67108864 bytes, got 67108865. Cut the "
               "pipeline into several.");
  const Ops many(70'000, "identity");
  EXPECT_ERROR(parse(many), c10::ValueError,
               "description: expected a list of at most 65536 ops, got 70000");
}

TEST(DescriptionErrors, ParameterPositions) {
  for (const char* positions :
       {"[-1]", "[131072]", "[1e3]", "[true]", "0", "[18446744073709551615]"})
    EXPECT_ERROR(parse({std::string(R"(rms_norm {"params": )") + positions + "}"}), c10::ValueError,
                 "description: op 0: expected \"params\" to be a list of at most 131072, each an "
                 "integer from 0 to 131071, got ")
        << positions;
  EXPECT_ERROR(parse({R"(layer_norm {"params": [3, 3]})"}), c10::ValueError,
               "0.layer_norm: expected parameters at different positions, got one twice in [3,3]",
               "Give each its own");
}

TEST(DescriptionErrors, UnknownOp) {
  EXPECT_ERROR(parse_description(R"({"ops": [{"op": "softmax"}]})"), c10::ValueError,
               "op: expected one of ", "got \"softmax\"");
}

TEST(DescriptionErrors, WrongParameterCount) {
  EXPECT_ERROR(parse({R"(layer_norm {"params": [0]})"}), c10::ValueError,
               "0.layer_norm: expected 2 parameters, got 1",
               "Give the position of each in the parameter list");
}

TEST(DescriptionErrors, WrongNumberOfBindings) {
  EXPECT_ERROR(parse({R"(add_extra_input {"extra_inputs": []})"}), c10::ValueError,
               "0.add_extra_input: expected 1 entries in \"extra_inputs\", got 0",
               "Give one per slot, null where it is unbound");
}

TEST(DescriptionErrors, NumberOfAModule) {
  const auto with = [](const char* module) {
    parse({"gelu", R"(basic_linear {"state": {"module": )" + std::string(module) +
                       R"(, "forward": 0, "backward": 0}})"});
  };
  EXPECT_NO_THROW(with("1"));
  for (const char* module : {"2", "131072"})
    EXPECT_ERROR(with(module), c10::ValueError,
                 "1.basic_linear: expected the number of a module below that of the ops, ",
                 "2, in \"state\", got " + std::string(module), "Number them from 0.");
}

TEST(DescriptionErrors, ChannelWithTwoProducers) {
  const std::string output = R"(make_extra_output {"extra_outputs": [{"channel": "r"}]})";
  EXPECT_ERROR(parse({output, "gelu", output}), c10::ValueError, "channel \"r\"",
               "\": expected one producer, got multiple producers, op ", "op 0 and op 2",
               "Rename one of the channels");
}

TEST(DescriptionErrors, ChannelWithoutProducer) {
  EXPECT_ERROR(parse({from_channel()}), c10::ValueError,
               "channel \"r\": expected a producer before op 0",
               ", but it has no producer, got only its reader", "set_extra_output_channel");
}

TEST(DescriptionErrors, ChannelWithoutEarlierProducer) {
  EXPECT_ERROR(
      parse({from_channel(), R"(make_extra_output {"extra_outputs": [{"channel": "r"}]})"}),
      c10::ValueError, "channel \"r\": expected a producer before op 0",
      ", but it has no earlier producer, got op 1", "Move the producer to the front");
}

TEST(DescriptionErrors, BadOptions) {
  EXPECT_ERROR(parse({R"(gelu {"options": {"tanh": true}})"}), c10::ValueError,
               "gelu: expected one of []", "got \"tanh\"", "Remove it");
  EXPECT_ERROR(parse({R"(gelu {"options": [1]})"}), c10::ValueError,
               "gelu: expected a JSON object, got [1]", "Pass {} for the defaults");
  EXPECT_ERROR(parse({R"(rms_norm {"options": {"eps": "small"}})"}), c10::ValueError,
               "rms_norm: expected option eps to be a finite number >= 0, got \"small\". eps: "
               "added inside the square root.");
  EXPECT_ERROR(parse({R"(rms_norm {"options": {"eps": -1.0}})"}), c10::ValueError,
               "eps to be a finite number >= 0, got -1");
  EXPECT_ERROR(parse({R"(rms_norm {"options": {"zero_centered_gamma": 1}})"}), c10::ValueError,
               "rms_norm: expected option zero_centered_gamma to be true or false, got 1");
  EXPECT_ERROR(parse({R"(dropout {"options": {"p": 2}})"}), c10::ValueError,
               "dropout: expected option p to be a number from 0 to 1, got 2",
               "p: the share that becomes zero");
  EXPECT_ERROR(parse({R"(reshape {"options": {"shape": [1.5]}})"}), c10::ValueError,
               "reshape: expected option shape to be true, false, a number, a text or a list of "
               "whole numbers, got [1.5]");
  for (const char* shape : {"[-1, -1]", "[-2]", "[4294967296, 4294967296]", "3"})
    EXPECT_ERROR(parse({R"(reshape {"options": {"shape": )" + std::string(shape) + "}}"}),
                 c10::ValueError,
                 "reshape: expected option shape to be at most 64 sizes >= 0, one of which may be "
                 "-1, of a product below 2^63");
}

TEST(DescriptionErrors, UnknownRecipe) {
  EXPECT_ERROR(parse({"gelu"}, R"({"recipe": {"name": "MXFP4"}})"), c10::ValueError,
               "\"CustomRecipe\", got \"MXFP4");
}

TEST(DescriptionErrors, RecipeFields) {
  const auto recipe = [](const std::string& fields) {
    parse({"gelu"}, R"({"recipe": {"name": "Float8CurrentScaling", )" + fields + "}}");
  };
  EXPECT_ERROR(parse({"gelu"}, R"({"recipe": "Float8CurrentScaling"})"), c10::ValueError,
               "recipe: expected a JSON object, got \"Float8");
  EXPECT_ERROR(recipe(R"("power": 2)"), c10::ValueError,
               "Float8CurrentScaling: expected one of [\"use_power_2_scales\",", "got \"power\"");
  EXPECT_ERROR(recipe(R"("fp8_format": "E5M2")"), c10::ValueError,
               "Float8CurrentScaling: expected option fp8_format to be one of \"HYBRID\", "
               "\"E4M3\", got \"E5M2\"");
  EXPECT_ERROR(recipe(R"("use_power_2_scales": 1)"), c10::ValueError,
               "expected option use_power_2_scales to be true or false, got 1");
  EXPECT_ERROR(recipe(R"("amax_epsilon_weight": -1)"), c10::ValueError,
               "expected option amax_epsilon_weight to be a finite number >= 0, got -1. "
               "amax_epsilon_weight: the least amax");
  EXPECT_ERROR(recipe(R"("amax_epsilon_input": [0])"), c10::ValueError,
               "expected option amax_epsilon_input to be a finite number >= 0, got [0]");
}

TEST(DescriptionErrors, AreThoseOfAPipelineToo) {
  EXPECT_ERROR(Pipeline(R"([{"op": "identity", "options": )" + nested(100'000) + "}]"),
               c10::ValueError, "description: expected lists and objects at most 64 deep");
  EXPECT_ERROR(Pipeline("[1e999]"), c10::ValueError, "description: expected JSON, got ");
}

}  // namespace
}  // namespace tandem::testing::planner_description
