#include "autograd/node.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/isnan.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "executor/executor.h"
#include "planner/planner.h"

namespace tandem {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

/// The argument that a value may be a view of, following reshapes of reshapes.
Value root_of(const Plan& plan, Value value) {
  while (exists(plan.types[index_of(value)].view_of)) value = plan.types[index_of(value)].view_of;
  return value;
}

const at::Tensor* argument_of(const Plan& plan, Value value, at::TensorList inputs,
                              at::TensorList params) {
  for (size_t i = 0; i < plan.inputs.size(); ++i)
    if (plan.inputs[i] == value) return &inputs[i];
  for (size_t i = 0; i < plan.params.size(); ++i)
    if (plan.params[i] == value) return &params[i];
  return nullptr;
}

void check_no_nan(Frame& frame, const Step& step) {
  for (const Value value : step.writes) {
    if (!exists(value) || frame.type(value).format != Format::plain ||
        !c10::isFloatingType(frame.type(value).dtype))
      continue;
    const at::Tensor& tensor = frame.tensor(value);
    TORCH_CHECK(!tensor.defined() || !at::isnan(tensor).any().item<bool>(),
                "pipeline: expected finite gradients, got NaN from step ", step.kind, " of op ",
                step.covers.empty() ? -1 : static_cast<int>(step.covers[0].op), ", which writes ",
                frame.type(value).name, ". Its inputs are the place to look.");
  }
}

}  // namespace

