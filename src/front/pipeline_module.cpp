#include "tandem/pipeline_module.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/serialize/input-archive.h>

#include <algorithm>
#include <array>
#include <deque>
#include <span>
#include <utility>

#include "front/describe.h"
#include "kernel_ops/quantize/delayed.h"
#include "ops/deferred.h"
#include "pipeline/pipeline.h"
#include "pipeline/verify.h"

namespace tandem {

namespace {
constexpr std::array kDirections = {"forward", "backward"};
}  // namespace

/// The state of delayed scaling in one direction. Its dtypes do not follow the dtype of its owner.
struct ScalingBuffers : public torch::nn::Module {
  ScalingBuffers(int64_t slots, int64_t history_length, c10::Device device)
      : torch::nn::Module("DelayedScalingState") {
    const c10::InferenceMode no_inference(false);  // calls in other modes write it
    const at::TensorOptions options = at::TensorOptions().dtype(at::kFloat).device(device);
    scale = register_buffer("scale", at::ones({slots}, options));
    amax_history = register_buffer("amax_history", at::zeros({history_length, slots}, options));
    pending = at::zeros({1}, options.dtype(at::kLong));
  }
  void to(torch::Dtype, bool) override {}
  void to(torch::Device device, torch::Dtype, bool non_blocking) override {
    to(device, non_blocking);
  }
  void to(torch::Device device, bool non_blocking) override {
    torch::nn::Module::to(device, non_blocking);
    pending = pending.to(device, non_blocking);
  }

  at::Tensor scale, amax_history;
  /// The number of the region whose amaxes are pending. It means nothing in another process, so
  /// checkpoints do not hold it.
  at::Tensor pending;
};

/// The operands of delayed gradients, by backward, the oldest first.
struct LeftByBackward {
  using Entry = std::vector<at::Tensor>;
  using Weights = DescribedOps::DelayedWeights;

  explicit LeftByBackward(std::vector<Weights> delayed)
      : weights(std::move(delayed)), entries(weights.size()) {
    for (size_t w = 0; w < weights.size(); ++w)
      for (size_t place = 0; place < weights[w].left(); ++place) places.emplace_back(w, place);
  }

  /// Returns a tensor for backward to fill. Backward requests the tensors of one entry in their
  /// order.
  at::Tensor tensor(size_t i) {
    thread_local std::weak_ptr<Entry> filling;
    const auto [w, place] = places[i];
    if (place == 0) {
      const auto entry = std::make_shared<Entry>();
      for (size_t each = 0; each < weights[w].left(); ++each) entry->push_back(at::empty({0}));
      filling = entry;
      const std::lock_guard<std::mutex> lock(mutex);
      entries[w].push_back(entry);
    }
    return (*filling.lock())[place];
  }

  /// Removes and returns the oldest entry that backward filled; a failed backward leaves empty
  /// ones.
  Entry pop(size_t w) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto& list = entries[w]; !list.empty();) {
      const std::shared_ptr<Entry> entry = list.front();
      list.pop_front();
      if (entry->back().numel() != 0) return *entry;
    }
    TORCH_CHECK(false, "backward_dw: expected a backward before it whose gradients of weights are ",
                "delayed, got none. Call backward() first.");
  }

  const std::vector<Weights> weights;
  /// For each tensor the index of its weights, and its index in the entry.
  std::vector<std::pair<size_t, size_t>> places;
  std::mutex mutex;
  std::vector<std::deque<std::shared_ptr<Entry>>> entries;
};

namespace {

/// Calls `work` with the indices of each group of parameters that is joined to one.
template <typename Work>
void for_each_join(const Op& op, Work&& work) {
  for (const BasicOp& basic : op.basic_ops) {
    auto first = basic.parameters.begin();
    for (const size_t count : basic.joins)
      work(std::span(std::exchange(first, first + static_cast<std::ptrdiff_t>(count)), count));
  }
}

/// Hands out the rows of a tensor as consecutive views.
class RowsOf {
 public:
  explicit RowsOf(at::Tensor whole) : whole_(std::move(whole)) {}
  at::Tensor next(int64_t rows) { return whole_.narrow(0, std::exchange(row_, row_ + rows), rows); }

