#include "gpt.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/normal.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <cmath>

namespace tandem::apps {

namespace {

constexpr double kInitialDeviation = 0.02;
constexpr double kTemperature = 0.8;

}  // namespace

Gpt::Gpt(const GptConfig& config, Modules modules, at::ScalarType dtype) {
  embedding_ = at::empty({kVocabulary, config.hidden}, dtype).set_requires_grad(true);
  parameters_.push_back({"embedding.weight", embedding_});
  const bool is_plain = modules == Modules::plain;
  for (int64_t i = 0; i < config.layers; ++i)
    parts_.emplace_back("layers." + std::to_string(i), is_plain ? make_plain_layer(config, dtype)
                                                                : make_tandem_layer(config, dtype));
  parts_.emplace_back("head",
                      is_plain ? make_plain_head(config, dtype) : make_tandem_head(config, dtype));
  for (const auto& [prefix, part] : parts_)
    for (const auto& [name, tensor] : part->parameters())
      parameters_.push_back({prefix + "." + name, tensor});
}

at::Tensor Gpt::forward(const at::Tensor& bytes) {
  at::Tensor x = at::embedding(embedding_, bytes);
  for (const auto& [name, part] : parts_) x = part->forward(x);
  return x;
}

void Gpt::initialize(int64_t seed) {
  const at::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  const auto layers = static_cast<double>(parts_.size() - 1);
  const double residual_deviation = kInitialDeviation / std::sqrt(2.0 * layers);
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
  for (const auto& [prefix, part] : parts_)
    for (const auto& [name, tensor] : part->buffers()) all.push_back({prefix + "." + name, tensor});
  return all;
}

void Gpt::watch(bool on) {
  int64_t number = 1;
  for (const auto& [name, part] : parts_) part->watch(on ? number++ : 0);
}

std::string Gpt::product_at(int64_t pipeline, size_t op) const {
  const std::string& part = parts_[static_cast<size_t>(pipeline - 1)].first;
  return part == "head" ? part : part + "." + product_of_layer(op);
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

}  // namespace tandem::apps
