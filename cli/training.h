#pragma once

#include <torch/optim/adamw.h>

#include <cstdint>
#include <optional>
#include <string>

#include "gpt.h"
#include "tandem/recipe.h"
#include "text_data.h"
#include "train_options.h"

namespace tandem::cli {

struct StepMetrics {
  double bits_per_byte, gradient_norm, learning_rate, seconds;
};

/// One run: a model, its optimizer and the text. Runs differ in what computes; batches and initial
/// parameters are the same.
///
/// With bfloat16, the optimizer works on float32 copies of the parameters: updates are smaller than
/// bfloat16 can add.
class Training {
 public:
  Training(const TrainOptions& options, const std::string& run, const TextData& text);

  StepMetrics step(int64_t index);
  double validation_bits_per_byte();
  /// Bytes kept between forward and backward, parameters aside, for each byte of text in a batch.
  double saved_bytes_per_token();
  std::string sample(int64_t length);
  std::string plan_svg() { return model_.plan_svg(); }
  /// The model, for who watches what quantizing does.
  Gpt& model() { return model_; }

  /// float32 parameters by name.
  NamedTensors parameters() const;
  /// Parameters, both moments of each, the state of the recipe, and that of the random generator.
  NamedTensors state() const;
  /// Goes on from `state` after `steps` steps. Throws: UserError for other names or shapes (test
  /// test_mismatched_checkpoint).
  void restore(const NamedTensors& state, int64_t steps);

 private:
  at::Tensor loss(const Batch& batch);
  at::Tensor forward(const at::Tensor& bytes);
  double learning_rate(int64_t step) const;
  torch::optim::AdamW make_optimizer() const;

  const TrainOptions& options_;
  const TextData& text_;
  const std::optional<Recipe> recipe_;
  Gpt model_;
  /// What the optimizer sees: the parameters, or float32 copies of them.
  std::vector<at::Tensor> masters_;
  torch::optim::AdamW optimizer_;
};

}  // namespace tandem::cli
