#include "autograd/node.h"

#include <ATen/ops/isnan.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>

#include "autograd/direct.h"
#include "executor/executor.h"
#include "planner/planner.h"

namespace tandem {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

bool is_an_argument(const Arguments& arguments, const at::Tensor& tensor) {
  for (const at::TensorList list : {arguments.inputs, arguments.params})
    for (const at::Tensor& argument : list)
      if (argument.is_same(tensor)) return true;
  return false;
}

void check_no_nan(Frame& frame, const Step& step) {
  for (const Value value : step.writes) {
    if (!exists(value) || frame.type(value).format != Format::plain ||
        !c10::isFloatingType(frame.type(value).dtype))
      continue;
    const at::Tensor& tensor = frame.tensor(value);
    TORCH_CHECK(!tensor.defined() || !at::isnan(tensor).any().item<bool>(),
                "pipeline: expected finite gradients, got NaN from step ", step.name, " of op ",
                step.covers.empty() ? -1 : static_cast<int>(step.covers[0].op), ", which writes ",
                frame.type(value).name, ". Its inputs are the place to look.");
  }
}

}  // namespace

/// What `save` looks tensors up in.
struct PipelineBackward::Saving {
  const Arguments& arguments;
  const Outputs& outputs;
  /// By place in the saved tensors.
  c10::SmallVector<const at::TensorImpl*, 16> seen;
};

