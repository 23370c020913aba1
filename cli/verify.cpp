#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "commands.h"
#include "errors.h"
#include "options.h"
#include "pipeline_syntax.h"

namespace tandem::cli {

namespace {

constexpr const char* kExamples =
    "\nExits with 0 if all agrees, with 1 if something differs.\n\n"
    "Examples:\n"
    "  tandem verify rms_norm:256 linear:256:1408 swiglu linear:704:256\n"
    "  tandem verify layer_norm:64 linear:64:256 gelu --recipe fp8 --rows 7";

struct Arguments {
  PipelineArguments pipeline;
  bool json = false;
};

int verify_pipeline(const Arguments& arguments) {
  Workload workload = make_workload(arguments.pipeline);
  std::optional<Autocast> region;
  if (workload.fp8) region.emplace(true, Float8CurrentScaling{});
  const VerifyReport report = verify(workload.pipeline, workload.x, workload.extra_inputs);
  if (arguments.json) {
    const nlohmann::json document{{"command", "verify"},
                                  {"pipeline", arguments.pipeline.words},
                                  {"recipe", arguments.pipeline.recipe},
                                  {"passed", report.passed},
                                  {"text", report.text}};
    std::printf("%s\n", document.dump(1).c_str());
  } else {
    std::printf(
        "%s%s%s\n", report.text.c_str(), report.text.ends_with('\n') ? "" : "\n",
        report.passed ? "passed: fused equals unfused" : "FAILED: fused differs from unfused");
  }
  return report.passed ? kExitOk : kExitFailure;
}

}  // namespace

void add_verify(CLI::App& tandem, Action& action) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App& app = *tandem.add_subcommand("verify",
                                         "Run a pipeline fused and unfused, in every part, and "
                                         "compare outputs, gradients and what is kept.");
  app.footer(op_list_help() + kExamples);
  add_pipeline_options(app, arguments->pipeline);
  app.add_flag("--json", arguments->json, "print one JSON document");
  app.callback(
      [&action, arguments] { action = [arguments] { return verify_pipeline(*arguments); }; });
}

}  // namespace tandem::cli
