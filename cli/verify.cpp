#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "commands.h"
#include "errors.h"
#include "output.h"
#include "pipeline_syntax.h"

namespace tandem::cli {

namespace {

constexpr const char* kVerifyExamples =
    "\nExits with 0 if all agrees, with 1 if something differs.\n\n"
    "Examples:\n"
    "  tandem verify rms_norm:256 linear:256:1408 swiglu linear:704:256\n"
    "  tandem verify layer_norm:64 linear:64:256 gelu --recipe fp8 --rows 7";

struct VerifyArguments {
  PipelineArguments pipeline;
  bool json = false;
};

int verify_pipeline(const VerifyArguments& arguments) {
  Workload workload = make_workload(arguments.pipeline);
  std::optional<Autocast> region;
  if (workload.recipe) region.emplace(true, *workload.recipe);
  const VerifyReport report = verify(workload.pipeline, workload.x, workload.extra_inputs);
  if (arguments.json) {
    const nlohmann::json document{{"command", "verify"},
                                  {"pipeline", arguments.pipeline.words},
                                  {"recipe", arguments.pipeline.recipe},
                                  {"passed", report.passed},
                                  {"text", report.text}};
    print(document.dump(1) + "\n");
  } else {
    print(report.text + (report.text.ends_with('\n') ? "" : "\n") +
          (report.passed ? "passed: fused equals unfused\n"
                         : "FAILED: fused differs from unfused\n"));
  }
  return report.passed ? kExitOk : kExitFailure;
}

}  // namespace

void add_verify(CLI::App& tandem, Action& action) {
  const auto arguments = std::make_shared<VerifyArguments>();
  CLI::App& app = add_command(tandem, "verify",
                              "Run a pipeline fused and unfused, in every part, and "
                              "compare outputs, gradients and what is kept.",
                              op_list_help() + kVerifyExamples, action,
                              [arguments] { return verify_pipeline(*arguments); });
  add_pipeline_options(app, arguments->pipeline);
  add_flag(app, "--json", arguments->json, "print one JSON document");
}

}  // namespace tandem::cli