 private:
  at::Tensor whole_;
  int64_t row_ = 0;
};

bool lie_together(at::TensorList parts) {
  int64_t end = parts[0].storage_offset();
  for (const at::Tensor& part : parts)
    if (!part.is_alias_of(parts[0]) || !part.is_contiguous() ||
        part.storage_offset() != std::exchange(end, end + part.numel()))
      return false;
  return true;
}

/// Creates tensors for the parameters that the op has no tensor for. Parameters that are joined to
/// one lie behind each other in one memory.
std::vector<at::Tensor> empty_parameters(const Op& op, const at::TensorOptions& options) {
  std::vector<at::Tensor> made(op.parameters.size());
  for_each_join(op, [&](std::span<const size_t> places) {
    std::vector<int64_t> sizes = op.parameters[places[0]].shape;
    sizes[0] = 0;
    for (const size_t place : places) sizes[0] += op.parameters[place].shape[0];
    RowsOf memory(at::empty(sizes, options));
    for (const size_t place : places)
      made[place] = memory.next(op.parameters[place].shape[0]).detach();
  });
  for (size_t place = 0; place < made.size(); ++place) {
    const ParameterSpec& spec = op.parameters[place];
    if (spec.tensor.defined()) {
      made[place] = at::Tensor();
    } else if (!made[place].defined()) {
      made[place] = at::empty(spec.shape, options);
    }
  }
  return made;
}

/// The ops without main_grads and delayed gradients, so that backward returns all gradients.
std::vector<Op> with_gradients(std::vector<Op> ops) {
  for (Op& op : ops) {
    for (BasicOp& basic : op.basic_ops)
      std::erase_if(basic.options, [](const auto& option) { return option.first == kDelayWgrad; });
    for (size_t place = 0; place < op.parameters.size(); ++place) {
      if (!op.parameters[place].main_grad.defined()) continue;
      op.parameters[place].main_grad = at::Tensor();
      for (BasicOp& basic : op.basic_ops)
        if (std::ranges::count(basic.parameters, place) != 0)
          std::erase_if(basic.options,
                        [](const auto& option) { return option.first == kAccumulateIntoMainGrad; });
    }
  }
  return ops;
}

}  // namespace

PipelineModule::PipelineModule(const char* name, const std::vector<Op>& ops, Names names,
                               const at::TensorOptions& options,
                               const std::vector<std::shared_ptr<PipelineModule>>& owners)
    : torch::nn::Module(name), ops_(ops) {
  DescribedOps described = describe(ops);
  pipeline_ = std::make_unique<Pipeline>(std::move(described.text));  // throws first of all
  last_ = pipeline_.get();
  main_grads_ = std::move(described.main_grads);
  if (!described.delayed.empty())
    left_ = std::make_shared<LeftByBackward>(std::move(described.delayed));
  if (!main_grads_.empty() || left_) ops_to_verify_ = describe(with_gradients(ops)).text;
  for (size_t i = 0; i < ops.size(); ++i) {
    const std::shared_ptr<PipelineModule> owner = i < owners.size() ? owners[i] : nullptr;
    const bool has_state = described.slots[i].forward + described.slots[i].backward != 0;
    const bool makes = std::ranges::any_of(
        ops[i].parameters, [](const ParameterSpec& spec) { return !spec.tensor.defined(); });
    std::shared_ptr<torch::nn::Module> child;
    if (names == Names::by_place && (makes || (has_state && !owner)))
      child = register_module(std::to_string(i), std::make_shared<torch::nn::Module>(ops[i].name));
    torch::nn::Module& holder = child ? *child : *this;
    const std::vector<at::Tensor> made = empty_parameters(ops[i], options);
    for (size_t place = 0; place < made.size(); ++place) {
      ParameterSpec& spec = ops_[i].parameters[place];
      if (spec.tensor.defined()) continue;
      TORCH_CHECK_VALUE(spec.init, ops[i].name, ": expected a function that gives ", spec.name,
                        " its first values, got none. Use tandem::init::zeros() or another.");
      spec.tensor = made[place];
      spec.init(spec.tensor);
      holder.register_parameter(spec.name, spec.tensor);
    }
    if (has_state)
      state_owners_.push_back({owner,
                               child ? std::to_string(i) : "",
                               child,
                               {described.slots[i].forward, described.slots[i].backward}});
  }
  for (const auto& [op, place] : described.parameters)
    parameters_.push_back(ops_[op].parameters[place].tensor);
}

