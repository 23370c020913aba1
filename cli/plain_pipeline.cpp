#include "plain_pipeline.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>

#include <unordered_map>

namespace tandem::cli {

PlainPipeline::PlainPipeline(const Workload& workload) {
  const auto parameters = workload.pipeline->named_parameters();
  const auto find = [&](size_t index, const char* name) {
    const at::Tensor* found = parameters.find(std::to_string(index) + "." + name);
    return found ? *found : at::Tensor();
  };
  for (size_t i = 0; i < workload.parsed.ops.size(); ++i) {
    ops_.push_back({workload.parsed.ops[i], find(i, "weight"), find(i, "bias")});
  }
}

at::Tensor PlainPipeline::apply(const BoundOp& op, const at::Tensor& x) const {
  const std::string& kind = op.text.kind;
  if (kind == "linear") return at::linear(x, op.weight, op.bias);
  if (kind == "rms_norm")
    return at::rms_norm(x, op.weight.sizes(), op.weight, op.text.real(1, 1e-5));
  if (kind == "layer_norm")
    return at::layer_norm(x, op.weight.sizes(), op.weight, op.bias, op.text.real(1, 1e-5));
  if (kind == "gelu") return at::gelu(x, "tanh");
  if (kind == "silu") return at::silu(x);
  if (kind == "relu") return at::relu(x);
  if (kind == "dropout") return at::dropout(x, op.text.real(0, 0), /*train=*/true);
  if (kind == "constant_scale") return x * op.text.real(0, 1);
  if (kind == "swiglu" || kind == "geglu") {
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    return (kind == "swiglu" ? at::silu(halves[0]) : at::gelu(halves[0], "tanh")) * halves[1];
  }
  if (kind == "reshape") {
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < op.text.arguments.size(); ++i) sizes.push_back(op.text.whole(i));
    return x.reshape(sizes);
  }
  return x;
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
