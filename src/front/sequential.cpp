#include "tandem/sequential.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "kernels/targets.h"
#include "pipeline/pipeline.h"
#include "pipeline/verify.h"

namespace tandem {

namespace {

at::Tensor initial(const ParameterSpec& spec, const at::TensorOptions& options) {
  const at::Tensor tensor = at::empty(spec.shape, options);
  switch (spec.init) {
    case ParameterSpec::Init::zeros:
      return tensor.zero_();
    case ParameterSpec::Init::ones:
      return tensor.fill_(1);
    case ParameterSpec::Init::kaiming_uniform:
      break;
  }
  const double bound = 1 / std::sqrt(static_cast<double>(spec.shape.back()));
  return tensor.uniform_(-bound, bound);
}

}  // namespace

SequentialImpl::SequentialImpl(const std::vector<Op>& ops, const at::TensorOptions& options) {
  nlohmann::json basic_ops = nlohmann::json::array();
  size_t params = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    SlotCount slots;
    for (nlohmann::json& op : nlohmann::json::parse(ops[i].basic_ops)) {
      if (const SlotCount own = quantize_slots(op_def(op["op"].get<std::string>()));
          own.forward + own.backward != 0) {
        op["state"] = {state_owners_.size(), slots.forward, slots.backward};
        slots = {slots.forward + own.forward, slots.backward + own.backward};
      }
      for (nlohmann::json& param : op["params"]) param = param.get<size_t>() + params;
      basic_ops.push_back(std::move(op));
    }
    params += ops[i].parameters.size();
    const bool has_state = slots.forward + slots.backward != 0;
    if (ops[i].parameters.empty() && !has_state) continue;
    const auto holder =
        register_module(std::to_string(i), std::make_shared<torch::nn::Module>(ops[i].name));
    for (const ParameterSpec& spec : ops[i].parameters)
      holder->register_parameter(spec.name, initial(spec, options));
    if (has_state) state_owners_.push_back({holder, slots.forward, slots.backward});
  }
  pipeline_ = std::make_unique<Pipeline>(basic_ops.dump());
}

SequentialImpl::~SequentialImpl() = default;

std::vector<at::Tensor> SequentialImpl::parameter_list() const {
  return parameters(/*recurse=*/true);
}

std::vector<at::Tensor> SequentialImpl::forward(const at::Tensor& x, at::TensorList extra_inputs) {
  std::vector<at::Tensor> inputs{x};
  inputs.insert(inputs.end(), extra_inputs.begin(), extra_inputs.end());
  const Outputs outputs =
      (*pipeline_)(inputs, parameter_list(), is_training(), {},
                   [this](int64_t history_length) { return state(history_length); });
  return {outputs.begin(), outputs.end()};
}

at::Tensor SequentialImpl::forward(const at::Tensor& x) {
  const auto outputs = forward(x, {});
  TORCH_CHECK_VALUE(outputs.size() == 1, "Sequential: expected one output, got ", outputs.size(),
                    ". Call forward(x, extra_inputs), which returns all of them.");
  return outputs[0];
}

std::string SequentialImpl::explain(ExplainFormat format) const {
  return pipeline_->explain(format);
}

int64_t SequentialImpl::saved_bytes() const { return pipeline_->saved_bytes(); }

VerifyReport SequentialImpl::verify(const at::Tensor& x, at::TensorList extra_inputs) const {
  std::vector<at::Tensor> inputs{x};
  inputs.insert(inputs.end(), extra_inputs.begin(), extra_inputs.end());
  return tandem::verify(*pipeline_, inputs, parameter_list(), is_training(), /*masks=*/8,
                        [this](int64_t history_length) { return state(history_length); });
}

std::vector<at::Tensor> SequentialImpl::state(int64_t history_length) const {
  std::vector<at::Tensor> state;
  for (const StateOwner& owner : state_owners_) {
    auto children = owner.module->named_children();
    const auto kept = children.contains("recipe_state")
                          ? children["recipe_state"]
                          : owner.module->register_module(
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

std::vector<std::string> cpu_targets() { return kernels::supported_targets(); }

}  // namespace tandem
