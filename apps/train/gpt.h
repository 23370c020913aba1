#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpt_layers.h"

namespace tandem::apps {

/// Which modules compute everything except the embedding.
enum class Modules { plain, tandem };

/// A byte-level transformer: pre-norm, rotary positions, causal attention, SwiGLU.
///
/// Shapes:  bytes int64 [batch, length], length <= context -> logits [batch, length, 256].
/// Source:  Radford et al. 2019 (GPT-2), with Su et al. 2021 (rotary, arXiv:2104.09864) and Shazeer
///          2020 (SwiGLU, arXiv:2002.05202).
class Gpt {
 public:
  Gpt(const GptConfig& config, Modules modules, at::ScalarType dtype);

  at::Tensor forward(const at::Tensor& bytes);
  /// Names, order and shapes do not depend on the modules.
  const NamedTensors& parameters() const { return parameters_; }
  /// The state of the recipe; empty before the first call under a recipe that has state.
  NamedTensors buffers() const;
  /// Normal(0, 0.02) for matrices, less for matrices that add to the residual stream; ones for
  /// norms, zeros for biases.
  void initialize(int64_t seed);
  std::string plan_svg() { return parts_.front().second->plan_svg(); }
  /// Makes all products report what quantizing loses, or stops that.
  void watch(bool on);
  /// The name of the product behind a pipeline's number and an index in it: "layers.0.qkv".
  std::string product_at(int64_t pipeline, size_t op) const;

 private:
  at::Tensor embedding_;
  /// The layers and the head, by name.
  std::vector<std::pair<std::string, std::unique_ptr<GptPart>>> parts_;
  NamedTensors parameters_;
};

/// The mean cross entropy of `targets` under `logits`, in nats; a scalar.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

/// `prompt` followed by `length` bytes, each drawn from the logits that `forward` returns for the
/// last `context` bytes.
std::string generate(const std::function<at::Tensor(const at::Tensor&)>& forward,
                     const std::string& prompt, int64_t length, int64_t context, int64_t seed);

}  // namespace tandem::apps