Slot PipelineBackward::save_tensor(const at::Tensor& tensor, bool is_argument, Saving& saving) {
  const auto known =
      std::find(saving.seen.begin(), saving.seen.end(), tensor.unsafeGetTensorImpl());
  const Slot slot{static_cast<int32_t>(known - saving.seen.begin())};
  if (known != saving.seen.end()) {
    ++saved_[static_cast<size_t>(slot.saved)].slots;
    return slot;
  }
  saving.seen.push_back(tensor.unsafeGetTensorImpl());
  SavedTensor& saved = saved_.emplace_back();
  saved.is_argument = is_argument;
  saved.slots = 1;
  const bool may_be_output = !is_argument || !plan_->overwritten.empty();
  saved.variable = SavedVariable(tensor, may_be_output && tensor.grad_fn().get() == this);
  if (!is_argument && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
    saved.bytes = static_cast<int64_t>(tensor.nbytes());
  return slot;
}

/// A tensor that the caller has, or a reshape of one, is saved as that tensor: its version counter
/// is the one that is checked, and a hook sees it once. The reshape is made again by its shape:
/// what a hook gives back has strides of its own.
Slot PipelineBackward::save_value(Value value, const at::Tensor& tensor, Saving& saving) {
  const Plan& plan = *plan_;
  const Value root = root_of(plan, value);
  const at::Tensor* owner = argument_of(plan, saving.arguments, root);
  const bool is_argument =
      owner != nullptr && (root == value ? owner->is_same(tensor) : shares_memory(*owner, tensor));
  if (!is_argument) owner = nullptr;
  const Type& type = plan.types[index_of(value)];
  if (type.origin == Origin::param && type.format == Format::codes)
    return save_tensor(tensor, /*is_argument=*/true, saving);
  for (size_t i = 0; i < saving.outputs.size() && owner == nullptr; ++i)
    if (root_of(plan, plan.outputs[i]) == root && shares_memory(saving.outputs[i], tensor))
      owner = &saving.outputs[i];
  if (owner == nullptr) return save_tensor(tensor, is_argument, saving);
  Slot slot = save_tensor(*owner, is_argument, saving);
  if (!owner->is_same(tensor) && owner->sym_sizes() != tensor.sym_sizes()) {
    slot.shape = static_cast<int32_t>(reshapes_.size());
    reshapes_.emplace_back(tensor.sym_sizes().begin(), tensor.sym_sizes().end());
  }
  return slot;
}

void PipelineBackward::save(Frame& frame, const Arguments& arguments, const Outputs& outputs) {
  const Plan& plan = *plan_;
  Saving saving{arguments, outputs, {}};
  saved_.reserve(plan.kept.size());
  slots_.reserve(plan.kept.size());
  for (const Kept& kept : plan.kept)
    slots_.push_back(save_value(kept.value, frame.tensor(kept.value, kept.part), saving));
  workspaces_.assign(arguments.workspaces.begin(), arguments.workspaces.end());
  if (plan.mutates_buffers_in_backward) buffers_ = arguments.buffers;
  if (plan.uses_state_in_backward) {
    state_.assign(arguments.state.begin(), arguments.state.end());
    if (arguments.region != nullptr) {
      state_[0] = arguments.region->token(/*is_recompute=*/false);
      to_come_ = std::make_unique<RecipeRegion::Backward>(arguments.region);
    }
  }
  opaques_.resize(plan.opaques);
  shapes_.resize(plan.shapes);
  for (const Value value : plan.kept_opaque) {
    const uint32_t place = plan.slot_of[index_of(value)];
    if (plan.types[index_of(value)].format == Format::shape) {
      shapes_[place] = frame.shape(value);
      continue;
    }
    const Opaque& opaque = frame.opaque(value);
    opaques_[place] = {opaque.fields, slots_.size(), opaque.tensors.size()};
    for (const at::Tensor& tensor : opaque.tensors)
      slots_.push_back(!tensor.defined()
                           ? Slot{}
                           : save_tensor(tensor, is_an_argument(arguments, tensor), saving));
  }
}

std::pair<size_t, size_t> PipelineBackward::slots_of(Value value) const {
  const Plan& plan = *plan_;
  if (plan.types[index_of(value)].format == Format::opaque) {
    const KeptOpaque& opaque = opaques_[plan.slot_of[index_of(value)]];
    return {opaque.first, opaque.count};
  }
  if (plan.kept_at[index_of(value)] < 0) return {0, 0};
  const size_t first = static_cast<size_t>(plan.kept_at[index_of(value)]);
  size_t count = 0;
  while (first + count < plan.kept.size() && plan.kept[first + count].value == value) ++count;
  return {first, count};
}

int64_t PipelineBackward::note_kept_bytes(std::span<std::atomic<int64_t>> by_entry) const {
  for (size_t k = 0; k < std::min({by_entry.size(), plan_->kept.size(), slots_.size()}); ++k) {
    const int64_t bytes = saved_[static_cast<size_t>(slots_[k].saved)].bytes;
    // A store only where it changes something: threads that call one pipeline share these.
    if (by_entry[k].load(std::memory_order_relaxed) != bytes)
      by_entry[k].store(bytes, std::memory_order_relaxed);
  }
  int64_t total = 0;
  for (const SavedTensor& saved : saved_) total += saved.bytes;
  return total;
}

std::vector<at::Tensor> PipelineBackward::kept_tensors() const {
  std::vector<at::Tensor> tensors;
  const auto self = const_cast<PipelineBackward*>(this)->getptr();
  for (size_t k = 0; k < std::min(plan_->kept.size(), slots_.size()); ++k) {
    const Slot& slot = slots_[k];
    const at::Tensor tensor = saved_[static_cast<size_t>(slot.saved)].variable.unpack(self);
    tensors.push_back(slot.shape < 0
                          ? tensor
                          : tensor.reshape_symint(reshapes_[static_cast<size_t>(slot.shape)]));
  }
  return tensors;
}

void PipelineBackward::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  saved_.clear();
  slots_.clear();
  opaques_.clear();
  workspaces_.clear();
  buffers_ = {};
  state_.clear();
  is_released_ = true;
}

std::vector<bool> PipelineBackward::asked() const {
  std::vector<bool> asked(plan_->gradients.size());
  for (size_t i = 0; i < asked.size(); ++i)
    asked[i] = (exists(plan_->gradients[i]) || plan_->absorbed[i]) && task_should_compute_output(i);
  return asked;
}

