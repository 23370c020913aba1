// A transformer layer as a module with the arguments and parameter names of
// transformer_engine.pytorch. From the attention's result on it is one pipeline.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tandem/attention.h"
#include "tandem/export.h"

namespace tandem {

struct TransformerLayerOptions {
  /// As of MultiheadAttentionOptions.
  std::optional<int64_t> num_gqa_groups = std::nullopt;
  /// Of both norms.
  double layernorm_epsilon = 1e-5;
  /// Probability with which, in training, an element becomes zero before it is added to the
  /// residual.
  double hidden_dropout = 0.1;
  double attention_dropout = 0.1;
  /// Of the weights before and behind the attention and the activation.
  Init init_method = init::normal(0.023), output_layer_init_method = init::normal(0.023);
  std::optional<int64_t> layer_number = std::nullopt;
  std::optional<int64_t> kv_channels = std::nullopt;
  AttnMaskType self_attn_mask_type = AttnMaskType::causal;
  std::optional<Window> window_size = std::nullopt;
  /// Of the attention and of the MLP.
  TensorParallel tensor_parallel = {};
  /// By names of parameters, such as "layernorm_mlp.fc1_weight".
  MainGrads main_grads = {};
  /// A norm comes last, and none before the attention.
  bool output_layernorm = false;
  bool fuse_qkv_params = false;
  bool rotary_pos_interleaved = false;
  bool zero_centered_gamma = false;
  bool qkv_weight_interleaved = true;
  bool bias = true;
  /// As of LayerNormMLPOptions.
  std::string activation = "gelu";
  OptionValues activation_params = {};
  Normalization normalization = Normalization::layer_norm;
  QkvFormat attn_input_format = QkvFormat::sbhd;
  QkNormType qk_norm_type = QkNormType::none;
  double qk_norm_eps = 1e-6;
  bool qk_norm_before_rope = false;
};

class TANDEM_API TransformerLayerImpl : public torch::nn::Module {
 public:
  TransformerLayerImpl(int64_t hidden_size, int64_t ffn_hidden_size, int64_t num_attention_heads,
                       const TransformerLayerOptions& layer = {},
                       const at::TensorOptions& options = {});

  /// y, of the shape of x.
  at::Tensor forward(const at::Tensor& x, const AttentionArguments& arguments = {});

  /// The plans of what follows the attention.
  std::string explain(ExplainFormat format = ExplainFormat::text) const;
  void train(bool on = true) override;

 private:
  class Tail;

  MultiheadAttention attention_;
  /// No child: what it consists of has its place already.
  std::shared_ptr<Tail> tail_;
};

/// h = x + dropout(attention(norm(x))), y = h + dropout(mlp(norm(h))).
///
///   tandem::TransformerLayer layer(h, 4 * h, 8, {.activation = "swiglu"});
///
/// Two pipelines with torch's attention between: the norm and the projection to queries, keys and
/// values; and the projection behind the attention, dropout, residual, norm, MLP, dropout and
/// residual. Parameters: `self_attention`, as MultiheadAttention; `layernorm_mlp`, as LayerNormMLP;
/// `layernorm`, of output_layernorm.
/// Throws: as MultiheadAttention and LayerNormMLP.
class TransformerLayer : public torch::nn::ModuleHolder<TransformerLayerImpl> {
 public:
  using torch::nn::ModuleHolder<TransformerLayerImpl>::ModuleHolder;
  using Impl = TransformerLayerImpl;
  TransformerLayer(int64_t hidden_size, int64_t ffn_hidden_size, int64_t num_attention_heads,
                   const TransformerLayerOptions& layer = {}, const at::TensorOptions& options = {})
      : ModuleHolder(std::make_shared<TransformerLayerImpl>(hidden_size, ffn_hidden_size,
                                                            num_attention_heads, layer, options)) {}
};

}  // namespace tandem
