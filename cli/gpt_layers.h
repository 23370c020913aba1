#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "safetensors.h"

namespace tandem::cli {

inline constexpr int64_t kVocabulary = 256;  // every byte is a token
inline constexpr double kNormEps = 1e-5, kRotaryBase = 10000;

struct GptConfig {
  int64_t layers, hidden, heads, context;

  /// Width of the MLP: 8/3 of hidden, so that its three matrices hold what two of 4 * hidden would;
  /// a multiple of 32.
  int64_t inner() const { return (8 * hidden / 3 + 31) / 32 * 32; }
};

/// x and y [batch, length, hidden].
class GptLayer {
 public:
  virtual ~GptLayer() = default;
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  /// The same names, order and shapes for every implementation.
  virtual NamedTensors parameters() = 0;
  /// The state of the recipe, made by the first call under one that has any.
  virtual NamedTensors buffers() { return {}; }
  /// What it runs as, drawn; empty without a plan.
  virtual std::string plan_svg() { return {}; }
  /// Has its pipeline tell what quantizing does, under this number; 0: not.
  virtual void watch(int64_t /*number*/) {}
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

/// The product at a place of the pipeline that a layer is: "qkv".
std::string product_of_layer(size_t op);

/// On libtorch's own modules and functions.
std::unique_ptr<GptLayer> make_plain_layer(const GptConfig& config, at::ScalarType dtype);
std::unique_ptr<GptHead> make_plain_head(const GptConfig& config, at::ScalarType dtype);

/// On Tandem pipelines.
std::unique_ptr<GptLayer> make_tandem_layer(const GptConfig& config, at::ScalarType dtype);
std::unique_ptr<GptHead> make_tandem_head(const GptConfig& config, at::ScalarType dtype);

}  // namespace tandem::cli
