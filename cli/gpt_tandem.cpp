#include <tandem/tandem.h>

#include "gpt_layers.h"

namespace tandem::cli {

namespace {

using Ops = std::vector<Op>;

/// `names` given to the pipeline's parameters, which it calls by the place of their op: "1.weight".
NamedTensors renamed(const Sequential& pipeline,
                     std::initializer_list<std::pair<const char*, const char*>> names) {
  const auto parameters = pipeline->named_parameters();
  NamedTensors renamed;
  for (const auto& [place, name] : names) renamed.push_back({name, parameters[place]});
  return renamed;
}

/// Buffers of pipelines, under the names of these.
NamedTensors buffers_of(
    std::initializer_list<std::pair<const char*, const Sequential*>> pipelines) {
  NamedTensors all;
  for (const auto& [name, pipeline] : pipelines)
    for (const auto& buffer : (*pipeline)->named_buffers())
      all.push_back({std::string(name) + "." + buffer.key(), buffer.value()});
  return all;
}

class TandemLayer final : public GptLayer {
 public:
  TandemLayer(const GptConfig& config, at::ScalarType dtype)
      : attention_in_(Ops{ops::make_extra_output(), ops::rms_norm(config.hidden, {.eps = kNormEps}),
                          ops::linear(config.hidden, 3 * config.hidden)},
                      dtype),
        // Attention keeps its result for its own backward.
        attention_out_(Ops{ops::linear(config.hidden, config.hidden, {.save_original_input = true}),
                           ops::add_extra_input()},
                       dtype),
        mlp_(Ops{ops::make_extra_output({"residual", /*output_to_caller=*/false}),
                 ops::rms_norm(config.hidden, {.eps = kNormEps}),
                 ops::linear(config.hidden, 2 * config.inner()), ops::swiglu(),
                 ops::linear(config.inner(), config.hidden),
                 ops::add_extra_input({.channel = "residual"})},
             dtype) {}

  std::pair<at::Tensor, at::Tensor> attention_in(const at::Tensor& x) override {
    std::vector<at::Tensor> outputs = attention_in_->forward(x, at::TensorList());
    return {std::move(outputs[0]), std::move(outputs[1])};
  }

  at::Tensor attention_out(const at::Tensor& attended, const at::Tensor& residual) override {
    return attention_out_->forward(attended, residual)[0];
  }

  at::Tensor mlp(const at::Tensor& x) override { return mlp_->forward(x); }

  NamedTensors parameters() override {
    NamedTensors all = renamed(attention_in_, {{"1.weight", "attention_norm.weight"},
                                               {"2.weight", "qkv.weight"},
                                               {"2.bias", "qkv.bias"}});
    for (auto& parameter : renamed(
             attention_out_, {{"0.weight", "projection.weight"}, {"0.bias", "projection.bias"}})) {
      all.push_back(std::move(parameter));
    }
    for (auto& parameter : renamed(mlp_, {{"1.weight", "mlp_norm.weight"},
                                          {"2.weight", "up.weight"},
                                          {"2.bias", "up.bias"},
                                          {"4.weight", "down.weight"},
                                          {"4.bias", "down.bias"}})) {
      all.push_back(std::move(parameter));
    }
    return all;
  }

  NamedTensors buffers() override {
    return buffers_of(
        {{"attention_in", &attention_in_}, {"attention_out", &attention_out_}, {"mlp", &mlp_}});
  }

  std::string mlp_plan_svg() override { return mlp_->explain(ExplainFormat::svg); }

  void watch(int64_t first) override {
    int64_t number = first;
    for (Sequential* pipeline : {&attention_in_, &attention_out_, &mlp_})
      (*pipeline)->set_watched(first == 0 ? 0 : number++);
  }

 private:
  Sequential attention_in_, attention_out_, mlp_;
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

  NamedTensors buffers() override { return buffers_of({{"pipeline", &pipeline_}}); }
  void watch(int64_t number) override { pipeline_->set_watched(number); }

 private:
  Sequential pipeline_;
};

}  // namespace

std::string product_of_layer(int64_t pipeline, size_t op) {
  if (pipeline == 0) return "qkv";
  if (pipeline == 1) return "projection";
  constexpr size_t kDown = 5;  // behind the fork, the norm, a product with its bias, and the unit
  return op < kDown ? "up" : "down";
}

std::unique_ptr<GptLayer> make_tandem_layer(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<TandemLayer>(config, dtype);
}

std::unique_ptr<GptHead> make_tandem_head(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<TandemHead>(config, dtype);
}

}  // namespace tandem::cli
