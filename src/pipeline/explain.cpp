#include "pipeline/explain.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>

#include "kernel_ops/weights/weights.h"
#include "pipeline/picture.h"
#include "pipeline/pipeline.h"
#include "planner/planner.h"
#include "planner/value_set.h"
#include "quantization/recipe.h"

namespace tandem {

namespace {

using nlohmann::json;

std::string name_of(const Plan& plan, Value value) { return plan.types[index_of(value)].name; }

std::string type_of(const Plan& plan, Value value) {
  const Type& type = plan.types[index_of(value)];
  switch (type.format) {
    case Format::codes:
      return std::string(format_name(*type.quantizer));
    case Format::shape:
      return "shape";
    case Format::opaque:
      return "opaque";
    default:
      return c10::toString(type.dtype);
  }
}

std::vector<std::string> names(const Plan& plan, const Values& values) {
  std::vector<std::string> result;
  for (const Value value : values)
    if (exists(value)) result.push_back(name_of(plan, value));
  return result;
}

std::vector<std::string> covered(const ExplainedPlan& explained, const Step& step) {
  std::vector<std::string> parts;
  for (const Part& part : step.kind == StepKind::again ? step.repeats : step.covers) {
    const OpNode& op = explained.program->description().ops[part.op];
    const StepDef& step_def =
        (part.is_backward ? op.kind->def.backward : op.kind->def.forward)[part.nth];
    const bool is_whole = step_def.name == "forward";  // most ops have one whole forward
    parts.push_back(op.label + (is_whole ? "" : "." + std::string(step_def.name)));
  }
  return parts;
}

/// The numbers of the values, which are unique while names are not; null for an absent value.
json ids(const Values& values, bool with_absent = false) {
  json result = json::array();
  for (const Value value : values) {
    if (exists(value)) result.push_back(index_of(value));
    if (!exists(value) && with_absent) result.push_back(nullptr);
  }
  return result;
}

json step_json(const ExplainedPlan& explained, const Step& step) {
  const Plan& plan = *explained.plan;
  return {{"kind", step.name},
          {"fused", step.kind == StepKind::fused},
          {"again", step.kind == StepKind::again},
          {"covers", covered(explained, step)},
          {"reads", names(plan, step.reads)},
          {"writes", names(plan, step.writes)},
          {"mutates", names(plan, step.mutates)},
          {"read_ids", ids(step.reads)},
          {"write_ids", ids(step.writes)},
          {"mutated_ids", ids(step.mutates)},
          {"implementations", kernel_ops::names_in(step.taken.all())},
          {"emulated", kernel_ops::reasons_in(step.taken.all())}};
}

/// The choices under a budget. All numbers are per row of the main input.
json within_json(const Plan& plan) {
  static constexpr const char* kKinds[] = {"kept", "written again", "run again"};
  const auto& budget = plan.within->budget;
  json result{{"bytes_per_row", budget ? json(*budget) : json()},
              {"kept_bytes_per_row", plan.within->kept},
              {"choices", json::array()}};
  for (const KeptChoice& choice : plan.within->choices)
    result["choices"].push_back({{"value", name_of(plan, choice.value)},
                                 {"type", type_of(plan, choice.value)},
                                 {"choice", kKinds[choice.kind]},
                                 {"by", choice.by},
                                 {"bytes", choice.bytes},
                                 {"added_bytes", choice.added_bytes},
                                 {"added_operations", choice.added_flops}});
  return result;
}

/// How the last call obtained the codes of each weight.
json weights_json(const ExplainedPlan& explained) {
  const Plan& plan = *explained.plan;
  json result = json::array();
  for (size_t w = 0; w < explained.stamps.size(); ++w) {
    const CachedWeight& cached = plan.cached_weights[w];
    const auto [forward, backward] = kernel_ops::last_uses(explained.stamps[w]);
    result.push_back({{"value", name_of(plan, cached.weight)},
                      {"quantizer", cached.quantizer->text},
                      {"forward", kernel_ops::text_of(forward)},
                      {"backward", kernel_ops::text_of(backward)}});
  }
  return result;
}

/// Adds the weights that have no workspace, from the steps that quantize them in each call.
class WeightsOfEachCall {
 public:
  WeightsOfEachCall(const ExplainedPlan& explained, json& weights)
      : plan_(*explained.plan),
        description_(explained.program->description()),
        weights_(weights),
        is_weight_(plan_.types.size(), {&plan_.params}) {
    if (!description_.recipe || is_calibrating(*description_.recipe)) return;
    look("forward", plan_.forward);
    if (plan_.needs_backward) look("backward", full_backward(plan_)->steps);
  }