void PipelineBackward::save(Frame& frame, at::TensorList inputs, at::TensorList params,
                            at::TensorList workspaces) {
  const Plan& plan = *plan_;
  saved_.reserve(plan.kept.size());
  saved_at_.reserve(plan.kept.size());
  c10::SmallVector<const at::TensorImpl*, 16> seen;
  for (const Kept& kept : plan.kept) {
    const at::Tensor& tensor = frame.tensor(kept.value, kept.part);
    const auto known = std::find(seen.begin(), seen.end(), tensor.unsafeGetTensorImpl());
    saved_at_.push_back(static_cast<uint16_t>(known - seen.begin()));
    if (known != seen.end()) continue;
    seen.push_back(tensor.unsafeGetTensorImpl());
    SavedTensor& saved = saved_.emplace_back();
    const Value root = root_of(plan, kept.value);
    const at::Tensor* argument = argument_of(plan, root, inputs, params);
    if (argument != nullptr && tensor.is_same(*argument)) {
      saved.is_argument = true;
      saved.variable = SavedVariable(*argument, /*is_output=*/false);
    } else if (argument != nullptr && root != kept.value && tensor.is_alias_of(*argument)) {
      saved.is_argument = true;
      saved.variable = SavedVariable(*argument, /*is_output=*/false);
      saved.view = ViewGeometry{{tensor.sym_sizes().begin(), tensor.sym_sizes().end()},
                                {tensor.sym_strides().begin(), tensor.sym_strides().end()},
                                tensor.sym_storage_offset()};
    } else {
      saved.variable = SavedVariable(tensor, tensor.grad_fn().get() == this);
      if (!tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
        saved.bytes = static_cast<int64_t>(tensor.nbytes());
    }
  }
  workspaces_.assign(workspaces.begin(), workspaces.end());
  opaques_.resize(plan.opaques);
  shapes_.resize(plan.shapes);
  for (const Value value : plan.kept_opaque) {
    const uint16_t slot = plan.slot_of[index_of(value)];
    if (plan.types[index_of(value)].format == Format::shape) {
      shapes_[slot] = frame.shape(value);
      continue;
    }
    Opaque& opaque = frame.opaque(value);
    opaques_[slot].fields = opaque.fields;
    for (const at::Tensor& tensor :
         opaque.tensors) {  // behind the kept tensors, in order of kept_opaque
      SavedTensor& saved = saved_.emplace_back();
      if (!tensor.defined()) continue;
      bool is_argument = false;
      for (const at::TensorList list : {inputs, params})
        for (const at::Tensor& argument : list) is_argument |= tensor.is_same(argument);
      saved.is_argument = is_argument;
      saved.variable = SavedVariable(tensor, tensor.grad_fn().get() == this);
      if (!is_argument && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
        saved.bytes = static_cast<int64_t>(tensor.nbytes());
    }
    opaques_[slot].tensors.resize(opaque.tensors.size());
  }
}

at::Tensor PipelineBackward::as_saved(const SavedTensor& saved, at::Tensor tensor) {
  if (!saved.view) return tensor;
  return at::as_strided_symint(tensor, saved.view->sizes, saved.view->strides, saved.view->offset);
}

at::Tensor PipelineBackward::unpack(size_t saved, const compat::NodePtr& self) const {
  // Above autograd: the unpack hook of a checkpoint runs the forward of other modules here.
  return as_saved(saved_[saved], saved_[saved].variable.unpack(self));
}

int64_t PipelineBackward::saved_bytes() const {
  int64_t bytes = 0;
  for (const SavedTensor& saved : saved_) bytes += saved.bytes;
  return bytes;
}

std::vector<int64_t> PipelineBackward::kept_bytes() const {
  std::vector<int64_t> bytes;
  for (const uint16_t place : saved_at_) bytes.push_back(saved_[place].bytes);
  return bytes;
}

void PipelineBackward::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  saved_.clear();
  opaques_.clear();
  workspaces_.clear();
  is_released_ = true;
}

std::vector<bool> PipelineBackward::asked() const {
  std::vector<bool> asked(plan_->gradients.size());
  for (size_t i = 0; i < asked.size(); ++i)
    asked[i] = exists(plan_->gradients[i]) && task_should_compute_output(i);
  return asked;
}

BackwardMask PipelineBackward::mask_of(const variable_list& gradients,
                                       const std::vector<bool>& asked) const {
  BackwardMask mask{0, asked};
  for (size_t i = 0; i < gradients.size(); ++i) mask.given |= uint64_t{gradients[i].defined()} << i;
  return mask;
}

template <typename Unpack, typename Drop>
variable_list PipelineBackward::run(const variable_list& gradients, const std::vector<bool>& asked,
                                    Unpack&& unpack, Drop&& drop) {
  const Plan& plan = *plan_;
  variable_list results(plan.gradients.size());
  const BackwardMask mask = mask_of(gradients, asked);
  if (mask.given == 0)
    return results;  // an undefined gradient is answered with undefined gradients
  const BackwardPlan& backward = backward_plan(plan, mask);
  Frame frame(path_, plan.has_kernels, plan.types, plan.slot_of, plan.tensor_slots);
  frame.reserve_side_values(plan.opaques, plan.shapes);
  for (size_t i = 0; i < gradients.size(); ++i)
    if (exists(plan.output_gradients[i])) frame.tensor(plan.output_gradients[i]) = gradients[i];
  for (size_t i = 0; i < workspaces_.size(); ++i) frame.tensor(plan.workspaces[i]) = workspaces_[i];
  for (const Value value : plan.kept_opaque)
    if (plan.types[index_of(value)].format == Format::shape)
      frame.shape(value) = shapes_[plan.slot_of[index_of(value)]];
  const bool check_nan = torch::autograd::AnomalyMode::is_enabled() &&
                         torch::autograd::AnomalyMode::should_check_nan();
  for (const Step& step : backward.steps) {
    for (const Value value : step.reads) {
      if (!exists(value)) continue;
      if (frame.type(value).format == Format::opaque) {
        size_t next = plan.kept.empty()
                          ? 0
                          : size_t{*std::max_element(saved_at_.begin(), saved_at_.end())} + 1;
        for (const Value other : plan.kept_opaque) {
          if (plan.types[index_of(other)].format != Format::opaque) continue;
          const uint16_t slot = plan.slot_of[index_of(other)];
          if (other == value) {
            frame.opaque(value).fields = opaques_[slot].fields;
            for (size_t t = 0; t < opaques_[slot].tensors.size(); ++t)
              frame.opaque(value).tensors.push_back(unpack(next + t));
          }
          next += opaques_[slot].tensors.size();
        }
      } else if (const int16_t kept = plan.kept_at[index_of(value)];
                 kept >= 0 && !frame.tensor(value).defined()) {
        for (size_t k = static_cast<size_t>(kept);
             k < plan.kept.size() && plan.kept[k].value == value; ++k)
          frame.tensor(value, plan.kept[k].part) = unpack(saved_at_[k]);
      }
    }
    run_step(frame, step);
    for (const Value dead : step.dead)
      if (const int16_t kept = plan.kept_at[index_of(dead)]; kept >= 0)
        for (size_t k = static_cast<size_t>(kept);
             k < plan.kept.size() && plan.kept[k].value == dead; ++k)
          drop(saved_at_[k]);
    if (C10_UNLIKELY(check_nan)) check_no_nan(frame, step);
  }
  for (size_t i = 0; i < results.size(); ++i)
    if (exists(backward.gradients[i])) results[i] = frame.tensor(backward.gradients[i]);
  return results;
}

variable_list PipelineBackward::refuse_double_backward(const variable_list& gradients,
                                                       variable_list results) {
  // create_graph=True: these results carry no graph of theirs. Whoever differentiates them, with respect to whatever they depend on,
  // comes by a node that says so, instead of getting a gradient without their terms.
  torch::autograd::edge_list edges = next_edges();
  for (torch::autograd::Edge& edge : torch::autograd::collect_next_edges(gradients))
    edges.push_back(std::move(edge));
  const auto error = compat::make_node<torch::autograd::Error>(
      "pipeline: expected at most one backward, got a backward of the backward "
      "(create_graph=True). Use torch.func.grad or "
      "torch.func.hessian, which differentiate the composite form, or plain torch modules.",
      std::move(edges));
  for (at::Tensor& result : results) {
    if (!result.defined()) continue;
    result = result.detach();
    torch::autograd::create_gradient_edge(result, error);
  }
  return results;
}

variable_list PipelineBackward::apply(variable_list&& gradients) {
  const std::lock_guard<std::mutex> lock(mutex_);  // two threads may run, and free, one graph
  TORCH_CHECK(!is_released_,
              "pipeline: expected a graph that still holds its saved tensors, got one already used "
              "by backward(). ",
              "Pass retain_graph=True to the first backward().");
  const auto self = getptr();
  const bool keep = torch::autograd::get_current_graph_task_keep_graph();
  variable_list results = run(
      gradients, asked(), [&](size_t saved) { return unpack(saved, self); },
      [&](size_t saved) {
        if (!keep) saved_[saved].variable.reset_data();
      });
  if (c10::GradMode::is_enabled()) return refuse_double_backward(gradients, std::move(results));
  return results;
}

void PipelineBackward::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      plan_->kept_opaque.empty() && workspaces_.empty(),
      "pipeline: expected a backward of plain tensors under ",
      "compiled autograd, got what a Python op or a recipe saved. Compile the forward as well.");
  args.collect(reinterpret_cast<uint64_t>(
      plan_.get()));  // a plan is immutable and lives as long as its pipeline
  for (const uint16_t place : saved_at_) args.collect(static_cast<uint64_t>(place));
  for (const SavedTensor& saved : saved_) {
    TORCH_CHECK_NOT_IMPLEMENTED(!saved.view,
                                "pipeline: expected kept tensors that are no views of arguments "
                                "under compiled autograd, got ",
                                "a reshaped input. Compile the forward as well.");
    args.collect(saved.variable, /*is_output=*/false);
  }
}

