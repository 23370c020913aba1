#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint.h"
#include "out_folder.h"
#include "program/errors.h"
#include "program/options.h"
#include "program/output.h"
#include "train_options.h"
#include "train_session.h"

namespace tandem::apps {

namespace {

constexpr const char* kTrainDescription =
    "Train a byte-level GPT on a text three times from the same start: with libtorch's own modules "
    "(plain), with Tandem\n"
    "pipelines (tandem), and with Tandem pipelines in emulated FP8 (fp8). Compares loss, speed and "
    "memory.";

constexpr const char* kTrainFooter =
    "Writes into --out: metrics.jsonl, report.html, model-RUN.safetensors, checkpoint.json with "
    "its tensors, and\n"
    "tandem-files.json, which lists them: no other file there is replaced or removed.\n"
    "Ctrl-C, SIGTERM and SIGHUP save and stop; --resume goes on, with bit for bit the same "
    "numbers on as many threads.\n\n"
    "Examples:\n"
    "  tandem train                                      three runs of the default model, some "
    "minutes\n"
    "  tandem train --runs fp8 --layers 6 --steps 1000   one longer run of a larger model\n"
    "  tandem train --text notes.txt --out notes         a text of your own\n"
    "  tandem train --resume --out notes                 go on where it stopped";

struct TrainArguments {
  /// The parser, which knows which options were given.
  const CLI::App* app = nullptr;
  TrainOptions options;
  bool resume = false;
  bool json = false;
};

int train(const TrainArguments& arguments) {
  TrainOptions options = arguments.options;
  std::optional<OutFolder> out;
  nlohmann::json state;
  if (arguments.resume) {
    out.emplace(options.out, OutFolder::Missing::refuse);
    state = load_checkpoint_state(out->path());
    out->recognize(kCheckpointName);  // its own checksum proves that Tandem wrote it
    if (!state.contains("configuration")) state["configuration"] = nlohmann::json::object();
    options = with_configuration(options, state["configuration"], given_options(*arguments.app));
  }
  TrainSession session(options, /*quiet=*/arguments.json);
  if (!out) out.emplace(session.out(), OutFolder::Missing::create);
  out->require_free(session.file_names());
  std::error_code error;
  if (arguments.resume) {
    session.resume(*out, state);
  } else if (!arguments.json && std::filesystem::exists(out->path() / kCheckpointName, error)) {
    std::fprintf(stderr,
                 "tandem train: starting again; the checkpoint in %s will be replaced (--resume "
                 "would go on with it).\n",
                 options.out.c_str());
  }
  if (!arguments.json) std::fprintf(stderr, "%s\n", session.title().c_str());
  const bool finished = session.run(*out);
  if (!finished)
    std::fprintf(stderr, "tandem train: stopped and saved. Go on with: %s\n",
                 session.resume_command().c_str());
  if (arguments.json) {
    print(session.document(finished).dump(1) + "\n");
  } else if (finished) {
    print("\n" + session.summary());
  }
  return finished ? kExitOk : kExitInterrupted;
}

void add_options(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<TrainArguments>();
  action = [arguments] { return train(*arguments); };
  arguments->app = &app;
  for (const TrainOption& option : train_options()) {
    const std::string name = std::string("--") + option.name;
    std::visit(
        [&](auto field) {
          add_option(app, name, arguments->options.*field, option.bounds, option.help,
                     option.group);
        },
        option.field);
  }
  add_flag(app, "--resume", arguments->resume,
           "go on from the checkpoint in --out; options left out come from it", "Files");
  add_flag(app, "--inspect", arguments->options.inspect,
           "measure what quantizing does to each tensor in the steps that are logged, for the "
           "report; warn where one saturates",
           "Files");
  add_flag(app, "--json", arguments->json, "print one JSON document instead of progress and table",
           "Files");
}

}  // namespace

}  // namespace tandem::apps

int main(int argc, char** argv) {
  using namespace tandem::apps;
  return run_program({"tandem train", kTrainDescription, kTrainFooter, add_options}, argc, argv);
}
