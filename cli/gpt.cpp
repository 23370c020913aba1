#include "gpt.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/normal.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <cmath>

namespace tandem::cli {

namespace {

constexpr double kRotaryBase = 10000;
constexpr double kInitialDeviation = 0.02;
constexpr double kTemperature = 0.8;

}  // namespace

Gpt::Gpt(const GptConfig& config, Modules modules, at::ScalarType dtype) : config_(config) {
  embedding_ = at::empty({kVocabulary, config.hidden}, dtype).set_requires_grad(true);
  parameters_.push_back({"embedding.weight", embedding_});
  const auto adopt = [&](const std::string& prefix, NamedTensors parameters) {
    for (auto& [name, tensor] : parameters)
      parameters_.push_back({prefix + name, std::move(tensor)});
  };
  for (int64_t i = 0; i < config.layers; ++i) {
    layers_.push_back(modules == Modules::plain ? make_plain_layer(config, dtype)
                                                : make_tandem_layer(config, dtype));
    adopt("layers." + std::to_string(i) + ".", layers_.back()->parameters());
  }
  head_ =
      modules == Modules::plain ? make_plain_head(config, dtype) : make_tandem_head(config, dtype);
  adopt("head.", head_->parameters());

  const int64_t width = config.hidden / config.heads;
  const at::Tensor frequencies =
      at::pow(kRotaryBase, at::arange(0, width, 2, at::kFloat) / -static_cast<double>(width));
  const at::Tensor angles = at::outer(at::arange(config.context, at::kFloat), frequencies);
  const at::Tensor sines = angles.sin();
  cosines_ = at::cat({angles, angles}, -1).cos().to(dtype);
  signed_sines_ = at::cat({-sines, sines}, -1).to(dtype);
}

/// Each pair (x[i], x[i + width / 2]) turned by its position's angle. x [.., length, width].
at::Tensor Gpt::rotate(const at::Tensor& x) const {
  const int64_t length = x.size(-2);
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  return at::addcmul(x * cosines_.narrow(0, 0, length), at::cat({halves[1], halves[0]}, -1),
                     signed_sines_.narrow(0, 0, length));
}

at::Tensor Gpt::attend(const at::Tensor& qkv) const {
  const int64_t batch = qkv.size(0), length = qkv.size(1);
  const at::Tensor by_head =
      qkv.view({batch, length, 3, config_.heads, -1}).permute({2, 0, 3, 1, 4});
  const at::Tensor query_and_key = rotate(by_head.narrow(0, 0, 2));
  const at::Tensor value = by_head[2].contiguous();  // a view would keep all of qkv for backward
  const at::Tensor attended =
      at::scaled_dot_product_attention(query_and_key[0], query_and_key[1], value, {},
                                       /*dropout_p=*/0.0, /*is_causal=*/true);
  return attended.transpose(1, 2).reshape({batch, length, config_.hidden});
}

at::Tensor Gpt::forward(const at::Tensor& bytes) {
  at::Tensor x = at::embedding(embedding_, bytes);
  for (const auto& layer : layers_) {
    const auto [qkv, residual] = layer->attention_in(x);
    x = layer->mlp(layer->attention_out(attend(qkv), residual));
  }
  return head_->logits(x);
}

void Gpt::initialize(int64_t seed) {
  const at::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  const double residual_deviation =
      kInitialDeviation / std::sqrt(2.0 * static_cast<double>(config_.layers));
  for (const auto& [name, parameter] : parameters_) {
    if (name.ends_with("norm.weight")) {
      parameter.fill_(1);
    } else if (name.ends_with(".bias")) {
      parameter.zero_();
    } else {
      const bool residual = name.ends_with("projection.weight") || name.ends_with("down.weight");
      const double deviation = residual ? residual_deviation : kInitialDeviation;
      parameter.copy_(at::normal(0.0, deviation, parameter.sizes(), generator, at::kFloat));
    }
  }
}

NamedTensors Gpt::buffers() const {
  NamedTensors all;
  const auto adopt = [&](const std::string& prefix, NamedTensors buffers) {
    for (auto& [name, tensor] : buffers) all.push_back({prefix + name, std::move(tensor)});
  };
  for (size_t i = 0; i < layers_.size(); ++i)
    adopt("layers." + std::to_string(i) + ".", layers_[i]->buffers());
  adopt("head.", head_->buffers());
  return all;
}

void Gpt::watch(bool on) {
  int64_t number = 1;
  for (const auto& layer : layers_) {
    layer->watch(on ? number : 0);
    number += kPipelinesOfLayer;
  }
  head_->watch(on ? number : 0);
}

std::string Gpt::product_at(int64_t pipeline, size_t op) const {
  const int64_t layer = (pipeline - 1) / kPipelinesOfLayer;
  if (layer == static_cast<int64_t>(layers_.size())) return "head";
  return "layers." + std::to_string(layer) + "." +
         product_of_layer((pipeline - 1) % kPipelinesOfLayer, op);
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.reshape({-1, kVocabulary}).to(at::kFloat),
                                targets.reshape({-1}));
}

std::string generate(const std::function<at::Tensor(const at::Tensor&)>& forward,
                     const std::string& prompt, int64_t length, int64_t context, int64_t seed) {
  const at::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  std::string text = prompt;
  while (static_cast<int64_t>(text.size() - prompt.size()) < length) {
    const auto window = std::min<int64_t>(static_cast<int64_t>(text.size()), context);
    at::Tensor bytes = at::empty({1, window}, at::kLong);
    std::transform(text.end() - window, text.end(), bytes.mutable_data_ptr<int64_t>(),
                   [](char byte) { return static_cast<unsigned char>(byte); });
    const at::Tensor last = forward(bytes)[0][window - 1].to(at::kFloat);
    const at::Tensor drawn =
        at::multinomial(at::softmax(last / kTemperature, -1), 1, false, generator);
    text += static_cast<char>(drawn.item<int64_t>());
  }
  return text;
}

}  // namespace tandem::cli
