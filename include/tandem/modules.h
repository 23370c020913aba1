// Modules with the arguments, parameter names and state-dict keys of transformer_engine.pytorch, as
// torch::nn modules. Each is one pipeline, and each has an op for lists of ops.
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

/// Tensors by the names of weights, to which backward adds the gradients (Op::with_main_grad).
using MainGrads = std::map<std::string, at::Tensor>;

// The structs repeat members, because designated initializers cannot name members of a base.

struct LinearOptions {
  bool bias = true;
  /// The bias is returned, not added.
  bool return_bias = false;
  /// The first values of the weight, or of each of its parts.
  Init init_method = init::normal(0.023);
  TensorParallel tensor_parallel = {};
  /// ops::LinearOptions::parameters_split.
  std::vector<std::pair<std::string, int64_t>> parameters_split = {};
  MainGrads main_grads = {};
  /// Backward leaves the gradients of weights to `backward_dw()` of the module.
  bool delay_wgrad_compute = false;
  /// BasicLinearOptions::save_original_input.
  bool save_original_input = false;
};

struct LayerNormLinearOptions {
  /// A term inside the norm's square root.
  double eps = 1e-5;
  Normalization normalization = Normalization::layer_norm;
  /// The norm multiplies by 1 + weight.
  bool zero_centered_gamma = false;
  bool bias = true;
  /// The bias of the result is returned, not added.
  bool return_bias = false;
  /// The output of the norm is returned.
  bool return_layernorm_output = false;
  /// With sequence_parallel and a column-parallel product, the returned output of the norm holds
  /// the rows of all ranks.
  bool return_layernorm_output_gathered = false;
  /// The first values of the weight, or of each of its parts.
  Init init_method = init::normal(0.023);
  TensorParallel tensor_parallel = {};
  /// ops::LinearOptions::parameters_split.
  std::vector<std::pair<std::string, int64_t>> parameters_split = {};
  MainGrads main_grads = {};
  /// Backward leaves the gradients of weights to `backward_dw()` of the module.
  bool delay_wgrad_compute = false;
};

struct LayerNormMLPOptions {
  /// A term inside the norm's square root.
  double eps = 1e-5;
  Normalization normalization = Normalization::layer_norm;
  /// The norm multiplies by 1 + weight.
  bool zero_centered_gamma = false;
  bool bias = true;
  /// The bias of the result is returned, not added.
  bool return_bias = false;
  /// The output of the norm is returned.
  bool return_layernorm_output = false;
  /// With sequence_parallel, the returned output of the norm holds the rows of all ranks.
  bool return_layernorm_output_gathered = false;
  /// The name of an activation or gated unit in docs/ops.md. The first product has twice as many
  /// features before a gated unit.
  std::string activation = "gelu";
  /// Options of the activation, such as {{"limit", 5.0}} for "clamped_swiglu".
  OptionValues activation_params = {};
  /// The first values of fc1_weight, and of fc2_weight.
  Init init_method = init::normal(0.023), output_layer_init_method = init::normal(0.023);
  /// Unless `mode` is none, the first product is column-parallel and the second row-parallel.
  TensorParallel tensor_parallel = {};
  MainGrads main_grads = {};
  /// Backward leaves the gradients of weights to `backward_dw()` of the module.
  bool delay_wgrad_compute = false;
  /// Backward recomputes the norm, the first product and the activation, so that forward keeps none
  /// of their results.
  bool checkpoint = false;
};

namespace ops {

/// y = norm(x) weight^T + bias. Parameters: layer_norm_weight, layer_norm_bias (of a LayerNorm),
/// weight, bias.
///
/// Shapes:  x [..., in_features] -> y [..., out_features], where ranks share either as
///          options.tensor_parallel says.
/// Throws:  c10::ValueError where return_bias is set, as the next op of a list takes y alone; for
///          sizes that are not positive or that ranks cannot share evenly; where parameters_split
///          has names that do not differ, or features that do not sum up to out_features.
TANDEM_API Op layer_norm_linear(int64_t in_features, int64_t out_features,
                                const LayerNormLinearOptions& options = {});

/// y = activation(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias. Parameters:
/// layer_norm_weight, layer_norm_bias (of a LayerNorm), fc1_weight, fc1_bias, fc2_weight, fc2_bias.
///
/// Shapes:  x [..., hidden_size] -> y [..., hidden_size].
/// Throws:  c10::ValueError where return_bias is set, as the next op of a list takes y alone; for
///          sizes that are not positive or that ranks cannot share evenly; for an unknown
///          activation.
TANDEM_API Op layer_norm_mlp(int64_t hidden_size, int64_t ffn_hidden_size,
                             const LayerNormMLPOptions& options = {});

}  // namespace ops

