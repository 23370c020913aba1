#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "safetensors.h"

namespace tandem::apps {

inline constexpr int64_t kVocabulary = 256;  // every byte is a token
inline constexpr double kNormEps = 1e-5, kRotaryBase = 10000;

struct GptConfig {
  int64_t layers, hidden, heads, context;

  /// Width of the MLP: 8/3 of hidden, rounded up to a multiple of 32. Its three matrices are then
  /// as large as two of 4 * hidden.
  int64_t inner() const { return (8 * hidden / 3 + 31) / 32 * 32; }
};

/// A layer from x to y, both [batch, length, hidden], or the head, which computes 256 logits from
/// the last layer's output.
class GptPart {
 public:
  virtual ~GptPart() = default;
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  /// Names, order and shapes are equal for all implementations.
  virtual NamedTensors parameters() = 0;
  /// The state of the recipe, created by the first call under a recipe that has state.
  virtual NamedTensors buffers() { return {}; }
  /// A picture of the plan; empty without a plan.
  virtual std::string plan_svg() { return {}; }
  /// Makes the pipeline report what quantizing loses, under this number; 0 stops that.
  virtual void watch(int64_t /*number*/) {}
};

/// The name of the product at an index in a layer's pipeline: "qkv".
std::string product_of_layer(size_t op);

/// Implementations by libtorch's own modules and functions.
std::unique_ptr<GptPart> make_plain_layer(const GptConfig& config, at::ScalarType dtype);
std::unique_ptr<GptPart> make_plain_head(const GptConfig& config, at::ScalarType dtype);

/// Implementations by Tandem pipelines.
std::unique_ptr<GptPart> make_tandem_layer(const GptConfig& config, at::ScalarType dtype);
std::unique_ptr<GptPart> make_tandem_head(const GptConfig& config, at::ScalarType dtype);

}  // namespace tandem::apps
