#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "errors.h"
#include "files.h"
#include "output.h"
#include "pipeline_syntax.h"
#include "text.h"

namespace tandem::cli {

namespace {

constexpr const char* kExplainExamples =
    "\nExamples:\n"
    "  tandem explain rms_norm:256 linear:256:1408 swiglu linear:704:256\n"
    "  tandem explain make_extra_output:residual rms_norm:256 linear:256:256 "
    "add_extra_input:residual --recipe fp8\n"
    "  tandem explain linear:256:1024 gelu linear:1024:256 --format html --output plan.html";

struct ExplainArguments {
  PipelineArguments pipeline;
  std::string format = "text";
  std::string output;
  bool json = false;
};

std::string explained(const Workload& workload, const ExplainArguments& arguments) {
  const Sequential& pipeline = workload.pipeline;
  if (arguments.format == "svg") return pipeline->explain(ExplainFormat::svg);
  if (arguments.format == "dot") return pipeline->explain(ExplainFormat::dot);
  if (arguments.format == "html") {
    return html_page("tandem explain " + join(arguments.pipeline.words, " "),
                     pipeline->explain(ExplainFormat::html));
  }
  const int64_t saved_bytes = pipeline->saved_bytes();
  if (arguments.format == "json") {
    const nlohmann::json document{
        {"command", "explain"},
        {"pipeline", arguments.pipeline.words},
        {"rows", arguments.pipeline.rows},
        {"dtype", arguments.pipeline.dtype},
        {"recipe", arguments.pipeline.recipe},
        {"saved_bytes", saved_bytes},
        {"plans", nlohmann::json::parse(pipeline->explain(ExplainFormat::json))}};
    return document.dump(1) + "\n";
  }
  std::string text = pipeline->explain(ExplainFormat::text);
  if (!text.ends_with('\n')) text += '\n';
  return text + format("kept for backward: %s, %s per row\n",
                       bytes_text(static_cast<double>(saved_bytes)).c_str(),
                       bytes_text(static_cast<double>(saved_bytes) /
                                  static_cast<double>(arguments.pipeline.rows))
                           .c_str());
}

int explain(const ExplainArguments& arguments) {
  Workload workload = make_workload(arguments.pipeline);
  backward(workload.forward());
  const std::string text = explained(workload, arguments);
  if (arguments.output.empty()) {
    print(text);
  } else {
    write_file(arguments.output, text);
  }
  return kExitOk;
}

}  // namespace

void add_explain(CLI::App& tandem, Action& action) {
  const auto arguments = std::make_shared<ExplainArguments>();
  CLI::App& app = add_command(tandem, "explain",
                              "Run a pipeline once and print its plan: steps of forward "
                              "and backward, what is kept, and which fusions were made or refused.",
                              op_list_help() + kExplainExamples, action, [arguments] {
                                if (arguments->json) arguments->format = "json";
                                return explain(*arguments);
                              });
  add_pipeline_options(app, arguments->pipeline);
  add_option(app, "--format", arguments->format, Choice{{"text", "svg", "html", "dot", "json"}},
             "of the plan");
  add_option(app, "--output", arguments->output, Text{"FILE"}, "file to write instead of printing");
  add_flag(app, "--json", arguments->json, "the same as --format json");
}

}  // namespace tandem::cli
