#include "train_options.h"

#include <ATen/Parallel.h>
#include <ATen/cpu/Utils.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "program/errors.h"
#include "program/files.h"
#include "program/recipes.h"
#include "program/strings.h"

namespace tandem::apps {

namespace {

using nlohmann::json;

/// The runs that exist: without Tandem, with it, in a given dtype, and under each recipe.
const std::vector<std::string> kRuns = [] {
  std::vector<std::string> runs{"plain", "tandem", "float32", "bfloat16"};
  for (const std::string& name : recipe_names()) runs.push_back(name);
  return runs;
}();

/// A value in the form of the command line.
std::string written(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

/// Whether `value` has the type of the option's field and is within its bounds.
bool fits(const TrainOption& option, const json& value) {
  const bool typed = std::holds_alternative<std::string TrainOptions::*>(option.field)
                         ? value.is_string()
                         : value.is_number();
  return typed && allows(option.bounds, written(value));
}

/// Whether the processor has instructions for bfloat16 products, without which they are not
/// worthwhile.
bool has_bfloat16_products() {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto has = [&](const char* name) {
    const auto found = capabilities.find(name);
    return found != capabilities.end() && found->second.isBool() && found->second.toBool();
  };
  return has("avx512_bf16") || has("amx_bf16");
}

}  // namespace

std::vector<std::string> TrainOptions::run_names() const { return split(runs, ','); }

const std::vector<TrainOption>& train_options() {
  using enum TrainOption::Kept;
  using O = TrainOptions;
  constexpr int64_t kMost = 1'000'000'000;
  constexpr const char *kModel = "Model", *kTraining = "Training", *kFiles = "Files";
  static const std::string runs_help = "which to run, in this order: " + join(kRuns);
  static const std::vector<TrainOption> options{
      {"layers", &O::layers, Whole{1, 1000}, fixed, kModel, "transformer layers"},
      {"hidden", &O::hidden, Whole{2, 65536}, fixed, kModel, "width of the residual stream"},
      {"heads", &O::heads, Whole{1, 1024}, fixed, kModel, "attention heads"},
      {"context", &O::context, Whole{1, 65536}, fixed, kModel, "bytes that the model sees at once"},
      {"dtype", &O::dtype, Choice{{"auto", "float32", "bfloat16"}}, fixed, kModel,
       "type of all runs; auto: bfloat16 where the processor multiplies in it (the optimizer "
       "then keeps float32 copies), else float32"},
      {"text", &O::text, Text{"FILE"}, freely, kTraining,  // its content is compared
       "file to learn from (default: the King James Version that comes with Tandem)"},
      {"runs", &O::runs, Text{"LIST"}, fixed, kTraining, runs_help.c_str()},
      {"batch", &O::batch, Whole{1, 65536}, fixed, kTraining, "sequences per step"},
      {"steps", &O::steps, Whole{1, kMost}, fixed, kTraining, "steps of each run"},
      {"learning-rate", &O::learning_rate, Real{0, 10}, fixed, kTraining,
       "highest learning rate; falls along a cosine to a tenth"},
      {"warmup", &O::warmup, Whole{0, kMost}, fixed, kTraining,
       "steps before the highest learning rate"},
      {"weight-decay", &O::weight_decay, Real{0, 10}, fixed, kTraining, "of matrices, as in AdamW"},
      {"clip", &O::clip, Real{1e-6, 1e6}, fixed, kTraining,
       "largest norm of all gradients together"},
      {"seed", &O::seed, Whole{0, kMost}, fixed, kTraining,
       "decides initial parameters and batches"},
      {"threads", &O::threads, Whole{0, 1024}, freely, kTraining,
       "processor threads; 0: one per core"},
      {"out", &O::out, Text{"FOLDER"}, no, kFiles, "folder for everything that is written"},
      {"log-every", &O::log_every, Whole{1, kMost}, freely, kFiles,
       "steps between rows of metrics.jsonl"},
      {"checkpoint-every", &O::checkpoint_every, Whole{0, kMost}, no, kFiles,
       "steps between checkpoints; 0: only on Ctrl-C"},
  };
  return options;
}

json configuration_of(const TrainOptions& options) {
  json configuration = json::object();
  for (const TrainOption& option : train_options()) {
    if (option.kept == TrainOption::Kept::no) continue;
    std::visit([&](auto field) { configuration[option.name] = options.*field; }, option.field);
  }
  return configuration;
}

TrainOptions with_configuration(TrainOptions options, const json& configuration,
                                const std::vector<std::string>& given) {
  const auto adopt = [&](const TrainOption& option, auto& field) {
    const std::string name = option.name;
    const auto saved = configuration.find(name);
    if (saved == configuration.end() || !fits(option, *saved)) {
      throw UserError("expected \"" + name + "\" to be " + expected(option.bounds) +
                      " in the checkpoint's configuration, got " +
                      (saved == configuration.end() ? "none" : saved->dump()) +
                      ". Restore the checkpoint from a copy, or start again without --resume.");
    }
    const bool is_given = std::find(given.begin(), given.end(), name) != given.end();
    if (is_given && option.kept == TrainOption::Kept::fixed && *saved != json(field)) {
      throw UserError("expected --" + name + " " + written(*saved) + " as in the checkpoint, got " +
                      written(field) + ". Leave --" + name +
                      " out, or start again without --resume.");
    }
    if (!is_given) saved->get_to(field);
  };
  for (const TrainOption& option : train_options()) {
    if (option.kept == TrainOption::Kept::no) continue;
    std::visit([&](auto field) { adopt(option, options.*field); }, option.field);
  }
  return options;
}

TrainOptions resolved(TrainOptions options) {
  if (options.hidden % options.heads != 0 || options.hidden / options.heads % 2 != 0) {
    throw UserError("expected --hidden to be an even multiple of --heads, got --hidden " +
                    std::to_string(options.hidden) + " and --heads " +
                    std::to_string(options.heads) + ". Pass for example --hidden " +
                    std::to_string(32 * options.heads) + ".");
  }
  std::vector<std::string> seen;
  for (const std::string& run : options.run_names()) {
    if (std::find(kRuns.begin(), kRuns.end(), run) == kRuns.end()) {
      throw UserError("expected --runs to list some of " + join(kRuns) + ", got \"" + options.runs +
                      "\". Pass for example --runs plain,fp8.");
    }
    if (std::find(seen.begin(), seen.end(), run) != seen.end()) {
      throw UserError("expected --runs to list each run once, got \"" + options.runs +
                      "\". Leave one " + run + " out.");
    }
    seen.push_back(run);
  }
  if (options.text.empty()) options.text = default_text().string();
  if (options.dtype == "auto") options.dtype = has_bfloat16_products() ? "bfloat16" : "float32";
  if (options.threads == 0) options.threads = at::get_num_threads();
  return options;
}

}  // namespace tandem::apps
