#include "pipeline/op_call.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "autograd/call.h"
#include "autograd/direct.h"
#include "executor/executor.h"
#include "kernel_ops/weights/weights.h"
#include "pipeline/on_demand.h"
#include "planner/planner.h"
#include "planner/program.h"
#include "planner/slice.h"
#include "quantization/recipe.h"

namespace tandem {

namespace {

/// Composite if something differentiates the operations of forward, as for a pipeline.
Path path_of(const Arguments& arguments) {
  if (is_direct(arguments)) return Path::direct;
  const auto& included = c10::impl::tls_local_dispatch_key_set().included_;
  const bool is_transformed = included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
                              included.has(c10::DispatchKey::Tracer);
  const auto differs = [](const at::Tensor& tensor) {
    return tensor.defined() && has_tangent(tensor);
  };
  return is_transformed || std::ranges::any_of(arguments.inputs, differs) ||
                 std::ranges::any_of(arguments.params, differs)
             ? Path::composite
             : Path::dispatch;
}

PlanKey::TensorTraits traits_of(const at::Tensor& tensor, bool requested) {
  return {true, requested && tensor.is_floating_point(), tensor.scalar_type(), tensor.device()};
}

/// An absent parameter gets the traits of `other`; a step that reads it raises.
void add_params(PlanKey& key, const Arguments& arguments, const std::vector<bool>& requested,
                const PlanKey::TensorTraits& other) {
  for (size_t i = 0; i < arguments.params.size(); ++i) {
    PlanKey::TensorTraits traits = other;
    traits.requires_grad = requested[i];
    if (const at::Tensor& param = arguments.params[i]; param.defined())
      traits = traits_of(param, requested[i]);
    key.add(traits);
  }
  for (const auto& [place, codes] : arguments.quantized) key.add_codes(place, codes);
}

const OperandTable* operands_of(const Plan& plan) {
  return plan.backward_fusions ? &plan.backward_fusions->operands[0] : nullptr;
}

/// What backward steps read of a context value: the codes of a tensor, or its numbers.
struct ReadOfContext {
  std::vector<Value> codes;
  bool numbers = false;
};
ReadOfContext read_of_context(const Steps& steps, const Plan& plan, std::string_view name,
                              Value numbers, const Codes* codes) {
  ReadOfContext found;
  for (const Step& step : steps)
    for (size_t i = 0; i < step.reads.size(); ++i) {
      if (!exists(step.reads[i])) continue;
      found.numbers |= step.reads[i] == numbers;
      if (step.read_names[i] != name) continue;
      const Type& type = plan.types[index_of(step.reads[i])];
      if (type.format == Format::codes && codes != nullptr && type.quantizer == codes->quantizer &&
          codes->has(type.direction))
        found.codes.push_back(step.reads[i]);
      else
        found.numbers = true;
    }
  return found;
}

/// The value behind the name of an operand or result.
Value value_of(const OperandTable& operands, std::string_view name) {
  return operands.value(position(operands.kind().operands, name));
}

}  // namespace

OpResults op_forward(const std::string& description, at::TensorList inputs, at::TensorList params) {
  const Arguments arguments{.inputs = inputs,
                            .params = params,
                            .workspaces = {},
                            .quantized = quantized_among(inputs, params)};
  PlanKey key({.grad_mode = true, .autocast_dtype = autocast_dtype_of(inputs[0].device().type())},
              inputs.size());
  for (const at::Tensor& tensor : inputs) key.add(traits_of(tensor, true));
  add_params(key, arguments, std::vector<bool>(params.size(), true), traits_of(inputs[0], true));
  const auto program = program_of(description);
  const auto plan = program->plan_for(key);
  const NoAutocast no_autocast;
  const Path path = path_of(arguments);
  std::optional<c10::AutoGradMode> no_grad;
  if (path != Path::composite) no_grad.emplace(false);
  OnDemand values(*plan, arguments, path);
  for (const Step& step : plan->forward) values.run(step);
  OpResults results;
  for (const Value output : plan->outputs) results.outputs.push_back(values.frame().tensor(output));
  const OperandTable* operands = operands_of(*plan);
  for (const std::string_view name : program->description().ops[0].kind->def.context) {
    const Value value = operands == nullptr ? Value::none : value_of(*operands, name);
    results.context.push_back(exists(value) ? values.frame().whole(value) : at::Tensor());
  }
  return results;
}

std::vector<at::Tensor> op_backward(const std::string& description, const OpContext& context,
                                    at::TensorList gradients, at::TensorList params) {
  const auto program = program_of(description);
  const OpKind& kind = *program->description().ops[0].kind;
  const size_t inputs = 1 + program->description().extra_input_count();
  const auto given =
      std::ranges::find_if(gradients, [](const at::Tensor& tensor) { return tensor.defined(); });
  std::vector<at::Tensor> results(inputs + params.size());
  if (given == gradients.end()) return results;
  const std::vector<at::Tensor> nothing(inputs);  // the context holds x and extra inputs
  const Arguments arguments{.inputs = nothing,
                            .params = params,
                            .workspaces = {},
                            .quantized = quantized_among(nothing, params)};
  PlanKey key({.grad_mode = true, .autocast_dtype = context.dtype}, inputs);
  for (size_t i = 0; i < inputs; ++i) {
    const bool is_index = std::ranges::find(kind.indices, i) != kind.indices.end();
    key.add({true, context.requested[i] && !is_index, is_index ? at::kLong : context.dtype,
             given->device()});
  }
  const std::vector<bool> of_params(context.requested.begin() + static_cast<int64_t>(inputs),
                                    context.requested.end());
  add_params(key, arguments, of_params, {true, false, context.dtype, given->device()});
  const auto plan = program->plan_for(key);
  const OperandTable* operands = operands_of(*plan);
  if (operands == nullptr) return results;
  BackwardMask mask;
  for (size_t i = 0; i < plan->output_gradients.size(); ++i)
    mask.given.push_back(exists(plan->output_gradients[i]) && gradients[i].defined());
  for (const Value gradient : plan->gradients) mask.requested.push_back(exists(gradient));
  const auto backward = backward_plan(*plan, mask);
  std::vector<at::Tensor> tensors(gradients.begin(), gradients.end());
  const std::vector<QuantizedArgument> quantized = quantized_among(context.saved);
  std::vector<ReadOfContext> read;
  for (size_t i = 0; i < context.saved.size(); ++i) {
    const auto found = std::ranges::find(quantized, i, &QuantizedArgument::place);
    read.push_back(read_of_context(backward->steps, *plan, kind.def.context[i],
                                   value_of(*operands, kind.def.context[i]),
                                   found == quantized.end() ? nullptr : &found->codes));
    if (found == quantized.end() || read[i].numbers) tensors.push_back(context.saved[i]);
  }
  const NoAutocast no_autocast;
  const c10::AutoGradMode no_grad(false);
  const Path path =
      is_direct(
          {.inputs = tensors, .params = params, .workspaces = {}, .quantized = arguments.quantized})
          ? Path::direct
          : Path::dispatch;
  OnDemand values(*plan, arguments, path);
  for (size_t i = 0; i < context.saved.size(); ++i)  // a parameter that was not saved is passed
    if (context.saved[i].defined() && (read[i].codes.empty() || read[i].numbers))
      values.set(value_of(*operands, kind.def.context[i]), context.saved[i]);
  for (const auto& [place, codes] : quantized)
    for (const Value value : read[place].codes) values.frame().set_codes(value, codes);
  for (const ResultDef& result : kind.def.results)
    if (const Value value = value_of(*operands, result.name);
        result.kind == ResultDef::shape && exists(value))
      values.set_sizes(value, context.sizes);
  for (size_t i = 0; i < plan->output_gradients.size(); ++i)
    if (const Value value = plan->output_gradients[i]; mask.given[i]) {
      values.set(value, gradients[i].to(plan->types[index_of(value)].dtype));
      values.draw_like(value);
    }
  for (const Step& step : backward->steps) values.run(step);
  for (size_t i = 0; i < results.size(); ++i)
    if (const Value gradient = backward->gradients[i]; exists(gradient))
      results[i] = values.frame().tensor(gradient);
  return results;
}

std::vector<WorkspaceSpec> workspace_specs(const std::string& description,
                                           const std::vector<PlanKey::TensorTraits>& inputs,
                                           at::TensorList params) {
  const PlanKey::Call call{.grad_mode = c10::GradMode::is_enabled(),
                           .traced = true,
                           .autocast_dtype = autocast_dtype_of(inputs[0].device.type())};
  PlanKey key(call, inputs.size());
  for (const PlanKey::TensorTraits& traits : inputs) key.add(traits);
  for (const at::Tensor& param : params) key.add(param, call.grad_mode);
  std::vector<WorkspaceSpec> specs;
  for (const CachedParams& cached : cached_params(program_of(description)->description(), key))
    specs.push_back({cached.params, cached.quantizer->text, cached.parts});
  return specs;
}

std::vector<at::Tensor> make_workspace(at::TensorList weight, const std::string& quantizer,
                                       GroupMask parts, kernel_ops::CodesWere why) {
  std::vector<at::Tensor> tensors;
  std::ranges::copy_if(kernel_ops::make_workspace(
                           weight, tandem::quantizer(std::string_view(quantizer)), parts, why),
                       std::back_inserter(tensors), &at::Tensor::defined);
  return tensors;
}

std::string quantizer_text(const std::string& recipe, Role role, std::string_view kind) {
  const auto parsed = recipe_from_json(nlohmann::json::parse(recipe));
  TORCH_INTERNAL_ASSERT(parsed.has_value());
  const Quantizer* const quantizer = quantizer_of(*parsed, {.role = role, .kind = kind});
  return quantizer == nullptr ? std::string() : quantizer->text;
}

}  // namespace tandem
