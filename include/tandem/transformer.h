// A transformer layer as a module with the arguments and parameter names of
// transformer_engine.pytorch. Everything after the attention is one pipeline.
#pragma once

#include <memory>
#include <string>

#include "tandem/attention.h"
#include "tandem/export.h"

namespace tandem {

struct TransformerLayerOptions {
  /// Options of the attention. Its options of norms, biases, first values and ranks count for the
  /// MLP too.
  AttentionOptions attention = {};
  /// Probability with which, in training, an element becomes zero before it is added to the
  /// residual.
  double hidden_dropout = 0.1;
  /// Keys are names of parameters, such as "layernorm_mlp.fc1_weight".
  MainGrads main_grads = {};
  /// A norm comes last, and none before the attention.
  bool output_layernorm = false;
  /// These two are the options of LayerNormMLPOptions.
  std::string activation = "gelu";
  OptionValues activation_params = {};
};

class TANDEM_API TransformerLayerImpl : public torch::nn::Module {
 public:
  TransformerLayerImpl(int64_t hidden_size, int64_t ffn_hidden_size, int64_t num_attention_heads,
                       const TransformerLayerOptions& layer = {},
                       const at::TensorOptions& options = {});

  /// Returns y, in the shape of x.
  at::Tensor forward(const at::Tensor& x, const AttentionArguments& arguments = {});

  /// Shows the plans of the pipeline after the attention.
  std::string explain(ExplainFormat format = ExplainFormat::text) const;
  void train(bool on = true) override;

 private:
  class Tail;

  MultiheadAttention attention_;
  /// The pipeline after the attention. It is not registered as a child, because its parameters
  /// belong to other children.
  std::shared_ptr<Tail> tail_;
};

/// h = x + dropout(attention(norm(x))), y = h + dropout(mlp(norm(h))).
///
///   tandem::TransformerLayer layer(h, 4 * h, 8, {.activation = "swiglu"});
///
/// The layer is two pipelines with torch's attention between them. The first computes the norm and
/// the projection to queries, keys and values; the second computes the output projection, dropout,
/// residual, norm, MLP, dropout and residual.
///
/// Parameters: `self_attention` has those of MultiheadAttention, `layernorm_mlp` those of
/// LayerNormMLP; with output_layernorm there is `layernorm`.
///
/// Shapes:  x [sequence, batch, hidden_size], or with bshd [batch, sequence, hidden_size] -> y like
///          x.
/// Throws:  as MultiheadAttention and LayerNormMLP.
using TransformerLayer =
    ModuleOf<TransformerLayerImpl, TransformerLayerOptions, int64_t, int64_t, int64_t>;

}  // namespace tandem
