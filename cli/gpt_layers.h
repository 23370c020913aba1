#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "safetensors.h"

namespace tandem::cli {

inline constexpr int64_t kVocabulary = 256;  // every byte is a token
inline constexpr double kNormEps = 1e-5;

struct GptConfig {
  int64_t layers, hidden, heads, context;

  /// Width of the MLP: 8/3 of hidden, so that its three matrices hold what two of 4 * hidden would;
  /// a multiple of 32.
  int64_t inner() const { return (8 * hidden / 3 + 31) / 32 * 32; }
};

/// All of a transformer layer but the attention product itself; x and every result [batch, length,
/// ...].
class GptLayer {
 public:
  virtual ~GptLayer() = default;
  /// (query, key and value side by side [.., 3 * hidden], x for the residual)
  virtual std::pair<at::Tensor, at::Tensor> attention_in(const at::Tensor& x) = 0;
  virtual at::Tensor attention_out(const at::Tensor& attended, const at::Tensor& residual) = 0;
  virtual at::Tensor mlp(const at::Tensor& x) = 0;
  /// The same names, order and shapes for every implementation.
  virtual NamedTensors parameters() = 0;
  /// The state of the recipe, made by the first call under one that has any.
  virtual NamedTensors buffers() { return {}; }
  /// What `mlp` runs as, drawn; empty without a plan.
  virtual std::string mlp_plan_svg() { return {}; }
  /// Has its pipelines tell what quantizing does, under the numbers first, first + 1, ...; 0: none.
  virtual void watch(int64_t /*first*/) {}
};

/// What turns the last layer's output into 256 logits.
class GptHead {
 public:
  virtual ~GptHead() = default;
  virtual at::Tensor logits(const at::Tensor& x) = 0;
  virtual NamedTensors parameters() = 0;
  virtual NamedTensors buffers() { return {}; }
  virtual void watch(int64_t /*number*/) {}
};

/// Pipelines of a layer, for `watch`.
inline constexpr int64_t kPipelinesOfLayer = 3;
/// The product at a place of one of these pipelines: "qkv".
std::string product_of_layer(int64_t pipeline, size_t op);

/// On libtorch's own modules and functions.
std::unique_ptr<GptLayer> make_plain_layer(const GptConfig& config, at::ScalarType dtype);
std::unique_ptr<GptHead> make_plain_head(const GptConfig& config, at::ScalarType dtype);

/// On Tandem pipelines.
std::unique_ptr<GptLayer> make_tandem_layer(const GptConfig& config, at::ScalarType dtype);
std::unique_ptr<GptHead> make_tandem_head(const GptConfig& config, at::ScalarType dtype);

}  // namespace tandem::cli
