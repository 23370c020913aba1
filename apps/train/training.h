#pragma once

#include <torch/optim/adamw.h>

#include <cstdint>
#include <optional>
#include <string>

#include "gpt.h"
#include "tandem/recipe.h"
#include "text_data.h"
#include "train_options.h"

namespace tandem::apps {

struct StepMetrics {
  double bits_per_byte, gradient_norm, learning_rate, seconds;
};

/// One run: a model, its optimizer and the text. Runs differ in what computes; their batches and
/// initial parameters are equal.
///
/// In bfloat16 the optimizer works on float32 copies of the parameters, because updates may be too
/// small to change a bfloat16 number.
class Training {
 public:
  Training(const TrainOptions& options, const std::string& run, const TextData& text);

  StepMetrics step(int64_t index);
  double validation_bits_per_byte();
  /// Bytes kept between forward and backward, without parameters, per byte of text in a batch.
  double saved_bytes_per_token();
  std::string sample(int64_t length);
  std::string plan_svg() { return model_.plan_svg(); }
  /// The model, for inspection of its quantization.
  Gpt& model() { return model_; }

  /// The float32 parameters by name.
  NamedTensors parameters() const;
  /// Parameters, both moments of each, the state of the recipe, and the state of the random
  /// generator.
  NamedTensors state() const;
  /// Continues from `state` after `steps` steps. Throws: UserError for other names or shapes (test
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
  /// The tensors that the optimizer updates: the parameters, or float32 copies of them.
  std::vector<at::Tensor> masters_;
  torch::optim::AdamW optimizer_;
};

}  // namespace tandem::apps
