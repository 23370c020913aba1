#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <variant>
#include <vector>

#include "bounds.h"
#include "gpt_layers.h"

namespace tandem::cli {

/// Everything `tandem train` can be told; these defaults are what `make run` trains.
struct TrainOptions {
  // the model
  int64_t layers = 4;
  int64_t hidden = 192;
  int64_t heads = 6;
  int64_t context = 128;
  std::string dtype = "auto";
  // the training
  int64_t batch = 8;
  int64_t steps = 500;
  int64_t warmup = 50;
  double learning_rate = 2e-3;
  double weight_decay = 0.1;
  double clip = 1.0;
  int64_t seed = 1;
  std::string runs = "plain,tandem,fp8";
  std::string text;
  // the surroundings: these change no number
  int64_t threads = 0;
  int64_t log_every = 5;
  int64_t checkpoint_every = 100;
  std::string out = "out";
  /// Measures what quantizing does in the steps that are logged, and puts it in the report.
  bool inspect = false;

  GptConfig gpt() const { return {layers, hidden, heads, context}; }
  std::vector<std::string> run_names() const;
  int64_t step_tokens() const { return batch * context; }
};

/// One option of `tandem train`.
struct TrainOption {
  enum class Kept {
    /// By no checkpoint.
    no,
    /// By a checkpoint, and may be changed when resuming: it decides no number.
    freely,
    /// By a checkpoint, and must stay as it is.
    fixed,
  };

  /// Without dashes.
  const char* name;
  std::variant<int64_t TrainOptions::*, double TrainOptions::*, std::string TrainOptions::*> field;
  /// On the command line and in a checkpoint.
  Bounds bounds;
  Kept kept;
  const char *group, *help;
};

/// All of them, in the order of the help text.
const std::vector<TrainOption>& train_options();

/// What decides the numbers of a training, by option name; a checkpoint holds it.
nlohmann::json configuration_of(const TrainOptions& options);

/// `options` with the configuration of a checkpoint in place of its own; the options in `given`
/// must agree with it.
///
/// Throws: UserError naming the first option that differs or is out of its bounds (tests
///         test_mismatched_checkpoint, test_checkpoint_is_held_to_the_bounds_of_options).
TrainOptions with_configuration(TrainOptions options, const nlohmann::json& configuration,
                                const std::vector<std::string>& given);

/// Fills what is left to the machine (`auto`, 0 threads, the text) and checks what options demand
/// of each other.
TrainOptions resolved(TrainOptions options);

}  // namespace tandem::cli
