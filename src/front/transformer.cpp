#include "tandem/transformer.h"

#include "front/attention.h"

namespace tandem {

namespace {

/// An entry of the tail: the op of a module, or an op without state.
struct Entry {
  Op op;
  std::shared_ptr<PipelineModule> owner = nullptr;
};

}  // namespace

/// The pipeline after the attention, which reads the parameters and the state of other modules.
class TransformerLayerImpl::Tail : public PipelineModule {
 public:
  static Entry entry(const std::shared_ptr<OpModule>& module) { return {op_of(*module), module}; }

  explicit Tail(const std::vector<Entry>& entries) : Tail(ops_of(entries), owners_of(entries)) {}

  at::Tensor forward(const at::Tensor& attended, const at::Tensor& residual) {
    return run(attended, residual)[0];
  }

 private:
  Tail(const std::vector<Op>& ops, const std::vector<std::shared_ptr<PipelineModule>>& owners)
      : PipelineModule("TransformerLayer", ops, Names::by_place, {}, owners) {}
  static std::vector<Op> ops_of(const std::vector<Entry>& entries) {
    std::vector<Op> ops;
    for (const Entry& entry : entries) ops.push_back(entry.op);
    return ops;
  }
  static std::vector<std::shared_ptr<PipelineModule>> owners_of(const std::vector<Entry>& entries) {
    std::vector<std::shared_ptr<PipelineModule>> owners;
    for (const Entry& entry : entries) owners.push_back(entry.owner);
    return owners;
  }
};

TransformerLayerImpl::TransformerLayerImpl(int64_t hidden_size, int64_t ffn_hidden_size,
                                           int64_t num_attention_heads,
                                           const TransformerLayerOptions& layer,
                                           const at::TensorOptions& options)
    : torch::nn::Module("TransformerLayer"), attention_(nullptr) {
  const auto main_grads = [&](const char* child) {
    return main_grads_of(name(), layer.main_grads, child, {"self_attention", "layernorm_mlp"});
  };
  const AttentionOptions& shared = layer.attention;
  attention_ = register_module("self_attention",
                               MultiheadAttention(hidden_size, num_attention_heads,
                                                  {.attention = shared,
                                                   .main_grads = main_grads("self_attention"),
                                                   .input_layernorm = !layer.output_layernorm},
                                                  options));
  const auto mlp = register_module(
      "layernorm_mlp",
      std::make_shared<LayerNormMLPImpl>(
          hidden_size, ffn_hidden_size,
          LayerNormMLPOptions{.eps = shared.layernorm_epsilon,
                              .normalization = shared.normalization,
                              .zero_centered_gamma = shared.zero_centered_gamma,
                              .bias = shared.bias,
                              .activation = layer.activation,
                              .activation_params = layer.activation_params,
                              .init_method = shared.init_method,
                              .output_layer_init_method = shared.output_layer_init_method,
                              .tensor_parallel = shared.tensor_parallel,
                              .main_grads = main_grads("layernorm_mlp")},
          options));

  const char* kResidual = "residual";
  std::vector<Entry> tail{Tail::entry(attention_->projection_out())};
  const auto drop = [&] {
    if (layer.hidden_dropout != 0) tail.push_back({ops::dropout({layer.hidden_dropout})});
  };
  drop();
  tail.push_back({ops::add_extra_input()});
  tail.push_back({ops::make_extra_output({kResidual, /*output_to_caller=*/false})});
  tail.push_back(Tail::entry(mlp));
  drop();
  tail.push_back({ops::add_extra_input({.channel = kResidual})});
  if (layer.output_layernorm) {
    const ops::NormOptions norm{shared.layernorm_epsilon, shared.zero_centered_gamma};
    const bool is_layer_norm = shared.normalization == Normalization::layer_norm;
    const auto last = register_module(
        "layernorm", std::make_shared<OpModule>(is_layer_norm ? "LayerNorm" : "RMSNorm",
                                                is_layer_norm ? ops::layer_norm(hidden_size, norm)
                                                              : ops::rms_norm(hidden_size, norm),
                                                options));
    tail.push_back(Tail::entry(last));
  }
  tail_ = std::make_shared<Tail>(tail);
}

at::Tensor TransformerLayerImpl::forward(const at::Tensor& x, const AttentionArguments& arguments) {
  check_window(name(), arguments.window_size, attention_->mask_type(arguments));
  return tail_->forward(attention_->context(x, arguments).first, x);
}

std::string TransformerLayerImpl::explain(ExplainFormat format) const {
  return tail_->explain(format);
}

void TransformerLayerImpl::train(bool on) {
  torch::nn::Module::train(on);
  tail_->train(on);
}

}  // namespace tandem
