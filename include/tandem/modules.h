// Modules with the arguments and parameter names of transformer_engine.pytorch, as torch::nn
// modules: each is a pipeline of ops, and there is an op of each for lists. State dicts have its
// keys.
#pragma once

#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tandem/export.h"
#include "tandem/ops.h"
#include "tandem/pipeline_module.h"

namespace tandem {

enum class Normalization : uint8_t { layer_norm, rms_norm };

/// What gradients of weights are added to, by the names of the weights, as Op::with_main_grad says.
using MainGrads = std::map<std::string, at::Tensor>;

// The structs share members and no base: designated initializers name none of a base's.

struct LinearOptions {
  bool bias = true;
  /// The bias is not added but returned.
  bool return_bias = false;
  /// Of the weight, or of each of its parts.
  Init init_method = init::normal(0.023);
  TensorParallel tensor_parallel = {};
  /// As of ops::linear.
  std::vector<std::pair<std::string, int64_t>> parameters_split = {};
  MainGrads main_grads = {};
  /// Backward leaves the gradients of weights to `backward_dw()` of the module.
  bool delay_wgrad_compute = false;
  /// As BasicLinearOptions::save_original_input.
  bool save_original_input = false;
};

struct LayerNormLinearOptions {
  /// Of the norm.
  double eps = 1e-5;
  Normalization normalization = Normalization::layer_norm;
  /// The norm's factor is 1 + weight.
  bool zero_centered_gamma = false;
  bool bias = true;
  /// The bias of the result is not added but returned.
  bool return_bias = false;
  /// The output of the norm is returned.
  bool return_layernorm_output = false;
  /// With sequence_parallel and a column-parallel product: as the rows of all ranks.
  bool return_layernorm_output_gathered = false;
  /// Of the weight, or of each of its parts.
  Init init_method = init::normal(0.023);
  TensorParallel tensor_parallel = {};
  /// As of ops::linear.
  std::vector<std::pair<std::string, int64_t>> parameters_split = {};
  MainGrads main_grads = {};
  /// Backward leaves the gradients of weights to `backward_dw()` of the module.
  bool delay_wgrad_compute = false;
};

struct LayerNormMLPOptions {
  /// Of the norm.
  double eps = 1e-5;
  Normalization normalization = Normalization::layer_norm;
  /// The norm's factor is 1 + weight.
  bool zero_centered_gamma = false;
  bool bias = true;
  /// The bias of the result is not added but returned.
  bool return_bias = false;
  /// The output of the norm is returned.
  bool return_layernorm_output = false;
  /// With sequence_parallel: as the rows of all ranks.
  bool return_layernorm_output_gathered = false;
  /// An activation or gated unit of docs/ops.md; before a gated unit there are twice as many
  /// features.
  std::string activation = "gelu";
  /// Options of that op, such as {{"limit", 5.0}} of "clamped_swiglu".
  OptionValues activation_params = {};
  /// Of the two weights.
  Init init_method = init::normal(0.023), output_layer_init_method = init::normal(0.023);
  /// Unless `mode` is none, the first product is column-parallel, the second row-parallel.
  TensorParallel tensor_parallel = {};
  MainGrads main_grads = {};
  /// Backward leaves the gradients of weights to `backward_dw()` of the module.
  bool delay_wgrad_compute = false;
  /// Backward computes the norm, the first product and the activation again, instead of having what
  /// they give kept.
  bool checkpoint = false;
};

namespace ops {

/// y = norm(x) weight^T + bias. Parameters: layer_norm_weight, layer_norm_bias (of a LayerNorm),
/// weight, bias.
///
/// Throws: c10::ValueError where return_bias is set: the next op of a list takes y alone; for sizes
///         that are not positive, or that ranks cannot share evenly; as ops::linear of the parts.
TANDEM_API Op layer_norm_linear(int64_t in_features, int64_t out_features,
                                const LayerNormLinearOptions& options = {});

/// y = activation(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias. Parameters:
/// layer_norm_weight, layer_norm_bias (of a LayerNorm), fc1_weight, fc1_bias, fc2_weight, fc2_bias.
///
/// Throws: as above; c10::ValueError for an activation that is none.
TANDEM_API Op layer_norm_mlp(int64_t hidden_size, int64_t ffn_hidden_size,
                             const LayerNormMLPOptions& options = {});

}  // namespace ops

/// What a module of products returns; undefined what it was not asked for.
struct ModuleOutputs {
  at::Tensor y;
  /// That was not added, in the dtype of y.
  at::Tensor bias;
  at::Tensor layernorm_output;
};

/// One op, with products or without.
class TANDEM_API OpModule : public PipelineModule {
 public:
  /// Its parameters have their names. A parameter that nothing in the op reads is part of the bias
  /// that `forward_all` returns.
  OpModule(const char* name, const Op& op, const at::TensorOptions& options,
           bool returns_bias = false, bool returns_norm = false);
  /// y. Throws c10::ValueError where the options ask for more: `forward_all` returns it.
  at::Tensor forward(const at::Tensor& x);
  ModuleOutputs forward_all(const at::Tensor& x);