BackwardMask PipelineBackward::mask_of(const variable_list& gradients,
                                       const std::vector<bool>& asked) const {
  BackwardMask mask{{}, asked};
  for (const at::Tensor& gradient : gradients) mask.given.push_back(gradient.defined());
  return mask;
}

Path PipelineBackward::path_for(const variable_list& gradients) const {
  bool is_direct = !is_watched();
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    is_direct &= is_plain(gradient);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !has_tangent(gradient),
        "pipeline: expected gradients without a tangent, got one under forward-mode "
        "differentiation. Use torch.func.jvp of torch.func.vjp, which differentiate the "
        "composite form.");
  }
  return is_direct ? path_ : Path::dispatch;
}

namespace {

/// The saved tensors of a run that serve several slots: unpacked once, held until the last slot is
/// dropped.
class SharedTensors {
 public:
  template <typename Unpack>
  const at::Tensor& get(size_t saved, Unpack&& unpack) {
    for (const Entry& entry : entries_)
      if (entry.saved == saved) return entry.tensor;
    return entries_.emplace_back(Entry{saved, 0, unpack(saved)}).tensor;
  }
  /// Whether this was the last of `slots`.
  bool drop(size_t saved, size_t slots) {
    for (Entry& entry : entries_)
      if (entry.saved == saved && ++entry.dropped == slots) {
        entry.tensor.reset();
        return true;
      }
    return false;
  }

 private:
  struct Entry {
    size_t saved, dropped;
    at::Tensor tensor;
  };
  std::vector<Entry> entries_;
};

/// A kernel reads memory as the plan says that it is; what a hook gave back must be that.
void check_unpacked(const Frame& frame, Value value, const at::Tensor& tensor) {
  const Type& type = frame.type(value);
  if (frame.path() != Path::direct || type.format != Format::plain) return;
  TORCH_CHECK_TYPE(is_plain(tensor) && tensor.scalar_type() == type.dtype,
                   "pipeline: expected saved-tensor hooks to give back ", type.name, " of dtype ",
                   type.dtype, " as a plain tensor, got ", tensor.toString(), " of dtype ",
                   tensor.scalar_type(), ". Let unpack return what pack was given.");
}

}  // namespace

