#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <variant>
#include <vector>

#include "gpt_layers.h"
#include "program/bounds.h"

namespace tandem::apps {

/// All options of `tandem train`. `make run` trains with these defaults.
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
  // the surroundings, which do not change results
  int64_t threads = 0;
  int64_t log_every = 5;
  int64_t checkpoint_every = 100;
  std::string out = "out";
  /// Whether to measure, in the logged steps, what quantizing loses, and to show it in the report.
  bool inspect = false;

  GptConfig gpt() const { return {layers, hidden, heads, context}; }
  std::vector<std::string> run_names() const;
  int64_t step_tokens() const { return batch * context; }
};

/// One option of `tandem train`.
struct TrainOption {
  enum class Kept {
    /// A checkpoint does not keep it.
    no,
    /// A checkpoint keeps it, and resuming may change it: results do not depend on it.
    freely,
    /// A checkpoint keeps it, and resuming must not change it.
    fixed,
  };

  /// The name without dashes.
  const char* name;
  std::variant<int64_t TrainOptions::*, double TrainOptions::*, std::string TrainOptions::*> field;
  /// The bounds on the command line and in a checkpoint.
  Bounds bounds;
  Kept kept;
  const char *group, *help;
};

/// All options, in the order of the help text.
const std::vector<TrainOption>& train_options();

/// The values by option name on which the results of a training depend. A checkpoint holds them.
nlohmann::json configuration_of(const TrainOptions& options);

/// `options` with its configuration replaced by that of a checkpoint. The options in `given` must
/// agree with the checkpoint.
///
/// Throws: UserError that names the first option which differs or is out of its bounds (tests
///         test_mismatched_checkpoint, test_checkpoint_is_held_to_the_bounds_of_options).
TrainOptions with_configuration(TrainOptions options, const nlohmann::json& configuration,
                                const std::vector<std::string>& given);

/// Replaces values that the machine decides (`auto`, 0 threads, the text), and checks what options
/// demand of each other.
TrainOptions resolved(TrainOptions options);

}  // namespace tandem::apps