/// The results of a module with products. A result that the options do not return is undefined.
struct ModuleOutputs {
  at::Tensor y;
  /// The bias that was not added, in the dtype of y.
  at::Tensor bias;
  at::Tensor layernorm_output;
};

/// A module of one op.
class TANDEM_API OpModule : public PipelineModule {
 public:
  /// Registers the parameters under their names in the op. Parameters that no basic op reads are
  /// the bias that `forward_all` returns.
  OpModule(const char* name, const Op& op, const at::TensorOptions& options,
           bool returns_bias = false, bool returns_norm = false);
  /// Returns y alone.
  ///
  /// Throws:  c10::ValueError where the options return more; `forward_all` returns everything.
  at::Tensor forward(const at::Tensor& x);
  /// Returns y, and the outputs that the options return beside it.
  ModuleOutputs forward_all(const at::Tensor& x);

 private:
  bool returns_bias_, returns_norm_;
  /// The bias that `forward_all` returns, in the parts of parameters_split.
  std::vector<at::Tensor> biases_;
};

class TANDEM_API LinearImpl : public OpModule {
 public:
  LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& own = {},
             const at::TensorOptions& options = {});
};

class TANDEM_API LayerNormLinearImpl : public OpModule {
 public:
  LayerNormLinearImpl(int64_t in_features, int64_t out_features,
                      const LayerNormLinearOptions& own = {},
                      const at::TensorOptions& options = {});
};

class TANDEM_API LayerNormMLPImpl : public OpModule {
 public:
  LayerNormMLPImpl(int64_t hidden_size, int64_t ffn_hidden_size,
                   const LayerNormMLPOptions& own = {}, const at::TensorOptions& options = {});
};

/// A shared handle, like the handles of torch::nn, whose constructor takes options in braces.
template <typename Contained, typename Options, typename... Sizes>
class ModuleOf : public torch::nn::ModuleHolder<Contained> {
 public:
  using torch::nn::ModuleHolder<Contained>::ModuleHolder;
  using Impl = Contained;
  ModuleOf(Sizes... sizes, const Options& own = {}, const at::TensorOptions& options = {})
      : torch::nn::ModuleHolder<Contained>(std::make_shared<Contained>(sizes..., own, options)) {}
};

/// y = x weight^T + bias, as one pipeline. Where ranks share a row-parallel weight, the bias is
/// added after the sum over ranks.
///
///   tandem::Linear qkv(h, 3 * h, {.parameters_split = {{"query", h}, {"key", h}, {"value", h}}});
///
/// Shapes:  x [..., in_features] -> y [..., out_features], where ranks share either as
///          LinearOptions::tensor_parallel says.
/// Dtypes:  y has the dtype of torch.autocast, else of the weight.
/// Throws:  c10::ValueError as ops::linear.
using Linear = ModuleOf<LinearImpl, LinearOptions, int64_t, int64_t>;

/// y = norm(x) weight^T + bias, as one pipeline.
///
///   tandem::LayerNormLinear layer(h, 3 * h, {.normalization = tandem::Normalization::rms_norm});
///
/// Shapes:  x [..., in_features] -> y [..., out_features], where ranks share either as
///          LayerNormLinearOptions::tensor_parallel says.
/// Dtypes:  y has the dtype of torch.autocast, else of the weight.
/// Throws:  c10::ValueError as ops::layer_norm_linear, but accepts return_bias.
using LayerNormLinear = ModuleOf<LayerNormLinearImpl, LayerNormLinearOptions, int64_t, int64_t>;

/// y = activation(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias, as one pipeline.
///
/// Shapes:  x [..., hidden_size] -> y like x.
/// Dtypes:  y has the dtype of torch.autocast, else of the weights.
/// Throws:  c10::ValueError as ops::layer_norm_mlp, but accepts return_bias.
using LayerNormMLP = ModuleOf<LayerNormMLPImpl, LayerNormMLPOptions, int64_t, int64_t>;

}  // namespace tandem
