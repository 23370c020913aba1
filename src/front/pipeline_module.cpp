#include "tandem/pipeline_module.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "front/describe.h"
#include "pipeline/pipeline.h"
#include "pipeline/verify.h"

namespace tandem {

PipelineModule::PipelineModule(const std::vector<Op>& ops, Names names,
                               const at::TensorOptions& options) {
  DescribedOps described = describe(ops);
  pipeline_ = std::make_unique<Pipeline>(std::move(described.text));  // refuses before all else
  main_grads_ = std::move(described.main_grads);
  std::vector<std::vector<at::Tensor>> tensors(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    const bool has_state = described.slots[i].forward + described.slots[i].backward != 0;
    const bool makes = std::ranges::any_of(
        ops[i].parameters, [](const ParameterSpec& spec) { return !spec.tensor.defined(); });
    std::shared_ptr<torch::nn::Module> child;
    if (names == Names::by_place && (makes || has_state))
      child = register_module(std::to_string(i), std::make_shared<torch::nn::Module>(ops[i].name));
    torch::nn::Module& holder = child ? *child : *this;
    for (const ParameterSpec& spec : ops[i].parameters) {
      at::Tensor& tensor = tensors[i].emplace_back(spec.tensor);
      if (tensor.defined()) continue;
      tensor = at::empty(spec.shape, options);
      spec.init(tensor);
      holder.register_parameter(spec.name, tensor);
    }
    if (has_state)
      state_owners_.push_back({child, described.slots[i].forward, described.slots[i].backward});
  }
  for (const auto& [op, place] : described.parameters) parameters_.push_back(tensors[op][place]);
}

PipelineModule::~PipelineModule() = default;

std::vector<at::Tensor> PipelineModule::run(const at::Tensor& x, at::TensorList extra_inputs) {
  std::vector<at::Tensor> inputs{x};
  inputs.insert(inputs.end(), extra_inputs.begin(), extra_inputs.end());
  const Outputs outputs =
      (*pipeline_)(inputs, parameters_, is_training(), Buffers::of(main_grads_),
                   [this](int64_t history_length) { return state(history_length); });
  return {outputs.begin(), outputs.end()};
}

std::string PipelineModule::explain(ExplainFormat format) const {
  return pipeline_->explain(format);
}

int64_t PipelineModule::saved_bytes() const { return pipeline_->saved_bytes(); }

VerifyReport PipelineModule::verify(const at::Tensor& x, at::TensorList extra_inputs) {
  std::vector<at::Tensor> inputs{x};
  inputs.insert(inputs.end(), extra_inputs.begin(), extra_inputs.end());
  return tandem::verify(*pipeline_, inputs, parameters_, is_training(), /*masks=*/8,
                        [this](int64_t history_length) { return state(history_length); });
}

std::vector<at::Tensor> PipelineModule::state(int64_t history_length) {
  std::vector<at::Tensor> state;
  for (const StateOwner& owner : state_owners_) {
    torch::nn::Module& module = owner.module ? *owner.module : *this;
    auto children = module.named_children();
    const auto kept = children.contains("recipe_state")
                          ? children["recipe_state"]
                          : module.register_module(
                                "recipe_state", std::make_shared<torch::nn::Module>("RecipeState"));
    for (const auto& [direction, slots] :
         {std::pair("forward", owner.forward), std::pair("backward", owner.backward)}) {
      children = kept->named_children();
      if (!children.contains(direction)) {
        const auto made = kept->register_module(
            direction, std::make_shared<torch::nn::Module>("DelayedScalingState"));
        made->register_buffer("scale", at::ones({slots}));
        made->register_buffer("amax_history", at::zeros({history_length, slots}));
        made->register_buffer("pending", at::zeros({1}, at::kLong));
      }
      auto buffers = kept->named_children()[direction]->named_buffers(/*recurse=*/false);
      if (at::Tensor& history = buffers["amax_history"]; history.size(0) != history_length)
        history.set_data(resized_history(history, history_length));
      for (const char* name : kScalingStateNames) state.push_back(buffers[name]);
    }
  }
  return state;
}

}  // namespace tandem
