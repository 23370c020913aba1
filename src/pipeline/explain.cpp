#include "pipeline/explain.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "pipeline/pipeline.h"
#include "planner/planner.h"
#include "quantization/recipe.h"

namespace tandem {

namespace {

using nlohmann::json;

std::string name_of(const Plan& plan, Value value) { return plan.types[index_of(value)].name; }

std::string type_of(const Plan& plan, Value value) {
  const Type& type = plan.types[index_of(value)];
  switch (type.format) {
    case Format::codes:
      return std::string(format_name(*type.quantizer)) + " (emulated)";
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

std::string joined(const std::vector<std::string>& parts, const char* separator = ", ") {
  std::string text;
  for (const auto& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

std::vector<std::string> covered(const ExplainedPlan& explained, const Step& step) {
  std::vector<std::string> parts;
  for (const Part& part : step.kind == StepKind::again ? step.repeats : step.covers) {
    const OpNode& op = explained.program->description().ops[part.op];
    const StepDef& step_def =
        (part.is_backward ? op.kind->def.backward : op.kind->def.forward)[part.nth];
    const bool is_whole = step_def.name == "forward";  // of most ops, which nobody needs to hear
    parts.push_back(op.label + (is_whole ? "" : "." + std::string(step_def.name)));
  }
  return parts;
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
          {"implementations", kernel_ops::names_in(step.taken.all())}};
}

/// Per row of the main input, as all numbers here.
json within_json(const Plan& plan) {
  static constexpr const char* kKinds[] = {"kept", "written again", "run again"};
  json result{{"bytes_per_row", plan.within->budget},
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

json plan_json(const ExplainedPlan& explained) {
  const Plan& plan = *explained.plan;
  json result{{"training", explained.training},
              {"recipe", explained.recipe},
              {"records_gradients", plan.needs_backward}};
  for (const Step& step : plan.forward) result["forward"].push_back(step_json(explained, step));
  for (size_t k = 0; k < plan.kept.size(); ++k) {
    const Value value = plan.kept[k];
    const Type& type = plan.types[index_of(value)];
    if (type.format == Format::opaque || type.format == Format::shape) continue;
    const int64_t bytes = k < explained.kept_bytes.size() ? explained.kept_bytes[k] : 0;
    result["kept"].push_back(
        {{"value", name_of(plan, value)},
         {"type", type_of(plan, value)},
         {"bytes", bytes},
         {"costs_memory", type.origin != Origin::input && type.origin != Origin::param}});
  }
  if (plan.within) result["memory_budget"] = within_json(plan);
  std::vector<Decision> decisions = plan.decisions;
  if (plan.needs_backward) {
    const auto backward = full_backward(plan);
    for (const Step& step : backward->steps)
      result["backward"].push_back(step_json(explained, step));
    decisions.insert(decisions.end(), backward->decisions.begin(), backward->decisions.end());
  }
  result["fusions"] = json::array();
  for (const Decision& decision : decisions) {
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
    text << "\n";
  }
}

/// The trade of each choice.
void print_budget(std::ostringstream& text, const json& within) {
  text << "  memory budget: " << within.at("bytes_per_row").get<double>() << " bytes per row, "
       << within.at("kept_bytes_per_row").get<double>() << " kept\n";
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
    if (plan.contains("memory_budget")) print_budget(text, plan.at("memory_budget"));
    print_steps(text, plan, "backward");
    if (!plan.at("fusions").empty()) text << "  fusions\n";
    std::set<std::string> shown;  // the picture of each once
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

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '&':
        result += "&amp;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:  // what XML does not know
        result += static_cast<unsigned char>(c) < ' ' && c != '\n' ? ' ' : c;
    }
  }
  return result;
}

/// The plan that says most: the last one with backward, else the last.
const json& plan_to_draw(const json& document) {
  const json* chosen = &document.at("plans").back();
  for (const json& plan : document.at("plans"))
    if (plan.contains("backward")) chosen = &plan;
  return *chosen;
}

/// Two columns of boxes: forward downwards, backward downwards beside it, kept values between them.
std::string as_svg(const json& document) {
  constexpr int kWidth = 320, kBox = 52, kGap = 22, kLeft = 20, kMiddle = 190, kTop = 60;
  const json& plan = plan_to_draw(document);
  const auto count = [&](const char* field) {
    return plan.contains(field) ? static_cast<int>(plan.at(field).size()) : 0;
  };
  const int rows = std::max({count("forward"), count("backward"), (count("kept") + 2) / 3, 1});
  const int height = kTop + rows * (kBox + kGap) + 20, right = kLeft + kWidth + kMiddle,
            width = right + kWidth + 20;
  std::ostringstream svg;
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << width << ' ' << height
      << "\" width=\"" << width << "\" height=\"" << height
      << "\" font-family=\"sans-serif\" "
         "font-size=\"12\"><style>.box{fill:#eef3fb;stroke:#4a6fa5}.fused{fill:#e3f4e4;stroke:#"
         "3d8b40}"
      << ".t{fill:#1b1b1b}.s{fill:#555;font-size:10px}.h{fill:#777;font-size:14px}.a{stroke:#888;"
         "marker-end:url(#m)}</style>"
      << "<defs><marker id=\"m\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" "
         "markerHeight=\"7\" orient=\"auto\">"
      << "<path d=\"M0 0L8 4L0 8z\" fill=\"#888\"/></marker></defs>";
  const auto label = [&](int x, int y, const char* style, std::string text, size_t most) {
    if (text.size() > most) {
      size_t end = most - 3;
      while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80)
        --end;  // within a character of UTF-8
      text = text.substr(0, end) + "...";
    }
    svg << "<text class=\"" << style << "\" x=\"" << x << "\" y=\"" << y << "\">" << escaped(text)
        << "</text>";
  };
  label(kLeft, 30, "h", "forward", 40);
  label(right, 30, "h", "backward", 40);
  label(kLeft + kWidth + 20, 30, "h", "kept", 40);
  const auto column = [&](const char* direction, int x) {
    for (int i = 0; i < count(direction); ++i) {
      const json& step = plan.at(direction)[static_cast<size_t>(i)];
      const int y = kTop + i * (kBox + kGap);
      svg << "<rect class=\"" << (step.at("fused").get<bool>() ? "fused" : "box") << "\" x=\"" << x
          << "\" y=\"" << y << "\" width=\"" << kWidth << "\" height=\"" << kBox << "\" rx=\"6\"/>";
      const std::string taken = joined(step.at("implementations"));
      label(x + 10, y + 18, "t",
            step.at("kind").get<std::string>() + (taken.empty() ? "" : " by " + taken), 46);
      label(x + 10, y + 32, "s", "reads " + joined(step.at("reads")), 52);
      label(x + 10, y + 45, "s", "writes " + joined(step.at("writes")), 52);
      if (i > 0)
        svg << "<line class=\"a\" x1=\"" << x + kWidth / 2 << "\" y1=\"" << y - kGap << "\" x2=\""
            << x + kWidth / 2 << "\" y2=\"" << y << "\"/>";
    }
  };
  column("forward", kLeft);
  column("backward", right);
  for (int i = 0; i < count("kept"); ++i) {
    const json& kept = plan.at("kept")[static_cast<size_t>(i)];
    label(kLeft + kWidth + 12, kTop + 14 + i * 24, "s", kept.at("value"), 32);
    label(kLeft + kWidth + 12, kTop + 25 + i * 24, "s",
          kept.at("costs_memory").get<bool>() ? kept.at("type").get<std::string>() : "the argument",
          32);
  }
  svg << "</svg>";
  return svg.str();
}

}  // namespace

ExplainedPlan explained(std::shared_ptr<const Plan> plan, const Program& program) {
  const Description& description = program.description();
  return {std::move(plan),
          &program,
          description.training,
          description.recipe ? to_json(*description.recipe).dump() : "none",
          {}};
}

std::vector<std::string> fusions_in(const std::vector<std::shared_ptr<const Plan>>& plans) {
  std::set<std::string> names;
  const auto collect = [&](const std::vector<Decision>& decisions) {
    for (const Decision& decision : decisions)
      if (decision.reason.empty()) names.insert(decision.fusion);
  };
  for (const auto& plan : plans) {
    collect(plan->decisions);
    if (plan->needs_backward) collect(full_backward(*plan)->decisions);
  }
  return {names.begin(), names.end()};
}

std::string explain(const std::vector<ExplainedPlan>& plans, std::optional<int64_t> saved_bytes,
                    ExplainFormat format) {
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
      return as_svg(document);
    case ExplainFormat::html:
      return "<div>" + as_svg(document) + "<pre>" + escaped(as_text(document)) + "</pre></div>";
    case ExplainFormat::json:
      return document.dump(2);
  }
  return "";
}

}  // namespace tandem
