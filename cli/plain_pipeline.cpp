#include "plain_pipeline.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>

#include <algorithm>
#include <unordered_map>

#include "front/describe.h"
#include "kernel_ops/unit/activation.h"
#include "ops/activation.h"

namespace tandem::cli {

namespace {

constexpr std::string_view kFunctionsOfTorch[] = {"linear",  "rms_norm",       "layer_norm",
                                                  "dropout", "constant_scale", "reshape"};

/// The function of an activation, or of a gated unit's first half. Empty for other ops, for units
/// with numbers and for interleaved halves.
std::string activation_of(const OpDef& def, const OpText& text) {
  if ((def.family != "activation" && def.family != "glu") || !text.arguments.empty()) return {};
  const Options options = def.parse(def, {});
  const std::string& function = static_cast<const ops::ActivationOptions*>(options.get())->function;
  return function.find(':') == std::string::npos ? function : "";
}

}  // namespace

PlainPipeline::PlainPipeline(const Workload& workload) {
  const auto parameters = workload.pipeline->named_parameters();
  for (size_t i = 0; i < workload.ops.size(); ++i) {
    BoundOp op{workload.parsed.ops[i], {}, {}, {}, {}, {}};
    for (const ParameterSpec& spec : workload.ops[i].parameters) {
      op.parameters.push_back(parameters[std::to_string(i) + "." + spec.name]);
      if (spec.name == "weight") op.weight = op.parameters.back();
      if (spec.name == "bias") op.bias = op.parameters.back();
    }
    if (std::ranges::find(kFunctionsOfTorch, op.text.kind) == std::end(kFunctionsOfTorch)) {
      const OpDef& def = op_def(op.text.kind);
      op.activation = activation_of(def, op.text);
      if (op.activation.empty() && def.inputs.size() == 1 && !def.forward.empty())
        op.composite = std::make_shared<Pipeline>(describe({workload.ops[i]}).text);
    }
    ops_.push_back(std::move(op));
  }
}

at::Tensor PlainPipeline::apply(const BoundOp& op, const at::Tensor& x) const {
  const std::string& kind = op.text.kind;
  if (kind == "linear") return at::linear(x, op.weight, op.bias);
  if (kind == "rms_norm" || kind == "layer_norm") {
    const auto gamma = op.text.has("zero_centered_gamma") ? op.weight + 1 : op.weight;
    const double eps = op.text.real(1, 1e-5);
    if (kind == "layer_norm") return at::layer_norm(x, gamma.sizes(), gamma, op.bias, eps);
    if (op.text.has("rounds_before_weight")) return at::rms_norm(x, gamma.sizes(), {}, eps) * gamma;
    return at::rms_norm(x, gamma.sizes(), gamma, eps);
  }
  if (kind == "dropout") return at::dropout(x, op.text.real(0, 0.5), /*train=*/true);
  if (kind == "constant_scale") return x * op.text.real(0, 1);
  if (kind == "reshape") return x.reshape(op.text.wholes());
  if (!op.activation.empty()) {
    if (op_def(kind).family == "activation") return kernel_ops::activation(op.activation, x);
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    return kernel_ops::activation(op.activation, halves[0]) * halves[1];
  }
  return op.composite ? op.composite->composite({x}, op.parameters, /*training=*/true)[0] : x;
}

std::vector<at::Tensor> PlainPipeline::forward(const at::Tensor& x,
                                               at::TensorList extra_inputs) const {
  std::vector<at::Tensor> outputs{x};
  std::unordered_map<std::string, at::Tensor> channels;
  size_t next_extra = 0;
  at::Tensor y = x;
  for (const BoundOp& op : ops_) {
    const std::string channel = op.text.channel();
    if (op.text.kind == "make_extra_output") {
      if (channel.empty()) outputs.push_back(y);
      channels[channel] = y;
    } else if (op.text.kind == "add_extra_input") {
      y = y + (channel.empty() ? extra_inputs[next_extra++] : channels[channel]);
    } else {
      y = apply(op, y);
    }
  }
  outputs.front() = y;
  return outputs;
}

}  // namespace tandem::cli
