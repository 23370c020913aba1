#include "training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <tandem/tandem.h>
#include <tandem/weights.h>
#include <torch/nn/utils/clip_grad.h>

#include <chrono>
#include <cmath>
#include <numbers>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "program/errors.h"
#include "program/memory.h"
#include "program/recipes.h"

namespace tandem::apps {

namespace {

constexpr double kFirstDecay = 0.9, kSecondDecay = 0.95;  // decay of AdamW's moments
constexpr double kFinalLearningRate = 0.1;                // relative to the highest
constexpr int64_t kValidationBatches = 16;
constexpr int64_t kPromptBytes = 64;

/// The dtype of a run: its name, if that is a dtype, else the option.
at::ScalarType dtype_of(const TrainOptions& options, const std::string& run) {
  const bool is_named = run == "float32" || run == "bfloat16";
  return (is_named ? run : options.dtype) == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

double bits(const at::Tensor& nats) { return nats.item<double>() / std::numbers::ln2; }

/// The state of the random generator that stochastic ops draw from.
at::Tensor generator_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

}  // namespace

Training::Training(const TrainOptions& options, const std::string& run, const TextData& text)
    : options_(options),
      text_(text),
      recipe_(recipe_named(run)),
      model_(options.gpt(), run == "plain" ? Modules::plain : Modules::tandem,
             dtype_of(options, run)),
      masters_([&] {
        model_.initialize(options.seed);
        std::vector<at::Tensor> masters;
        for (const auto& [name, parameter] : model_.parameters()) {
          const bool same = parameter.scalar_type() == at::kFloat;
          masters.push_back(same ? parameter
                                 : parameter.detach().to(at::kFloat).set_requires_grad(true));
        }
        return masters;
      }()),
      optimizer_(make_optimizer()) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(static_cast<uint64_t>(options.seed));
}

/// An optimizer that decays matrices only: decaying norm weights and biases to zero would change
/// their meaning.
torch::optim::AdamW Training::make_optimizer() const {
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& master : masters_)
    (master.dim() >= 2 ? matrices : vectors).push_back(master);
  const auto settings = [&](double weight_decay) {
    torch::optim::AdamWOptions settings(options_.learning_rate);
    settings.betas({kFirstDecay, kSecondDecay}).weight_decay(weight_decay);
    return settings;
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), std::make_unique<torch::optim::AdamWOptions>(
                                               settings(options_.weight_decay)));
  groups.emplace_back(std::move(vectors),
                      std::make_unique<torch::optim::AdamWOptions>(settings(0)));
  return torch::optim::AdamW(groups, settings(0));
}

/// Rises linearly for `warmup` steps, then falls along half a cosine.
double Training::learning_rate(int64_t step) const {
  const auto done = static_cast<double>(step + 1), warmup = static_cast<double>(options_.warmup);
  if (done <= warmup) return options_.learning_rate * done / warmup;
  const double share =
      (done - warmup) / std::max(static_cast<double>(options_.steps) - warmup, 1.0);
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * share));
  return options_.learning_rate * (kFinalLearningRate + (1 - kFinalLearningRate) * cosine);
}

at::Tensor Training::forward(const at::Tensor& bytes) {
  std::optional<Autocast> region;
  if (recipe_) region.emplace(true, *recipe_);
  // Everything that writes parameters here changes their versions.
  const WeightsUnchanged nothing_else_writes;
  return model_.forward(bytes);
}

at::Tensor Training::loss(const Batch& batch) {
  return cross_entropy(forward(batch.inputs), batch.targets);
}

StepMetrics Training::step(int64_t index) {
  const auto begin = std::chrono::steady_clock::now();
  const at::Tensor loss = this->loss(text_.training_batch(options_.batch, options_.seed, index));
  loss.backward();
  const NamedTensors& parameters = model_.parameters();
  for (size_t i = 0; i < masters_.size(); ++i) {
    at::Tensor& gradient = parameters[i].tensor.mutable_grad();
    if (masters_[i].is_same(parameters[i].tensor) || !gradient.defined()) continue;
    masters_[i].mutable_grad() = gradient.to(at::kFloat);
    gradient.reset();
  }
  const double norm = torch::nn::utils::clip_grad_norm_(masters_, options_.clip);
  const double rate = learning_rate(index);
  for (auto& group : optimizer_.param_groups()) group.options().set_lr(rate);
  optimizer_.step();
  optimizer_.zero_grad();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < masters_.size(); ++i) {
    if (!masters_[i].is_same(parameters[i].tensor)) parameters[i].tensor.copy_(masters_[i]);
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  return {bits(loss), norm, rate, taken.count()};
}