template <typename Unpack, typename Drop>
variable_list PipelineBackward::run(const variable_list& gradients, const std::vector<bool>& asked,
                                    Unpack&& unpack, Drop&& drop) {
  const Plan& plan = *plan_;
  variable_list results(plan.gradients.size());
  const BackwardMask mask = mask_of(gradients, asked);
  if (std::find(mask.given.begin(), mask.given.end(), true) == mask.given.end())
    return results;  // an undefined gradient is answered with undefined gradients
  const auto backward = backward_plan(plan, mask);
  Frame frame(path_for(gradients), plan.types, plan.slot_of, plan.tensor_slots);
  frame.reserve_side_values(plan.opaques, plan.shapes);
  for (size_t i = 0; i < gradients.size(); ++i)
    if (exists(plan.output_gradients[i])) frame.tensor(plan.output_gradients[i]) = gradients[i];
  for (size_t i = 0; i < workspaces_.size(); ++i) frame.tensor(plan.workspaces[i]) = workspaces_[i];
  for (size_t i = 0; i < state_.size(); ++i) frame.tensor(plan.state[i]) = state_[i];
  if (plan.mutates_buffers_in_backward) take_buffers(buffers_, plan, backward->steps, frame);
  for (const Value value : plan.kept_opaque)
    if (plan.types[index_of(value)].format == Format::shape)
      frame.shape(value) = shapes_[plan.slot_of[index_of(value)]];
  SharedTensors shared;
  // A traced node has slots only, and nothing to let go.
  const auto users_of = [&](size_t saved) {
    return saved < saved_.size() ? size_t{saved_[saved].slots} : 1;
  };
  const auto unpack_slot = [&](const Slot& slot) {
    if (slot.saved < 0) return at::Tensor();
    const size_t saved = static_cast<size_t>(slot.saved);
    at::Tensor tensor = users_of(saved) > 1 ? shared.get(saved, unpack) : unpack(saved);
    return slot.shape < 0 ? tensor
                          : tensor.reshape_symint(reshapes_[static_cast<size_t>(slot.shape)]);
  };
  const auto load = [&](Value value) {
    const auto [first, count] = slots_of(value);
    if (frame.type(value).format == Format::opaque) {
      Opaque& opaque = frame.opaque(value);
      if (opaque.fields != nullptr || !opaque.tensors.empty()) return;
      opaque.fields = opaques_[plan.slot_of[index_of(value)]].fields;
      for (size_t k = first; k < first + count; ++k)
        opaque.tensors.push_back(unpack_slot(slots_[k]));
    } else if (count != 0 && !frame.tensor(value).defined()) {
      for (size_t k = first; k < first + count; ++k) {
        at::Tensor tensor = unpack_slot(slots_[k]);
        check_unpacked(frame, value, tensor);
        frame.tensor(value, plan.kept[k].part) = std::move(tensor);
      }
    }
  };
  const auto let_go = [&](Value value) {
    const auto [first, count] = slots_of(value);
    for (size_t k = first; k < first + count; ++k) {
      if (slots_[k].saved < 0) continue;
      const size_t saved = static_cast<size_t>(slots_[k].saved);
      if (users_of(saved) == 1 || shared.drop(saved, users_of(saved))) drop(saved);
    }
  };
  const bool check_nan = torch::autograd::AnomalyMode::is_enabled() &&
                         torch::autograd::AnomalyMode::should_check_nan();
  for (const Step& step : backward->steps) {
    for (const Value value : step.reads)
      if (exists(value)) load(value);
    {
      const NoAutocast no_autocast;  // not for the hooks that unpack: they are the caller's
      run_step(frame, step);
    }
    for (const Value dead : step.dead) let_go(dead);
    if (C10_UNLIKELY(check_nan)) check_no_nan(frame, step);
  }
  for (size_t i = 0; i < results.size(); ++i)
    if (exists(backward->gradients[i])) results[i] = frame.tensor(backward->gradients[i]);
  return results;
}

variable_list PipelineBackward::refuse_double_backward(const variable_list& gradients,
                                                       variable_list results) {
  // create_graph=True: these results carry no graph of theirs. Whoever differentiates them, with
  // respect to whatever they depend on, comes by a node that says so, instead of getting a gradient
  // without their terms.
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
      gradients, asked(),
      // Above autograd: the unpack hook of a checkpoint runs the forward of other modules here.
      [&](size_t saved) { return saved_[saved].variable.unpack(self); },
      [&](size_t saved) {
        if (!keep) saved_[saved].variable.reset_data();
      });
  if (to_come_ != nullptr) to_come_->note_run(used_states(*plan_, state_, /*is_backward=*/true));
  if (c10::GradMode::is_enabled()) return refuse_double_backward(gradients, std::move(results));
  return results;
}

void PipelineBackward::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      plan_->kept_opaque.empty() && workspaces_.empty() && buffers_.count == 0 && state_.empty(),
      "pipeline: expected a backward of plain tensors under ",
      "compiled autograd, got what a Python op or a recipe saved, or a "
      "main_grad. Compile the forward as well.");
  args.collect(plan_->number);  // not its address, which another plan may get once it is gone
  TORCH_CHECK_NOT_IMPLEMENTED(reshapes_.empty(),
                              "pipeline: expected kept tensors that are no views of arguments "
                              "under compiled autograd, got ",
                              "a reshaped input. Compile the forward as well.");
  for (const Slot& slot : slots_) args.collect(static_cast<uint64_t>(slot.saved));
  for (const SavedTensor& saved : saved_) args.collect(saved.variable, /*is_output=*/false);
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
      [plan = plan_, slots = slots_, asked = asked()](const variable_list& gradients,
                                                      const std::vector<c10::IValue>& tensors) {
        auto traced = compat::make_node<PipelineBackward>(plan, Path::dispatch);
        traced->slots_ = slots;
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
