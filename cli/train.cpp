#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint.h"
#include "commands.h"
#include "errors.h"
#include "options.h"
#include "train_options.h"
#include "train_session.h"

namespace tandem::cli {

namespace {

constexpr const char* kDescription =
    "Train a byte-level GPT on a text three times from the same start: with libtorch's own modules "
    "(plain), with Tandem\n"
    "pipelines (tandem), and with Tandem pipelines in emulated FP8 (fp8). Compares loss, speed and "
    "memory.";

constexpr const char* kFooter =
    "Writes into --out: metrics.jsonl, report.html, model-RUN.safetensors and checkpoint.json.\n"
    "Ctrl-C saves and stops; --resume goes on, with bit for bit the same numbers on as many "
    "threads.\n\n"
    "Examples:\n"
    "  tandem train                                      three runs of the default model, some "
    "minutes\n"
    "  tandem train --runs fp8 --layers 6 --steps 1000   one longer run of a larger model\n"
    "  tandem train --text notes.txt --out notes         a text of your own\n"
    "  tandem train --resume --out notes                 go on where it stopped";

struct Arguments {
  TrainOptions options;
  bool resume = false;
  bool json = false;
};

/// Long names of the options that the command line gives.
std::vector<std::string> given_options(const CLI::App& app) {
  std::vector<std::string> given;
  for (const CLI::Option* option :
       app.get_options([](const CLI::Option* o) { return o->count() > 0; })) {
    given.push_back(option->get_single_name());
  }
  return given;
}

int train(const Arguments& arguments, const std::vector<std::string>& given) {
  TrainOptions options = arguments.options;
  nlohmann::json state;
  if (arguments.resume) {
    state = load_checkpoint_state(options.out);
    if (!state.contains("configuration")) state["configuration"] = nlohmann::json::object();
    options = with_configuration(options, state["configuration"], given);
  }
  TrainSession session(options, /*quiet=*/arguments.json);
  if (arguments.resume) {
    session.resume(state);
  } else if (!arguments.json && std::filesystem::exists(checkpoint_path(options.out))) {
    std::fprintf(stderr,
                 "tandem train: starting again; the checkpoint in %s will be replaced (--resume "
                 "would go on with it).\n",
                 options.out.c_str());
  }
  if (!arguments.json) std::fprintf(stderr, "%s\n", session.title().c_str());
  const bool finished = session.run();
  if (arguments.json) {
    std::printf("%s\n", session.document(finished).dump(1).c_str());
  } else if (finished) {
    std::printf("\n%s", session.summary().c_str());
  }
  if (!finished)
    std::fprintf(stderr, "tandem train: stopped and saved. Go on with: %s\n",
                 session.resume_command().c_str());
  return finished ? kExitOk : kExitInterrupted;
}

}  // namespace

void add_train(CLI::App& tandem, Action& action) {
  const auto arguments = std::make_shared<Arguments>();
  TrainOptions& o = arguments->options;
  CLI::App& app = *tandem.add_subcommand("train", kDescription);
  app.footer(kFooter);
  constexpr int64_t kMost = 1'000'000'000;

  add_whole(app, "--layers", o.layers, 1, 1000, "transformer layers")->group("Model");
  add_whole(app, "--hidden", o.hidden, 2, 65536, "width of the residual stream")->group("Model");
  add_whole(app, "--heads", o.heads, 1, 1024, "attention heads")->group("Model");
  add_whole(app, "--context", o.context, 1, 65536, "bytes that the model sees at once")
      ->group("Model");
  add_choice(app, "--dtype", o.dtype, {"auto", "float32", "bfloat16"},
             "type of all runs; auto: bfloat16 where the processor multiplies in it (the optimizer "
             "then keeps float32 copies), else float32")
      ->group("Model");

  app.add_option("--text", o.text,
                 "file to learn from (default: the King James Version that comes with Tandem)")
      ->type_name("FILE")
      ->take_last()
      ->group("Training");
  app.add_option("--runs", o.runs, "which to run, in this order: plain, tandem, fp8")
      ->type_name("LIST")
      ->take_last()
      ->capture_default_str()
      ->group("Training");
  add_whole(app, "--batch", o.batch, 1, 65536, "sequences per step")->group("Training");
  add_whole(app, "--steps", o.steps, 1, kMost, "steps of each run")->group("Training");
  add_real(app, "--learning-rate", o.learning_rate, 0, 10,
           "highest learning rate; falls along a cosine to a tenth")
      ->group("Training");
  add_whole(app, "--warmup", o.warmup, 0, kMost, "steps before the highest learning rate")
      ->group("Training");
  add_real(app, "--weight-decay", o.weight_decay, 0, 10, "of matrices, as in AdamW")
      ->group("Training");
  add_real(app, "--clip", o.clip, 1e-6, 1e6, "largest norm of all gradients together")
      ->group("Training");
  add_whole(app, "--seed", o.seed, 0, kMost, "decides initial parameters and batches")
      ->group("Training");
  add_whole(app, "--threads", o.threads, 0, 1024, "processor threads; 0: one per core")
      ->group("Training");

  app.add_option("--out", o.out, "folder for everything that is written")
      ->type_name("FOLDER")
      ->take_last()
      ->capture_default_str()
      ->group("Files");
  add_whole(app, "--log-every", o.log_every, 1, kMost, "steps between rows of metrics.jsonl")
      ->group("Files");
  add_whole(app, "--checkpoint-every", o.checkpoint_every, 0, kMost,
            "steps between checkpoints; 0: only on Ctrl-C")
      ->group("Files");
  app.add_flag("--resume", arguments->resume,
               "go on from the checkpoint in --out; options left out come from it")
      ->group("Files");
  app.add_flag("--json", arguments->json, "print one JSON document instead of progress and table")
      ->group("Files");

  app.callback([&app, &action, arguments] {
    action = [arguments, given = given_options(app)] { return train(*arguments, given); };
  });
}

}  // namespace tandem::cli