double Training::validation_bits_per_byte() {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (int64_t i = 0; i < kValidationBatches; ++i)
    sum += bits(loss(text_.validation_batch(options_.batch, i, kValidationBatches)));
  return sum / kValidationBatches;
}

double Training::saved_bytes_per_token() {
  std::unordered_set<const void*> storages;
  for (const auto& [name, parameter] : model_.parameters())
    storages.insert(parameter.storage().unsafeGetStorageImpl());
  const Batch batch = text_.training_batch(options_.batch, options_.seed, 0);
  at::Tensor kept_alive;
  const int64_t bytes =
      saved_for_backward_bytes([&] { kept_alive = loss(batch); },
                               [&](const void* storage) { return storages.contains(storage); });
  return static_cast<double>(bytes) / static_cast<double>(options_.step_tokens());
}

std::string Training::sample(int64_t length) {
  const auto next_logits = [&](const at::Tensor& bytes) { return forward(bytes); };
  return generate(next_logits, text_.prompt(std::min(kPromptBytes, options_.context)), length,
                  options_.context, options_.seed);
}

NamedTensors Training::parameters() const {
  NamedTensors named;
  for (size_t i = 0; i < masters_.size(); ++i)
    named.push_back({model_.parameters()[i].name, masters_[i].detach()});
  return named;
}

NamedTensors Training::state() const {
  NamedTensors state = parameters();
  for (size_t i = 0; i < masters_.size(); ++i) {
    const auto found = optimizer_.state().find(masters_[i].unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) continue;  // before the first step
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*found->second);
    const std::string& name = model_.parameters()[i].name;
    state.push_back({name + ".first_moment", moments.exp_avg()});
    state.push_back({name + ".second_moment", moments.exp_avg_sq()});
  }
  for (const auto& [name, buffer] : model_.buffers()) state.push_back({name, buffer});
  state.push_back({"random_state", generator_state()});
  return state;
}

void Training::restore(const NamedTensors& state, int64_t steps) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& [name, tensor] : state) by_name.emplace(name, tensor);
  const auto take = [&](const std::string& name, at::IntArrayRef sizes, at::ScalarType dtype) {
    const auto found = by_name.find(name);
    const bool present = found != by_name.end();
    if (!present || found->second.sizes() != sizes || found->second.scalar_type() != dtype) {
      throw UserError("expected " + name + " with shape " + c10::str(sizes) +
                      " in the checkpoint, got " +
                      (present ? c10::str(found->second.sizes()) : std::string("no such tensor")) +
                      ". It belongs to another model: start again without --resume.");
    }
    return found->second;
  };
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < masters_.size(); ++i) {
    const auto& [name, parameter] = model_.parameters()[i];
    masters_[i].copy_(take(name, masters_[i].sizes(), at::kFloat));
    if (!masters_[i].is_same(parameter)) parameter.copy_(masters_[i]);
    if (steps == 0) continue;
    auto moments = std::make_unique<torch::optim::AdamWParamState>();
    moments->step(steps);
    moments->exp_avg(take(name + ".first_moment", masters_[i].sizes(), at::kFloat));
    moments->exp_avg_sq(take(name + ".second_moment", masters_[i].sizes(), at::kFloat));
    optimizer_.state()[masters_[i].unsafeGetTensorImpl()] = std::move(moments);
  }
  if (recipe_ && steps > 0) forward(at::zeros({1, 1}, at::kLong));  // creates the recipe's state
  for (const auto& [name, buffer] : model_.buffers())
    buffer.copy_(take(name, buffer.sizes(), buffer.scalar_type()));
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(take("random_state", generator_state().sizes(), at::kByte));
}

}  // namespace tandem::apps
