// A transformer layer as a module with the arguments and parameter names of
// transformer_engine.pytorch. From the attention's result on it is one pipeline.
#pragma once

#include <memory>
#include <string>

#include "tandem/attention.h"
#include "tandem/export.h"

namespace tandem {

struct TransformerLayerOptions {
  /// Of the attention; what they say of norms, biases, first values and ranks is said of the MLP
  /// too.
  AttentionOptions attention = {};
  /// Probability with which, in training, an element becomes zero before it is added to the
  /// residual.
  double hidden_dropout = 0.1;
  /// By names of parameters, such as "layernorm_mlp.fc1_weight".
  MainGrads main_grads = {};
  /// A norm comes last, and none before the attention.
  bool output_layernorm = false;
  /// As of LayerNormMLPOptions.
  std::string activation = "gelu";
  OptionValues activation_params = {};
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