 private:
  void look(const char* direction, const Steps& steps) {
    for (const Step& step : steps) {
      const bool is_weight = !step.reads.empty() && is_weight_(step.reads[0]);
      const bool quantizes =
          step.kind == StepKind::quantize || step.kind == StepKind::watched_quantize;
      const bool passes_on = step.kind == StepKind::cast || step.kind == StepKind::join ||
                             step.kind == StepKind::watched_quantize;
      if (passes_on && is_weight) is_weight_.add(step.writes);
      if (quantizes && is_weight)
        for (const Value codes : step.writes)
          if (exists(codes) && plan_.types[index_of(codes)].format == Format::codes)
            tell(direction, step.reads[0], *plan_.types[index_of(codes)].quantizer,
                 history_length(*description_.recipe) != 0 ? "in each call: the scale is the step's"
                 : description_.watched != 0               ? "in each call: it is watched"
                                                           : "in each call: it has no workspace");
      if (!step.quantizers.empty()) look_at_groups(direction, step);
    }
  }

  /// Adds weights that a product of groups quantizes itself.
  void look_at_groups(const char* direction, const Step& step) {
    const OpNode& op = description_.ops[step.covers[0].op];
    const Quantizer* const quantizer = quantizer_of(
        *description_.recipe, {.role = Role::weight, .kind = op.kind->def.name, .op = op.label});
    for (size_t read = 0; read < step.reads.size(); ++read)
      if (quantizer != nullptr && is_weight_(step.reads[read]) &&
          plan_.types[index_of(step.reads[read])].format != Format::codes &&
          step.read_names[read].find("weight") != std::string_view::npos)
        tell(direction, step.reads[read], *quantizer, "in each call: where it is multiplied");
  }

  void tell(const char* direction, Value weight, const Quantizer& quantizer, const char* why) {
    const auto [known, is_new] = told_.try_emplace(weight, weights_.size());
    if (is_new)
      weights_.push_back({{"value", name_of(plan_, weight)},
                          {"quantizer", quantizer.text},
                          {"forward", kernel_ops::text_of(kernel_ops::CodesWere::unused)},
                          {"backward", kernel_ops::text_of(kernel_ops::CodesWere::unused)}});
    weights_[known->second][direction] = why;
  }

