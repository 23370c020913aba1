// explain: text, SVG, HTML and JSON of what was planned.
#include "pipeline/explain.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "pipeline/pipeline.h"
#include "support/plans.h"
#include "support/throws.h"
#include "tandem/autocast.h"

namespace tandem::testing::pipeline_explain {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Explain : public ::testing::Test {
 protected:
  void call() {
    const Tensors inputs{leaf({2, 8})},
        params{leaf({12, 8}, at::kBFloat16), leaf({12}, at::kBFloat16), leaf({3, 12})};
    pipeline_(inputs, params, true);
  }
  Pipeline pipeline_{ops_json({"basic_linear", "bias", "gelu", "basic_linear"})};
};

TEST_F(Explain, BeforeAnyCallIsAnError) {
  EXPECT_ERROR(pipeline_.explain(ExplainFormat::text), c10::ValueError,
               "explain: expected a pipeline that has run, got one without a call",
               "Run it once on the tensors that you will use");
}

TEST_F(Explain, TextSaysWhatRunsIsKeptAndFuses) {
  call();
  std::string text = pipeline_.explain(ExplainFormat::text);
  // Where the processor has no instructions for bfloat16.
  if (const size_t at = text.find("by cpu, float32"); at != std::string::npos)
    text.replace(at, 15, "by cpu, aten");
  EXPECT_EQ(
      text,
      "plan: training, with gradients, recipe none\n"
      "  forward\n"
      "    cast: x -> x as BFloat16\n"
      "    linear_bias_activation: x as BFloat16, 0.basic_linear.weight, 1.bias.bias -> "
      "1.bias.y, 2.gelu.y   [fused: 0.basic_linear + 1.bias + 2.gelu]   by cpu, aten\n"
      "    cast: 2.gelu.y -> 2.gelu.y as Float\n"
      "    basic_linear: 2.gelu.y as Float, 3.basic_linear.weight -> 3.basic_linear.y   by aten\n"
      "  kept for backward\n"
      "    3.basic_linear.weight (Float), the argument itself\n"
      "    2.gelu.y as Float (Float), 96 bytes\n"
      "    1.bias.y (BFloat16), 48 bytes\n"
      "    0.basic_linear.weight (BFloat16), the argument itself\n"
      "    x as BFloat16 (BFloat16), 32 bytes\n"
      "  backward\n"
      "    basic_linear.grad_x: grad of 3.basic_linear.y, 3.basic_linear.weight -> grad of "
      "2.gelu.y as Float\n"
      "    basic_linear.grad_weight: grad of 3.basic_linear.y, 2.gelu.y as Float -> grad of "
      "3.basic_linear.weight\n"
      "    cast: grad of 2.gelu.y as Float -> grad of 2.gelu.y\n"
      "    activation_backward_bias: grad of 2.gelu.y, 1.bias.y -> grad of 1.bias.y, grad "
      "of 1.bias.bias   [fused: 1.bias.grad_bias + 2.gelu.backward]\n"
      "    basic_linear.grad_x: grad of 1.bias.y, 0.basic_linear.weight -> grad of x as "
      "BFloat16\n"
      "    basic_linear.grad_weight: grad of 1.bias.y, x as BFloat16 -> grad of "
      "0.basic_linear.weight\n"
      "    cast: grad of x as BFloat16 -> grad of x\n"
      "  fusions\n"
      "    made    linear_bias_activation at 0.basic_linear + 1.bias + 2.gelu\n"
      "              x, weight -> product (-> + bias) -> z (if demanded) -> act -> y (if demanded) "
      "(-> codes, scales, amax)\n"
      "    made    activation_backward_bias at 2.gelu.backward + 1.bias.grad_bias\n"
      "              grad_y, z -> act.backward -> grad_z, y (each if demanded); grad_z (-> sum "
      "over rows -> grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)\n"
      "kept for backward by the last call: " +
          std::to_string(2 * 12 * 4 + 2 * 12 * 2 + 2 * 8 * 2) +
          " bytes, inputs and parameters aside\n");
}

TEST_F(Explain, RefusalsAndRecipesAreThere) {
  const Tensors inputs{leaf({2, 8})}, params{leaf({12, 8}), leaf({12}, at::kHalf), leaf({3, 12})};
  const Autocast region;
  pipeline_(inputs, params, true);
  EXPECT_THAT(
      pipeline_.explain(ExplainFormat::text),
      AllOf(HasSubstr("\"name\":\"Float8CurrentScaling\""), HasSubstr("x in fp8_e4m3 (fp8_e4m3)"),
            HasSubstr("refused linear_bias_activation at 0.basic_linear + 1.bias + 2.gelu: the "
                      "bias is Half and the product Float")));
}

TEST_F(Explain, JsonIsTheSameDocument) {
  call();
  const auto document = nlohmann::json::parse(pipeline_.explain(ExplainFormat::json));
  const auto& plan = document.at("plans").at(0);
  EXPECT_EQ(document.at("saved_bytes"), pipeline_.saved_bytes());
  EXPECT_EQ(plan.at("forward").size(), 4u);
  EXPECT_EQ(plan.at("forward").at(1).at("covers"),
            nlohmann::json({"0.basic_linear", "1.bias", "2.gelu"}));
  EXPECT_EQ(plan.at("kept").at(0).at("costs_memory"), false);
  EXPECT_TRUE(plan.at("fusions").at(0).at("made").get<bool>());
}

TEST_F(Explain, SvgAndHtmlArePicturesOfIt) {
  call();
  const std::string svg = pipeline_.explain(ExplainFormat::svg);
  EXPECT_THAT(svg, AllOf(::testing::StartsWith("<svg xmlns="), ::testing::EndsWith("</svg>"),
                         HasSubstr("linear_bias_activation"), HasSubstr("class=\"fused\""),
                         HasSubstr("1.bias.y")));
  const std::string html = pipeline_.explain(ExplainFormat::html);
  EXPECT_THAT(html, AllOf(::testing::StartsWith("<div><svg"), HasSubstr("<pre>plan: training"),
                          HasSubstr("-&gt; 2.gelu.y as Float"), Not(HasSubstr("-> 2.gelu.y"))));
}

TEST_F(Explain, PicturesShowWhatIsKeptWhatWasReplacedAndTimes) {
  call();
  const StepTimes times{{"linear_bias_activation", 12.5}, {"basic_linear.grad_weight", 3}};
  const std::string svg = pipeline_.explain(ExplainFormat::svg, times);
  EXPECT_THAT(
      svg, AllOf(HasSubstr("replaces 0.basic_linear + 1.bias + 2.gelu"),
                 HasSubstr("class=\"kept\""), HasSubstr(">BFloat16, 48 B<"), HasSubstr(">12.5 us<"),
                 HasSubstr(">3.00 us<"), HasSubstr("with 0.basic_linear.weight BFloat16")));
  EXPECT_THAT(pipeline_.explain(ExplainFormat::svg), Not(HasSubstr(" us<")));
  const std::string dot = pipeline_.explain(ExplainFormat::dot, times);
  EXPECT_THAT(dot,
              AllOf(::testing::StartsWith("digraph plan {"), ::testing::EndsWith("}\n"),
                    HasSubstr("subgraph cluster_forward"), HasSubstr("subgraph cluster_backward"),
                    HasSubstr("replaces 0.basic_linear + 1.bias + 2.gelu"), HasSubstr("12.5 us"),
                    HasSubstr("label=\"x as BFloat16\\nBFloat16\"")));
  // Forward's linear_bias_activation is f1, the activation's backward b3: z is kept in between.
  EXPECT_THAT(dot, HasSubstr("f1 -> b3 [constraint=false, style=dashed, color=\"#c98a1b\", "
                             "penwidth=1.4, label=\"1.bias.y\\nBFloat16, 48 B\"]"));
  EXPECT_THAT(dot, HasSubstr("p2 -> b0 [constraint=false, style=dashed, color=\"#c4c9d4\"]"));
  EXPECT_THAT(dot, HasSubstr("b2 -> b0 [dir=back")) << "backward goes up";
}

TEST_F(Explain, APlanWithoutBackwardHasNone) {
  const Tensors inputs{random({2, 8})}, params{random({12, 8}), random({12}), random({3, 12})};
  pipeline_(inputs, params, false);
  EXPECT_THAT(
      pipeline_.explain(ExplainFormat::text),
      AllOf(HasSubstr("plan: evaluation, without gradients"), Not(HasSubstr("backward\n"))));
  EXPECT_THAT(pipeline_.explain(ExplainFormat::svg), HasSubstr("linear_bias_activation"));
}

TEST_F(Explain, PlansOfOtherPipelinesOfTheSameOpsAreNotShown) {
  call();
  Pipeline other(ops_json({"basic_linear", "bias", "gelu", "basic_linear"}));
  const Tensors inputs{random({2, 8})}, params{random({12, 8}), random({12}), random({3, 12})};
  other(inputs, params, true);
  EXPECT_THAT(other.explain(ExplainFormat::text),
              AllOf(HasSubstr("without gradients"), Not(HasSubstr("with gradients"))));
  EXPECT_THAT(pipeline_.explain(ExplainFormat::text), Not(HasSubstr("without gradients")));
}

TEST(ExplainImplementations, AForeignSideInputTurnsOffTheKernelOfItsStepAlone) {
  for (const auto foreign : {at::kDouble, at::kLong, at::kBool}) {
    Pipeline pipeline(ops_json(
        {"rms_norm", "basic_linear", "add_extra_input", "layer_norm", "basic_linear", "gelu"}));
    const Tensors inputs{leaf({4, 8}), random({4, 8}, at::kFloat, 2).to(foreign)},
        params{leaf({8}), leaf({8, 8}), leaf({8}), leaf({8}), leaf({8, 8})};
    pipeline(inputs, params, true)[0].sum().backward();
    const std::string text = pipeline.explain(ExplainFormat::text);
    EXPECT_THAT(
        text,
        AllOf(HasSubstr("-> 0.rms_norm.y, 0.rms_norm.inv_rms   by cpu\n"),
              HasSubstr("-> 2.add_extra_input.y   [fused: 1.basic_linear + 2.add_extra_input]   "
                        "by reference, aten\n"),
              HasSubstr("-> 3.layer_norm.y, 3.layer_norm.mean, 3.layer_norm.inv_std   by "
                        "cpu\n"),
              HasSubstr("-> 4.basic_linear.y, 5.gelu.y   [fused: 4.basic_linear + 5.gelu]   by "
                        "cpu, aten\n")));
    const std::string backward = text.substr(text.find("  backward\n"));
    EXPECT_THAT(backward, AllOf(HasSubstr("   by cpu\n"), HasSubstr("   by aten\n"),
                                Not(HasSubstr("reference"))));
  }
}

TEST(ExplainImplementations, OfAProductAndWhatIsFusedToIt) {
  Pipeline pipeline(ops_json({"basic_linear", "bias", "add_extra_input"}));
  const Tensors inputs{random({4, 8}), random({4, 8}, at::kDouble, 2)},
      params{random({8, 8}), random({8})};
  pipeline(inputs, params, true);
  EXPECT_THAT(pipeline.explain(ExplainFormat::text), HasSubstr("by reference, aten\n"));
  const auto document = nlohmann::json::parse(pipeline.explain(ExplainFormat::json));
  EXPECT_EQ(document.at("plans").at(0).at("forward").at(0).at("implementations"),
            nlohmann::json({"reference", "aten"}));
  EXPECT_THAT(pipeline.explain(ExplainFormat::svg),
              HasSubstr("linear_bias_add by reference, aten"));
}

TEST(ExplainImplementations, OfProductsOfNumbersThatNoKernelKnows) {
  Pipeline pipeline(ops_json({"gelu", "basic_linear"}));
  const Tensors inputs{random({4, 8}, at::kDouble)}, params{random({8, 8}, at::kDouble)};
  pipeline(inputs, params, true);
  EXPECT_THAT(
      pipeline.explain(ExplainFormat::text),
      AllOf(HasSubstr("basic_linear.y   by reference\n"), HasSubstr("gelu.y   by reference\n")));
}

TEST(ExplainLabels, AreCutBetweenCharactersAndEscaped) {
  for (size_t ascii = 0; ascii < 3; ++ascii) {
    std::string label = std::string(ascii, 'a') + "\\u0001<";
    for (int i = 0; i < 40; ++i) label += "\u00e9";
    Pipeline pipeline(ops_json({R"(gelu {"label": ")" + label + R"("})", "relu"}));
    const Tensors inputs{leaf({2, 4})};
    pipeline(inputs, {}, true);
    const std::string svg = pipeline.explain(ExplainFormat::svg);
    EXPECT_NO_THROW(nlohmann::json(svg).dump()) << "no valid UTF-8: " << svg;
    EXPECT_THAT(svg, AllOf(HasSubstr("&lt;\u00e9"), Not(HasSubstr("\x01"))));
  }
}

TEST(ExplainKept, BytesAreThoseOfEachPlan) {
  Pipeline pipeline(ops_json({"gelu", "relu"}));
  const Tensors single{leaf({8, 16})}, twice{leaf({16, 16}, at::kBFloat16)};
  const auto kept = [&](size_t plan) {
    int64_t bytes = 0;
    const auto document = nlohmann::json::parse(pipeline.explain(ExplainFormat::json));
    for (const auto& value : document.at("plans").at(plan).at("kept"))
      bytes += value.at("bytes").get<int64_t>();
    return bytes;
  };
  pipeline(single, {}, true);
  pipeline(twice, {}, true);  // another plan that keeps as many bytes
  EXPECT_EQ(pipeline.saved_bytes(), 8 * 16 * 4);
  EXPECT_EQ(kept(0), 8 * 16 * 4);
  EXPECT_EQ(kept(1), 8 * 16 * 4);
  const Tensors half{leaf({4, 16})};
  pipeline(half, {}, true);
  EXPECT_EQ(kept(0), 4 * 16 * 4) << "those of the last call";
  EXPECT_EQ(kept(1), 8 * 16 * 4);
}

TEST(ExplainKept, APipelineTellsWhetherItHasRun) {
  Pipeline pipeline(ops_json({"gelu"}));
  EXPECT_FALSE(pipeline.has_run());
  const Tensors inputs{random({2, 4})};
  EXPECT_THROW(pipeline(inputs, inputs, true), c10::ValueError);
  EXPECT_FALSE(pipeline.has_run());
  pipeline(inputs, {}, true);
  EXPECT_TRUE(pipeline.has_run());
}

TEST(ExplainRename, OfNoStepsAtAll) {
  Pipeline pipeline(ops_json({"identity"}));
  const Tensors inputs{leaf({2})};
  pipeline(inputs, {}, true);
  for (const auto format : {ExplainFormat::text, ExplainFormat::svg, ExplainFormat::html,
                            ExplainFormat::json, ExplainFormat::dot})
    EXPECT_FALSE(pipeline.explain(format).empty());
}

}  // namespace
}  // namespace tandem::testing::pipeline_explain
