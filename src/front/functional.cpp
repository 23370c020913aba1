#include "tandem/functional.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include "front/describe.h"
#include "pipeline/functional_call.h"
#include "quantization/recipe.h"

namespace tandem::functional {

struct Context::Inner {
  FunctionalContext context;
  /// The name of each gradient; empty for an extra input, which has none.
  std::vector<std::string> names;
  size_t outputs;
};

Context::Context(std::unique_ptr<Inner> inner) : inner_(std::move(inner)) {}
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;

int64_t Context::saved_bytes() const { return inner_->context.saved_bytes(); }

namespace {

using at::Tensor;
using Named = std::map<std::string, Tensor>;

/// An op and the tensors of its call.
struct Call {
  Op op;
  std::vector<Tensor> inputs;
  /// Parameters by their names in the op.
  Named parameters;
  const Common& common;
};

struct Described {
  FunctionalArguments arguments;
  std::vector<std::string> names;
};

Described described(const Call& call) {
  Op op = call.op;
  for (const auto& [weight, main_grad] : call.common.main_grads)
    op = op.with_main_grad(weight, main_grad);
  DescribedOps ops = describe({op});
  TORCH_CHECK_VALUE(ops.delayed.empty(), op.name, ": expected delay_wgrad_compute=false of a ",
                    "plain function, whose backward returns all gradients, got true. Use the ",
                    "module, which has backward_dw().");
  Described made;
  made.arguments.ops = std::move(ops.text);
  if (call.common.recipe) made.arguments.recipe = to_json(*call.common.recipe).dump();
  made.arguments.inputs = call.inputs;
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    made.names.push_back(i == 0 ? "x" : "");
    made.arguments.requested.push_back(i == 0 && call.common.needs_grad_x);
  }
  for (const DescribedOps::Parameter& parameter : ops.parameters) {
    made.names.push_back(op.parameters[parameter.place].name);
    made.arguments.params.push_back(call.parameters.at(made.names.back()));
    made.arguments.requested.push_back(call.common.needs_grad_parameters);
  }
  made.arguments.workspaces = call.common.weight_workspaces;
  made.arguments.state = call.common.recipe_state;
  made.arguments.buffers = std::move(ops.main_grads);
  return made;
}

Results forward_of(const Call& call) {
  FunctionalResults results = functional_forward(described(call).arguments);
  return {results.outputs[0],
          results.outputs.size() > 1 ? results.outputs[1] : Tensor(),
          std::move(results.workspaces),
          std::move(results.saved),
          std::move(results.read),
          std::move(results.carried)};
}

Context context_of(const Call& call, const Results& results) {
  const Described made = described(call);
  std::vector<Tensor> outputs{results.y};
  if (results.layernorm_output.defined()) outputs.push_back(results.layernorm_output);
  return Context(std::make_unique<Context::Inner>(
      Context::Inner{FunctionalContext(made.arguments, {.outputs = std::move(outputs),
                                                        .saved = results.saved,
                                                        .read = results.read,
                                                        .carried = results.carried,
                                                        .workspaces = results.weight_workspaces}),
                     made.names, results.layernorm_output.defined() ? size_t{2} : size_t{1}}));
}

Call call_of(const LinearArguments& a) {
  return {ops::linear(a.weight.size(1), a.weight.size(0),
                      {.bias = a.bias.defined(), .save_original_input = a.save_original_input}),
          {a.x},
          {{"weight", a.weight}, {"bias", a.bias}},
          a.common};
}

Call call_of(const LayerNormLinearArguments& a) {
  LayerNormLinearOptions options = a.options;
  options.bias = a.bias.defined();
  return {ops::layer_norm_linear(a.weight.size(1), a.weight.size(0), options),
          {a.x},
          {{"layer_norm_weight", a.layer_norm_weight},
           {"layer_norm_bias", a.layer_norm_bias},
           {"weight", a.weight},
           {"bias", a.bias}},
          a.common};
}

Call call_of(const LayerNormMLPArguments& a) {
  LayerNormMLPOptions options = a.options;
  options.bias = a.fc1_bias.defined();
  return {ops::layer_norm_mlp(a.fc1_weight.size(1), a.fc2_weight.size(1), options),
          {a.x},
          {{"layer_norm_weight", a.layer_norm_weight},
           {"layer_norm_bias", a.layer_norm_bias},
           {"fc1_weight", a.fc1_weight},
           {"fc1_bias", a.fc1_bias},
           {"fc2_weight", a.fc2_weight},
           {"fc2_bias", a.fc2_bias}},
          a.common};
}

Call call_of(const GroupedLinearArguments& a) {
  TORCH_CHECK_VALUE(!a.weights.empty(),
                    "grouped_linear: expected weights to be one matrix for each group, got none. "
                    "Pass one for each of m_splits.");
  TORCH_CHECK_VALUE(a.biases.empty() || a.biases.size() == a.weights.size(),
                    "grouped_linear: expected biases to be as many as weights, ", a.weights.size(),
                    ", or none, got ", a.biases.size(), ". Pass one for each group.");
  Named parameters;
  for (size_t g = 0; g < a.weights.size(); ++g) {
    parameters["weight" + std::to_string(g)] = a.weights[g];
    if (!a.biases.empty()) parameters["bias" + std::to_string(g)] = a.biases[g];
  }
  const ops::GroupedLinearOptions options{.num_groups = a.weights.size(),
                                          .bias = !a.biases.empty()};
  return {ops::grouped_linear(a.weights[0].size(1), a.weights[0].size(0), options),
          {a.x, a.m_splits},
          std::move(parameters),
          a.common};
}

}  // namespace

Results forward(const Arguments& arguments) {
  return std::visit([](const auto& own) { return forward_of(call_of(own)); }, arguments);
}

Context setup_context(const Arguments& arguments, const Results& results) {
  return std::visit([&](const auto& own) { return context_of(call_of(own), results); }, arguments);
}

Gradients backward(Context& context, const Tensor& grad_y, const Tensor& grad_layernorm_output,
                   bool retain) {
  auto& [inner, names, outputs] = context.inner();
  TORCH_CHECK_VALUE(outputs == 2 || !grad_layernorm_output.defined(),
                    "backward: expected a gradient of y alone, as no output of a norm was ",
                    "returned, got grad_layernorm_output. Leave it out.");
  std::vector<Tensor> gradients{grad_y, grad_layernorm_output};
  gradients.resize(outputs);
  const std::vector<Tensor> results = inner.backward(gradients, retain);
  Gradients named;
  for (size_t i = 0; i < results.size(); ++i)
    if (!names[i].empty()) named[names[i]] = results[i];
  return named;
}

}  // namespace tandem::functional
