#include <tandem/tandem.h>

#include "gpt_layers.h"

namespace tandem::apps {

namespace {

using Ops = std::vector<Op>;

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

/// A part of the model as one pipeline.
class TandemPart final : public GptPart {
 public:
  /// The pipeline names parameters by the index of their op, as "1.weight", and the model by
  /// `names`.
  using Names = std::vector<std::pair<const char*, const char*>>;
  TandemPart(const Ops& ops, Names names, at::ScalarType dtype)
      : pipeline_(ops, dtype), names_(std::move(names)) {}

  at::Tensor forward(const at::Tensor& x) override { return pipeline_->forward(x); }

  NamedTensors parameters() override {
    const auto parameters = pipeline_->named_parameters();
    NamedTensors named;
    for (const auto& [place, name] : names_) named.push_back({name, parameters[place]});
    return named;
  }

  NamedTensors buffers() override {
    NamedTensors named;
    for (const auto& buffer : pipeline_->named_buffers())
      named.push_back({"pipeline." + buffer.key(), buffer.value()});
    return named;
  }

  std::string plan_svg() override { return pipeline_->explain(ExplainFormat::svg); }
  void watch(int64_t number) override { pipeline_->set_watched(number); }

 private:
  Sequential pipeline_;
  const Names names_;
};

}  // namespace

std::string product_of_layer(size_t op) {
  // The basic ops before each product. A product with a bias is two basic ops.
  constexpr size_t kProjection = 6, kUp = 11, kDown = 14;
  return op < kProjection ? "qkv" : op < kUp ? "projection" : op < kDown ? "up" : "down";
}

std::unique_ptr<GptPart> make_tandem_layer(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<TandemPart>(ops_of_layer(config),
                                      TandemPart::Names{{"1.weight", "attention_norm.weight"},
                                                        {"2.weight", "qkv.weight"},
                                                        {"2.bias", "qkv.bias"},
                                                        {"5.weight", "projection.weight"},
                                                        {"5.bias", "projection.bias"},
                                                        {"8.weight", "mlp_norm.weight"},
                                                        {"9.weight", "up.weight"},
                                                        {"9.bias", "up.bias"},
                                                        {"11.weight", "down.weight"},
                                                        {"11.bias", "down.bias"}},
                                      dtype);
}

std::unique_ptr<GptPart> make_tandem_head(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<TandemPart>(
      Ops{ops::rms_norm(config.hidden, {.eps = kNormEps}),
          ops::linear(config.hidden, kVocabulary, {.bias = false})},
      TandemPart::Names{{"0.weight", "norm.weight"}, {"1.weight", "linear.weight"}}, dtype);
}

}  // namespace tandem::apps