PipelineModule::~PipelineModule() = default;

Pipeline& PipelineModule::pipeline_writing(const std::vector<Written>& written) {
  if (written.empty()) return *pipeline_;
  std::vector<std::string> options;
  for (const Written& each : written) options.emplace_back(each.option);
  const std::lock_guard<std::mutex> lock(writing_mutex_);
  const auto found = std::ranges::find(writing_, options, &Writing::options);
  if (found != writing_.end()) return *found->pipeline;
  std::vector<Op> ops = ops_;
  OptionValues& own = ops[0].basic_ops[0].options;
  for (const std::string& option : options) {
    std::erase_if(own, [&](const auto& known) { return known.first == option; });
    own.emplace_back(option, true);
  }
  writing_.push_back({options, std::make_unique<Pipeline>(describe(ops).text)});
  Pipeline& made = *writing_.back().pipeline;
  made.set_memory_budget(pipeline_->memory_budget());
  made.set_watched(watched_);
  return made;
}

std::vector<at::Tensor> PipelineModule::run(const at::Tensor& x, at::TensorList extra_inputs,
                                            const std::vector<Written>& written) {
  std::vector<at::Tensor> inputs{x};
  inputs.insert(inputs.end(), extra_inputs.begin(), extra_inputs.end());
  Buffers buffers = Buffers::of(main_grads_);
  if (left_ || !written.empty()) {
    const size_t left_end = main_grads_.size() + (left_ ? left_->places.size() : 0);
    std::vector<at::Tensor> given;
    for (const Written& each : written) given.push_back(each.tensor);
    buffers = {left_end + given.size(),
               [left = left_, main_grads = main_grads_, given, left_end](size_t i) {
                 return i < main_grads.size() ? main_grads[i]
                        : i < left_end        ? left->tensor(i - main_grads.size())
                                              : given[i - left_end];
               }};
  }
  Pipeline& pipeline = pipeline_writing(written);
  last_.store(&pipeline, std::memory_order_relaxed);
  const Outputs outputs =
      pipeline(inputs, parameters_, is_training(), std::move(buffers),
               [this](int64_t history_length) { return state(history_length); });
  return {outputs.begin(), outputs.end()};
}

void PipelineModule::backward_dw() {
  const c10::AutoGradMode no_grad(false);
  for (size_t w = 0; left_ && w < left_->weights.size(); ++w) {
    const auto& [parameters, main_grads, of_groups] = left_->weights[w];
    const bool is_frozen = std::ranges::none_of(
        parameters, [&](size_t place) { return parameters_[place].requires_grad(); });
    if (is_frozen) continue;
    const std::vector<at::Tensor> left = left_->pop(w);
    if (!of_groups && parameters.size() == 1 && main_grads[0].defined()) {
      ops::add_left_grad_weight(left, main_grads[0], /*accumulate=*/true);
      continue;
    }
    // Each group has its own weight, unless one packed parameter holds all weights.
    at::Tensor all = of_groups ? ops::left_grad_weights(left) : ops::left_grad_weight(left);
    if (of_groups && all.dim() != parameters_[parameters[0]].dim()) all = all.flatten(0, 1);
    RowsOf gradients(all);
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& weight = parameters_[parameters[i]];
      const at::Tensor own = gradients.next(weight.size(0));
      if (!weight.requires_grad()) continue;
      if (main_grads[i].defined())
        main_grads[i].add_(own);
      else if (weight.grad().defined())
        weight.mutable_grad().add_(own);
      else
        weight.mutable_grad() = own.to(weight.scalar_type());
    }
  }
}

std::string PipelineModule::explain(ExplainFormat format, const StepTimes& times) const {
  return last_.load()->explain(format, times);
}

void PipelineModule::set_memory_budget(std::optional<double> bytes_per_row) {
  pipeline_->set_memory_budget(bytes_per_row);
  for (const Writing& each : writing_) each.pipeline->set_memory_budget(bytes_per_row);
}

std::optional<double> PipelineModule::memory_budget() const { return pipeline_->memory_budget(); }

void PipelineModule::set_watched(int64_t number) {
  watched_ = number;
  pipeline_->set_watched(number);
  for (const Writing& each : writing_) each.pipeline->set_watched(number);
}

