#include <tandem/tandem.h>

#include "gpt_layers.h"

namespace tandem::apps {

namespace {

using Ops = std::vector<Op>;

/// Gives the pipeline's parameters these names. The pipeline names them by the index of their op:
/// "1.weight".
NamedTensors renamed(const Sequential& pipeline,
                     std::initializer_list<std::pair<const char*, const char*>> names) {
  const auto parameters = pipeline->named_parameters();
  NamedTensors renamed;
  for (const auto& [place, name] : names) renamed.push_back({name, parameters[place]});
  return renamed;
}

NamedTensors buffers_of(const Sequential& pipeline) {
  NamedTensors all;
  for (const auto& buffer : pipeline->named_buffers())
    all.push_back({"pipeline." + buffer.key(), buffer.value()});
  return all;
}

Ops ops_of_layer(const GptConfig& config) {
  const int64_t hidden = config.hidden;
  const auto heads = static_cast<size_t>(config.heads), width = static_cast<size_t>(hidden) / heads;
  const auto fork = [](const char* channel) {
    return ops::make_extra_output({channel, /*output_to_caller=*/false});
  };
  return {fork("x"), ops::rms_norm(hidden, {.eps = kNormEps}), ops::linear(hidden, 3 * hidden),
          ops::rotary({.num_heads = heads, .head_dim = width, .base = kRotaryBase}),
          ops::attention({.num_heads = heads, .head_dim = width, .causal = true}),
          // Attention keeps this result for its own backward anyway.
          ops::linear(hidden, hidden, {.save_original_input = true}),
          ops::add_extra_input({.channel = "x"}), fork("attended"),
          ops::rms_norm(hidden, {.eps = kNormEps}), ops::linear(hidden, 2 * config.inner()),
          ops::swiglu(), ops::linear(config.inner(), hidden),
          ops::add_extra_input({.channel = "attended"})};
}

class TandemLayer final : public GptLayer {
 public:
  TandemLayer(const GptConfig& config, at::ScalarType dtype)
      : pipeline_(ops_of_layer(config), dtype) {}

  at::Tensor forward(const at::Tensor& x) override { return pipeline_->forward(x); }

  NamedTensors parameters() override {
    return renamed(pipeline_, {{"1.weight", "attention_norm.weight"},
                               {"2.weight", "qkv.weight"},
                               {"2.bias", "qkv.bias"},
                               {"5.weight", "projection.weight"},
                               {"5.bias", "projection.bias"},
                               {"8.weight", "mlp_norm.weight"},
                               {"9.weight", "up.weight"},
                               {"9.bias", "up.bias"},
                               {"11.weight", "down.weight"},
                               {"11.bias", "down.bias"}});
  }

  NamedTensors buffers() override { return buffers_of(pipeline_); }
  std::string plan_svg() override { return pipeline_->explain(ExplainFormat::svg); }
  void watch(int64_t number) override { pipeline_->set_watched(number); }

 private:
  Sequential pipeline_;
};

class TandemHead final : public GptHead {
 public:
  TandemHead(const GptConfig& config, at::ScalarType dtype)
      : pipeline_(Ops{ops::rms_norm(config.hidden, {.eps = kNormEps}),
                      ops::linear(config.hidden, kVocabulary, {.bias = false})},
                  dtype) {}

  at::Tensor logits(const at::Tensor& x) override { return pipeline_->forward(x); }

  NamedTensors parameters() override {
    return renamed(pipeline_, {{"0.weight", "norm.weight"}, {"1.weight", "linear.weight"}});
  }

  NamedTensors buffers() override { return buffers_of(pipeline_); }
  void watch(int64_t number) override { pipeline_->set_watched(number); }

 private:
  Sequential pipeline_;
};

}  // namespace

std::string product_of_layer(size_t op) {
  // The basic ops before each product. A product with a bias is two basic ops.
  constexpr size_t kProjection = 6, kUp = 11, kDown = 14;
  return op < kProjection ? "qkv" : op < kUp ? "projection" : op < kDown ? "up" : "down";
}

std::unique_ptr<GptLayer> make_tandem_layer(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<TandemLayer>(config, dtype);
}

std::unique_ptr<GptHead> make_tandem_head(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<TandemHead>(config, dtype);
}

}  // namespace tandem::apps