  const Plan& plan_;
  const Description& description_;
  json& weights_;
  ValueSet is_weight_;
  std::map<Value, size_t> told_;
};

json plan_json(const ExplainedPlan& explained) {
  const Plan& plan = *explained.plan;
  json result{{"training", explained.training},
              {"recipe", explained.recipe},
              {"records_gradients", plan.needs_backward},
              {"inputs", ids(plan.inputs)},
              {"params", ids(plan.params)},
              {"outputs", ids(plan.outputs)},
              {"output_gradients", ids(plan.output_gradients, true)},
              {"gradients", ids(plan.gradients, true)}};
  ValueSet used(plan.types.size(), {&plan.inputs, &plan.params, &plan.outputs, &plan.kept,
                                    &plan.output_gradients, &plan.gradients});
  const auto add_steps = [&](const char* direction, const Steps& steps) {
    for (const Step& step : steps) {
      result[direction].push_back(step_json(explained, step));
      for (const Values* values : {&step.reads, &step.writes, &step.mutates}) used.add(*values);
    }
  };
  add_steps("forward", plan.forward);
  for (size_t k = 0; k < plan.kept.size(); ++k) {
    const Value value = plan.kept[k];
    const Type& type = plan.types[index_of(value)];
    if (type.format == Format::opaque || type.format == Format::shape) continue;
    const int64_t bytes = k < explained.kept_bytes.size() ? explained.kept_bytes[k] : 0;
    result["kept"].push_back(
        {{"value", name_of(plan, value)},
         {"id", index_of(value)},
         {"type", type_of(plan, value)},
         {"bytes", bytes},
         {"costs_memory", type.origin != Origin::input && type.origin != Origin::param}});
  }
  json weights = weights_json(explained);
  WeightsOfEachCall(explained, weights);
  if (!weights.empty()) result["codes_of_weights"] = std::move(weights);
  if (plan.within) result["memory_budget"] = within_json(plan);
  if (plan.needs_backward) add_steps("backward", full_backward(plan)->steps);
  for (size_t v = 0; v < plan.types.size(); ++v)
    if (const auto value = static_cast<Value>(v); used(value))
      result["values"][std::to_string(v)] = {{"name", name_of(plan, value)},
                                             {"type", type_of(plan, value)}};
  result["fusions"] = json::array();
  for (const Decision& decision : decisions_of(plan, full_mask(plan))) {
    const json entry{{"fusion", decision.fusion},
                     {"at", decision.place},
                     {"made", decision.reason.empty()},
                     {"picture", decision.picture},
                     {"reason", decision.reason}};
    if (std::find(result["fusions"].begin(), result["fusions"].end(), entry) ==
        result["fusions"].end())
      result["fusions"].push_back(entry);
  }
  return result;
}

void print_steps(std::ostringstream& text, const json& plan, const char* direction) {
  if (!plan.contains(direction)) return;
  text << "  " << direction << "\n";
  for (const json& step : plan.at(direction)) {
    text << "    " << step.at("kind").get<std::string>() << ": " << joined(step.at("reads"))
         << " -> " << joined(step.at("writes"));
    if (!step.at("mutates").empty()) text << " (mutates " << joined(step.at("mutates")) << ")";
    if (step.at("fused").get<bool>())
      text << "   [fused: " << joined(step.at("covers"), " + ") << "]";
    if (step.at("again").get<bool>()) text << "   [run again]";
    if (!step.at("implementations").empty()) text << "   by " << joined(step.at("implementations"));
    if (!step.at("emulated").empty()) text << " (emulated: " << joined(step.at("emulated")) << ")";
    text << "\n";
  }
}

/// Prints what each choice of a budget saves and costs.
void print_budget(std::ostringstream& text, const json& within) {
  const json& budget = within.at("bytes_per_row");
  if (budget.is_null()) {
    text << "  computed again: ";
  } else {
    text << "  memory budget: " << budget.get<double>() << " bytes per row, ";
  }
  text << within.at("kept_bytes_per_row").get<double>()
       << (budget.is_null() ? " bytes per row kept\n" : " kept\n");
  for (const json& choice : within.at("choices")) {
    const auto kind = choice.at("choice").get<std::string>();
    text << "    " << kind << " " << choice.at("value").get<std::string>() << " ("
         << choice.at("type").get<std::string>() << ")";
    if (kind == "kept") {
      text << ", " << choice.at("bytes").get<double>() << " bytes\n";
      continue;
    }
    text << " by " << choice.at("by").get<std::string>() << ": saves "
         << choice.at("bytes").get<double>() << " bytes, moves "
         << choice.at("added_bytes").get<double>() << " bytes more, adds "
         << choice.at("added_operations").get<double>() << " operations\n";
  }
}

/// Prints which weights the last call quantized, and why.
void print_weights(std::ostringstream& text, const json& weights) {
  text << "  codes of weights in the last call\n";
  for (const json& weight : weights) {
    text << "    " << weight.at("value").get<std::string>() << " in "
         << weight.at("quantizer").get<std::string>() << ":";
    const char* separator = " ";
    for (const char* direction : {"forward", "backward"}) {
      const auto how = weight.at(direction).get<std::string>();
      if (how == kernel_ops::text_of(kernel_ops::CodesWere::unused)) continue;
      const bool is_found = how == kernel_ops::text_of(kernel_ops::CodesWere::found);
      text << std::exchange(separator, ", ") << (is_found ? "found" : "made") << " in " << direction
           << (is_found ? "" : " (" + how + ")");
    }
    text << "\n";
  }
}

std::string as_text(const json& document) {
  std::ostringstream text;
  for (const json& plan : document.at("plans")) {
    text << "plan: " << (plan.at("training").get<bool>() ? "training" : "evaluation") << ", "
         << (plan.at("records_gradients").get<bool>() ? "with" : "without") << " gradients, recipe "
         << plan.at("recipe").get<std::string>() << "\n";
    print_steps(text, plan, "forward");
    if (plan.contains("kept")) {
      text << "  kept for backward\n";
      for (const json& kept : plan.at("kept"))
        text << "    " << kept.at("value").get<std::string>() << " ("
             << kept.at("type").get<std::string>() << ")"
             << (kept.at("costs_memory").get<bool>() ? ", " + kept.at("bytes").dump() + " bytes"
                                                     : ", the argument itself")
             << "\n";
    }
    if (plan.contains("codes_of_weights")) print_weights(text, plan.at("codes_of_weights"));
    if (plan.contains("memory_budget")) print_budget(text, plan.at("memory_budget"));
    print_steps(text, plan, "backward");
    if (!plan.at("fusions").empty()) text << "  fusions\n";
    std::set<std::string> shown;  // each picture is shown once
    for (const json& fusion : plan.at("fusions")) {
      const auto name = fusion.at("fusion").get<std::string>();
      const bool made = fusion.at("made").get<bool>();
      text << "    " << (made ? "made    " : "refused ") << name << " at "
           << fusion.at("at").get<std::string>()
           << (made ? "" : ": " + fusion.at("reason").get<std::string>()) << "\n";
      if (made && shown.insert(name).second)
        text << "              " << fusion.at("picture").get<std::string>() << "\n";
    }
  }
  if (document.at("saved_bytes").is_null())
    text << "compiled code: its compiler chooses what is kept for backward\n";
  else
    text << "kept for backward by the last call: " << document.at("saved_bytes")
         << " bytes, inputs and parameters aside\n";
  return text.str();
}

/// The most informative plan: the last one with backward, else the last.
const json& plan_to_draw(const json& document) {
  const json* chosen = &document.at("plans").back();
  for (const json& plan : document.at("plans"))
    if (plan.contains("backward")) chosen = &plan;
  return *chosen;
}

}  // namespace

ExplainedPlan explained(std::shared_ptr<const Plan> plan, const Program& program,
                        const std::vector<std::vector<at::Tensor>>& workspaces) {
  const Description& description = program.description();
  ExplainedPlan result{std::move(plan),
                       &program,
                       description.training,
                       description.recipe ? to_json(*description.recipe).dump() : "none",
                       {}};
  for (const std::vector<at::Tensor>& given : workspaces) {
    if (given.size() != result.plan->workspaces.size()) continue;
    std::vector<at::Tensor> stamps;
    size_t next = 0;
    for (const CachedWeight& cached : result.plan->cached_weights) {
      for (size_t part = 0; part < kernel_ops::stamp_part; ++part)
        next += kernel_ops::has_part(*cached.quantizer, cached.parts, part) ? 1 : 0;
      stamps.push_back(given[next++]);
    }
    if (std::ranges::all_of(stamps, kernel_ops::is_stamp)) result.stamps = std::move(stamps);
  }
  return result;
}

std::vector<std::string> fusions_in(const std::vector<std::shared_ptr<const Plan>>& plans) {
  std::set<std::string> names;
  for (const auto& plan : plans)
    for (const Decision& decision : decisions_of(*plan, full_mask(*plan)))
      if (decision.reason.empty()) names.insert(decision.fusion);
  return {names.begin(), names.end()};
}

std::string explain(const std::vector<ExplainedPlan>& plans, std::optional<int64_t> saved_bytes,
                    ExplainFormat format, const StepTimes& times) {
  TORCH_CHECK_VALUE(!plans.empty(),
                    "explain: expected a pipeline that has run, got one without a call. Run it "
                    "once on the tensors that ",
                    "you will use: a plan depends on their dtypes and on what requires grad.");
  json document{{"saved_bytes", saved_bytes ? json(*saved_bytes) : json()},
                {"plans", json::array()}};
  for (const ExplainedPlan& plan : plans) document["plans"].push_back(plan_json(plan));
  switch (format) {
    case ExplainFormat::text:
      return as_text(document);
    case ExplainFormat::svg:
      return plan_svg(plan_to_draw(document), times);
    case ExplainFormat::dot:
      return plan_dot(plan_to_draw(document), times);
    case ExplainFormat::html:
      return "<div>" + plan_svg(plan_to_draw(document), times) + "<pre>" +
             escaped(as_text(document)) + "</pre></div>";
    case ExplainFormat::json:
      return document.dump(2);
  }
  return "";
}

}  // namespace tandem
