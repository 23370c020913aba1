#include "tandem/sequential.h"

#include <ATen/ops/empty.h>

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
    for (nlohmann::json& op : nlohmann::json::parse(ops[i].basic_ops)) {
      for (nlohmann::json& param : op["params"]) param = param.get<size_t>() + params;
      basic_ops.push_back(std::move(op));
    }
    params += ops[i].parameters.size();
    if (ops[i].parameters.empty()) continue;
    const auto holder =
        register_module(std::to_string(i), std::make_shared<torch::nn::Module>(ops[i].name));
    for (const ParameterSpec& spec : ops[i].parameters)
      holder->register_parameter(spec.name, initial(spec, options));
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
  const Outputs outputs = (*pipeline_)(inputs, parameter_list(), is_training());
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
  return tandem::verify(*pipeline_, inputs, parameter_list(), is_training());
}

std::vector<std::string> cpu_targets() { return kernels::supported_targets(); }

}  // namespace tandem