variable_list PipelineBackward::apply_with_saved(
    const variable_list& inputs, torch::dynamo::autograd::SwapSavedVariables& swap) {
  namespace ca = torch::dynamo::autograd;
  for (SavedTensor& saved : saved_) swap.before(saved.variable);
  const auto self = getptr();
  std::vector<c10::IValue> packed;
  for (const SavedTensor& saved : saved_) packed.emplace_back(saved.variable.unpack(self));
  const std::vector<at::TypePtr> schema(packed.size(), at::TensorType::get());
  const auto metadata =
      ca::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
          ca::get_input_metadata(next_edges()));
  const auto& interface = ca::getPyCompilerInterface();
  const auto function = interface->bind_function(
      swap.get_py_compiler(), "TandemPipelineBackward",
      [plan = plan_, saved_at = saved_at_, asked = asked()](
          const variable_list& gradients, const std::vector<c10::IValue>& tensors) {
        auto traced = compat::make_node<PipelineBackward>(plan, Path::dispatch);
        traced->saved_at_ = saved_at;
        return traced->run(
            gradients, asked, [&](size_t saved) { return tensors[saved].toTensor(); },
            [](size_t) {});
      },
      schema, /*is_custom_function=*/true, /*is_traceable=*/true);
  auto results = interface->call_function(swap.get_py_compiler(), "apply_functional", function,
                                          inputs, packed, metadata);
  for (SavedTensor& saved : saved_) swap.after(saved.variable);
  return results;
}

}  // namespace tandem