int64_t PipelineModule::saved_bytes() const { return last_.load()->saved_bytes(); }

VerifyReport PipelineModule::verify(const at::Tensor& x, at::TensorList extra_inputs) {
  std::vector<at::Tensor> inputs{x};
  inputs.insert(inputs.end(), extra_inputs.begin(), extra_inputs.end());
  std::unique_ptr<Pipeline> with_gradients;
  if (!ops_to_verify_.empty()) with_gradients = std::make_unique<Pipeline>(ops_to_verify_);
  return tandem::verify(with_gradients ? *with_gradients : *pipeline_, inputs, parameters_,
                        is_training(), /*masks=*/8,
                        [this](int64_t history_length) { return state(history_length); });
}

void PipelineModule::make_state(StateOwner& owner, int64_t history_length) {
  if (owner.directions[0]) return;
  torch::nn::Module& module = owner.module ? *owner.module : *this;
  const auto kept =
      module.register_module("recipe_state", std::make_shared<torch::nn::Module>("RecipeState"));
  const c10::Device device = parameters_.empty() ? at::kCPU : parameters_[0].device();
  for (size_t d = 0; d < kDirections.size(); ++d)
    owner.directions[d] = kept->register_module(
        kDirections[d], std::make_shared<ScalingBuffers>(owner.slots[d], history_length, device));
}

std::vector<at::Tensor> PipelineModule::state(int64_t history_length) {
  const std::lock_guard<std::mutex> lock(state_mutex_);  // several threads may make the first call
  std::vector<at::Tensor> state;
  for (StateOwner& owner : state_owners_) {
    if (owner.owner) {
      const std::vector<at::Tensor> kept = owner.owner->state(history_length);
      state.insert(state.end(), kept.begin(), kept.end());
      continue;
    }
    make_state(owner, history_length);
    for (const auto& direction : owner.directions) {
      at::Tensor& history = direction->amax_history;
      if (history.size(0) != history_length)
        history.set_data(resized_history(history, history_length));
      const ScalingState kept{direction->scale, history, direction->pending};
      for (const ScalingStateTensor& each : kScalingState) state.push_back(kept.*each.tensor);
    }
  }
  return state;
}

void PipelineModule::read_parameter(torch::serialize::InputArchive& archive,
                                    const std::string& parameter, at::Tensor& value) {
  archive.read(parameter, value);
}

void PipelineModule::load(torch::serialize::InputArchive& archive) {
  for (StateOwner& owner : state_owners_) {
    torch::serialize::InputArchive own, kept, direction;
    if (owner.owner) continue;  // the owner loads its state
    if (!owner.name.empty() && !archive.try_read(owner.name, own)) continue;
    if (!(owner.name.empty() ? archive : own).try_read("recipe_state", kept)) continue;
    at::Tensor history;
    if (!kept.try_read(kDirections[0], direction) ||
        !direction.try_read("amax_history", history, /*is_buffer=*/true))
      continue;
    make_state(owner, history.size(0));
    for (const auto& made : owner.directions)
      if (made->amax_history.size(0) != history.size(0))
        made->amax_history.set_data(resized_history(made->amax_history, history.size(0)));
  }
  for (auto& parameter : named_parameters(/*recurse=*/false))
    read_parameter(archive, parameter.key(), parameter.value());
  for (const auto& child : named_children()) {
    torch::serialize::InputArchive own;
    archive.read(child.key(), own);
    child.value()->load(own);
  }
  bring_together();
}

void PipelineModule::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(device, dtype, non_blocking);
  bring_together();
}
void PipelineModule::to(torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(dtype, non_blocking);
  bring_together();
}
void PipelineModule::to(torch::Device device, bool non_blocking) {
  torch::nn::Module::to(device, non_blocking);
  bring_together();
}

void PipelineModule::bring_together() {
  const c10::AutoGradMode no_grad(false);
  for (Op& op : ops_)
    for_each_join(op, [&](std::span<const size_t> places) {
      std::vector<at::Tensor> parts;
      for (const size_t place : places) parts.push_back(op.parameters[place].tensor);
      if (lie_together(parts)) return;
      RowsOf memory(at::cat(parts));
      for (at::Tensor& part : parts) part.set_data(memory.next(part.size(0)));
    });
}

}  // namespace tandem
