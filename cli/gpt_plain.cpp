#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <torch/nn/modules/linear.h>

#include "gpt_layers.h"

namespace tandem::cli {

namespace {

torch::nn::Linear make_linear(int64_t in, int64_t out, bool bias, at::ScalarType dtype) {
  torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(bias));
  linear->to(dtype);
  return linear;
}

at::Tensor make_norm_weight(int64_t hidden, at::ScalarType dtype) {
  return at::ones({hidden}, at::TensorOptions(dtype)).set_requires_grad(true);
}

class PlainLayer final : public GptLayer {
 public:
  PlainLayer(const GptConfig& config, at::ScalarType dtype)
      : attention_norm_(make_norm_weight(config.hidden, dtype)),
        mlp_norm_(make_norm_weight(config.hidden, dtype)),
        qkv_(make_linear(config.hidden, 3 * config.hidden, true, dtype)),
        projection_(make_linear(config.hidden, config.hidden, true, dtype)),
        up_(make_linear(config.hidden, 2 * config.inner(), true, dtype)),
        down_(make_linear(config.inner(), config.hidden, true, dtype)) {}

  std::pair<at::Tensor, at::Tensor> attention_in(const at::Tensor& x) override {
    return {qkv_->forward(norm(x, attention_norm_)), x};
  }

  at::Tensor attention_out(const at::Tensor& attended, const at::Tensor& residual) override {
    return projection_->forward(attended) + residual;
  }

  at::Tensor mlp(const at::Tensor& x) override {
    const std::vector<at::Tensor> halves = up_->forward(norm(x, mlp_norm_)).chunk(2, -1);
    return down_->forward(at::silu(halves[0]) * halves[1]) + x;
  }

  NamedTensors parameters() override {
    return {{"attention_norm.weight", attention_norm_},
            {"qkv.weight", qkv_->weight},
            {"qkv.bias", qkv_->bias},
            {"projection.weight", projection_->weight},
            {"projection.bias", projection_->bias},
            {"mlp_norm.weight", mlp_norm_},
            {"up.weight", up_->weight},
            {"up.bias", up_->bias},
            {"down.weight", down_->weight},
            {"down.bias", down_->bias}};
  }

 private:
  static at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) {
    return at::rms_norm(x, weight.sizes(), weight, kNormEps);
  }

  at::Tensor attention_norm_, mlp_norm_;
  torch::nn::Linear qkv_, projection_, up_, down_;
};

class PlainHead final : public GptHead {
 public:
  PlainHead(const GptConfig& config, at::ScalarType dtype)
      : norm_(make_norm_weight(config.hidden, dtype)),
        linear_(make_linear(config.hidden, kVocabulary, false, dtype)) {}

  at::Tensor logits(const at::Tensor& x) override {
    return linear_->forward(at::rms_norm(x, norm_.sizes(), norm_, kNormEps));
  }

  NamedTensors parameters() override {
    return {{"norm.weight", norm_}, {"linear.weight", linear_->weight}};
  }

 private:
  at::Tensor norm_;
  torch::nn::Linear linear_;
};

}  // namespace

std::unique_ptr<GptLayer> make_plain_layer(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<PlainLayer>(config, dtype);
}

std::unique_ptr<GptHead> make_plain_head(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<PlainHead>(config, dtype);
}

}  // namespace tandem::cli
