#include <ATen/TensorOperators.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <torch/nn/modules/linear.h>

#include "gpt_layers.h"

namespace tandem::apps {

namespace {

torch::nn::Linear make_linear(int64_t in, int64_t out, bool bias, at::ScalarType dtype) {
  torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(bias));
  linear->to(dtype);
  return linear;
}

at::Tensor make_norm_weight(int64_t hidden, at::ScalarType dtype) {
  return at::ones({hidden}, at::TensorOptions(dtype)).set_requires_grad(true);
}

class PlainLayer final : public GptPart {
 public:
  PlainLayer(const GptConfig& config, at::ScalarType dtype)
      : heads_(config.heads),
        attention_norm_(make_norm_weight(config.hidden, dtype)),
        mlp_norm_(make_norm_weight(config.hidden, dtype)),
        qkv_(make_linear(config.hidden, 3 * config.hidden, true, dtype)),
        projection_(make_linear(config.hidden, config.hidden, true, dtype)),
        up_(make_linear(config.hidden, 2 * config.inner(), true, dtype)),
        down_(make_linear(config.inner(), config.hidden, true, dtype)) {
    const int64_t width = config.hidden / config.heads;
    const at::Tensor frequencies =
        at::pow(kRotaryBase, at::arange(0, width, 2, at::kFloat) / -static_cast<double>(width));
    const at::Tensor angles = at::outer(at::arange(config.context, at::kFloat), frequencies);
    const at::Tensor sines = angles.sin();
    cosines_ = at::cat({angles, angles}, -1).cos().to(dtype);
    signed_sines_ = at::cat({-sines, sines}, -1).to(dtype);
  }

  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor attended = attend(qkv_->forward(norm(x, attention_norm_)));
    const at::Tensor y = projection_->forward(attended) + x;
    const std::vector<at::Tensor> halves = up_->forward(norm(y, mlp_norm_)).chunk(2, -1);
    return down_->forward(at::silu(halves[0]) * halves[1]) + y;
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

  /// Turns each pair (x[i], x[i + width / 2]) by its position's angle. x [.., length, width].
  at::Tensor rotate(const at::Tensor& x) const {
    const int64_t length = x.size(-2);
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    return at::addcmul(x * cosines_.narrow(0, 0, length), at::cat({halves[1], halves[0]}, -1),
                       signed_sines_.narrow(0, 0, length));
  }

  at::Tensor attend(const at::Tensor& qkv) const {
    const int64_t batch = qkv.size(0), length = qkv.size(1);
    const at::Tensor by_head = qkv.view({batch, length, 3, heads_, -1}).permute({2, 0, 3, 1, 4});
    const at::Tensor query_and_key = rotate(by_head.narrow(0, 0, 2));
    const at::Tensor value = by_head[2].contiguous();  // a view would keep all of qkv for backward
    return at::scaled_dot_product_attention(query_and_key[0], query_and_key[1], value, {},
                                            /*dropout_p=*/0.0, /*is_causal=*/true)
        .transpose(1, 2)
        .reshape({batch, length, -1});
  }

  int64_t heads_;
  at::Tensor attention_norm_, mlp_norm_, cosines_, signed_sines_;
  torch::nn::Linear qkv_, projection_, up_, down_;
};

class PlainHead final : public GptPart {
 public:
  PlainHead(const GptConfig& config, at::ScalarType dtype)
      : norm_(make_norm_weight(config.hidden, dtype)),
        linear_(make_linear(config.hidden, kVocabulary, false, dtype)) {}

  at::Tensor forward(const at::Tensor& x) override {
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

std::unique_ptr<GptPart> make_plain_layer(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<PlainLayer>(config, dtype);
}

std::unique_ptr<GptPart> make_plain_head(const GptConfig& config, at::ScalarType dtype) {
  return std::make_unique<PlainHead>(config, dtype);
}

}  // namespace tandem::apps