 private:
  bool returns_bias_, returns_norm_;
  /// Those of the parts.
  std::vector<at::Tensor> biases_;
};

class TANDEM_API LinearImpl : public OpModule {
 public:
  LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& linear = {},
             const at::TensorOptions& options = {});
};

class TANDEM_API LayerNormLinearImpl : public OpModule {
 public:
  LayerNormLinearImpl(int64_t in_features, int64_t out_features,
                      const LayerNormLinearOptions& layer_norm_linear = {},
                      const at::TensorOptions& options = {});
};

class TANDEM_API LayerNormMLPImpl : public OpModule {
 public:
  LayerNormMLPImpl(int64_t hidden_size, int64_t ffn_hidden_size,
                   const LayerNormMLPOptions& layer_norm_mlp = {},
                   const at::TensorOptions& options = {});
};

/// y = x weight^T + bias, as one pipeline; in a tensor-parallel group the bias is added behind the
/// sum over ranks.
///
///   tandem::Linear qkv(h, 3 * h, {.parameters_split = {{"query", h}, {"key", h}, {"value", h}}});
///
/// Throws: as ops::linear.
class Linear : public torch::nn::ModuleHolder<LinearImpl> {
 public:
  using torch::nn::ModuleHolder<LinearImpl>::ModuleHolder;
  using Impl = LinearImpl;
  Linear(int64_t in_features, int64_t out_features, const LinearOptions& linear = {},
         const at::TensorOptions& options = {})
      : ModuleHolder(std::make_shared<LinearImpl>(in_features, out_features, linear, options)) {}
};

/// y = norm(x) weight^T + bias, as one pipeline.
///
///   tandem::LayerNormLinear layer(h, 3 * h, {.normalization = tandem::Normalization::rms_norm});
///
/// Throws: as ops::layer_norm_linear, return_bias aside.
class LayerNormLinear : public torch::nn::ModuleHolder<LayerNormLinearImpl> {
 public:
  using torch::nn::ModuleHolder<LayerNormLinearImpl>::ModuleHolder;
  using Impl = LayerNormLinearImpl;
  LayerNormLinear(int64_t in_features, int64_t out_features,
                  const LayerNormLinearOptions& layer_norm_linear = {},
                  const at::TensorOptions& options = {})
      : ModuleHolder(std::make_shared<LayerNormLinearImpl>(in_features, out_features,
                                                           layer_norm_linear, options)) {}
};

/// y = activation(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias, as one pipeline.
///
/// Throws: as ops::layer_norm_mlp, return_bias aside.
class LayerNormMLP : public torch::nn::ModuleHolder<LayerNormMLPImpl> {
 public:
  using torch::nn::ModuleHolder<LayerNormMLPImpl>::ModuleHolder;
  using Impl = LayerNormMLPImpl;
  LayerNormMLP(int64_t hidden_size, int64_t ffn_hidden_size,
               const LayerNormMLPOptions& layer_norm_mlp = {},
               const at::TensorOptions& options = {})
      : ModuleHolder(std::make_shared<LayerNormMLPImpl>(hidden_size, ffn_hidden_size,
                                                        layer_norm_mlp, options)) {}
};

}  // namespace tandem
