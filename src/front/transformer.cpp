#include "tandem/transformer.h"

#include "front/attention.h"

namespace tandem {

/// The pipeline after the attention, which reads the parameters and the state of other modules.
class TransformerLayerImpl::Tail : public PipelineModule {
 public:
  Tail(const std::vector<Op>& ops, const std::vector<std::shared_ptr<PipelineModule>>& owners)
      : PipelineModule("TransformerLayer", ops, Names::by_place, {}, owners) {}

  using PipelineModule::op_of;

  at::Tensor forward(const at::Tensor& attended, const at::Tensor& residual) {
    return run(attended, residual)[0];
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
  std::vector<Op> tail;
  std::vector<std::shared_ptr<PipelineModule>> owners;  // of the ops; null for one without state
  const auto add = [&](const Op& op, const std::shared_ptr<PipelineModule>& owner = nullptr) {
    tail.push_back(op);
    owners.push_back(owner);
  };
  const auto drop = [&] {
    if (layer.hidden_dropout != 0) add(ops::dropout({layer.hidden_dropout}));
  };
  add(Tail::op_of(*attention_->projection_out()), attention_->projection_out());
  drop();
  add(ops::add_extra_input());
  add(ops::make_extra_output({kResidual, /*output_to_caller=*/false}));
  add(Tail::op_of(*mlp), mlp);
  drop();
  add(ops::add_extra_input({.channel = kResidual}));
  if (layer.output_layernorm) {
    const ops::NormOptions norm{shared.layernorm_epsilon, shared.zero_centered_gamma};
    const bool is_layer_norm = shared.normalization == Normalization::layer_norm;
    const auto last = register_module(
        "layernorm", std::make_shared<OpModule>(is_layer_norm ? "LayerNorm" : "RMSNorm",
                                                is_layer_norm ? ops::layer_norm(hidden_size, norm)
                                                              : ops::rms_norm(hidden_size, norm),
                                                options));
    add(Tail::op_of(*last), last);
  }
  tail_ = std::make_shared<Tail>(tail, owners);
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
