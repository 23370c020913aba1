#include "autograd/node.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <utility>

#include "autograd/direct.h"
#include "autograd/session.h"
#include "executor/executor.h"
#include "planner/planner.h"

namespace tandem {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// The facts that `save` looks up.
struct PipelineBackward::Saving {
  const Arguments& arguments;
  const Outputs& outputs;
  /// The implementation of each saved tensor.
  c10::SmallVector<const at::TensorImpl*, 16> seen;
};

Slot PipelineBackward::save_tensor(const at::Tensor& tensor, bool is_argument, Saving& saving) {
  const auto known =
      std::find(saving.seen.begin(), saving.seen.end(), tensor.unsafeGetTensorImpl());
  const auto place = known - saving.seen.begin();
  if (known != saving.seen.end()) {
    ++saved_[static_cast<size_t>(place)].slots;
    return {static_cast<int32_t>(place)};
  }
  saving.seen.push_back(tensor.unsafeGetTensorImpl());
  SavedTensor& saved = saved_.emplace_back();
  saved.is_argument = is_argument;
  saved.slots = 1;
  const bool may_be_output = !is_argument || !plan_->overwritten.empty();
  saved.is_output = may_be_output && tensor.grad_fn().get() == this;
  saved.variable = SavedVariable(tensor, saved.is_output);
  if (!is_argument && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
    saved.bytes = static_cast<int64_t>(tensor.nbytes());
  return {static_cast<int32_t>(place)};
}

/// Saves a tensor of the caller, or a reshape of one, as the caller's tensor: autograd checks its
/// version counter, and a hook sees it once. Backward recomputes the reshape from its sizes,
/// because what a hook returns has strides of its own.
Slot PipelineBackward::save_value(Value value, const at::Tensor& tensor, Saving& saving) {
  const Plan& plan = *plan_;
  const Value root = root_of(plan, value);
  const at::Tensor* owner = argument_of(plan, saving.arguments, root);
  const bool is_argument =
      owner != nullptr && (root == value ? owner->is_same(tensor) : shares_memory(*owner, tensor));
  if (!is_argument) owner = nullptr;
  const Type& type = plan.types[index_of(value)];
  if (type.origin != Origin::result && type.format == Format::codes)
    return save_tensor(tensor, /*is_argument=*/true, saving);
  for (size_t i = 0; i < saving.outputs.size() && owner == nullptr; ++i)
    if (root_of(plan, plan.outputs[i]) == root && shares_memory(saving.outputs[i], tensor))
      owner = &saving.outputs[i];
  if (owner == nullptr) return save_tensor(tensor, is_argument, saving);
  Slot slot = save_tensor(*owner, is_argument, saving);
  if (!owner->is_same(tensor) && owner->sym_sizes() != tensor.sym_sizes())
    slot.sizes = std::make_shared<c10::SymDimVector>(tensor.sym_sizes());
  return slot;
}

void PipelineBackward::save(Frame& frame, const Arguments& arguments, const Outputs& outputs) {
  const Plan& plan = *plan_;
  workspaces_.assign(arguments.workspaces.begin(), arguments.workspaces.end());
  if (plan.mutates_buffers_in_backward) buffers_ = arguments.buffers;
  if (plan.uses_state_in_backward) {
    state_.assign(arguments.state.begin(), arguments.state.end());
    if (arguments.region != nullptr) {
      state_[0] = arguments.region->token(/*is_recompute=*/false);
      to_come_ = std::make_unique<RecipeRegion::Backward>(arguments.region);
    }
  }
  Saving saving{arguments, outputs, {}};
  saved_.reserve(plan.kept.size());
  slots_.reserve(plan.kept.size());
  for (const Value value : plan.kept) {
    first_slot_.push_back(static_cast<uint32_t>(slots_.size()));
    const Format format = plan.types[index_of(value)].format;
    if (format == Format::shape)
      slots_.push_back({.sizes = std::make_shared<c10::SymDimVector>(frame.shape(value))});
    if (format == Format::opaque) slots_.push_back({.fields = frame.opaque(value).fields});
    if (format == Format::codes)
      if (const c10::SymDimVector* sizes = frame.noted_sizes(value))
        numbers_.emplace_back(value, *sizes);
    for (const at::Tensor& tensor : frame.tensors(value))
      slots_.push_back(format != Format::opaque ? save_value(value, tensor, saving)
                       : tensor.defined()       ? save_tensor(tensor, arguments.has(tensor), saving)
                                                : Slot{});
  }
  first_slot_.push_back(static_cast<uint32_t>(slots_.size()));
}

int64_t PipelineBackward::note_kept_bytes(std::span<std::atomic<int64_t>> by_value) const {
  for (size_t k = 0; k < by_value.size() && k + 1 < first_slot_.size(); ++k) {
    int64_t bytes = 0;
    for (const Slot& slot : slots_of(k))
      if (slot.saved >= 0) bytes += saved_[static_cast<size_t>(slot.saved)].bytes;
    // Stores only changes: threads that call one pipeline share these counters.
    if (by_value[k].load(std::memory_order_relaxed) != bytes)
      by_value[k].store(bytes, std::memory_order_relaxed);
  }
  int64_t total = 0;
  for (const SavedTensor& saved : saved_) total += saved.bytes;
  return total;
}

namespace {
at::Tensor reshaped(at::Tensor tensor, const Slot& slot) {
  return slot.sizes ? tensor.reshape_symint(*slot.sizes) : tensor;
}
}  // namespace

std::vector<variable_list> PipelineBackward::kept_tensors() const {
  std::vector<variable_list> kept;
  const auto self = const_cast<PipelineBackward*>(this)->getptr();
  for (size_t k = 0; k + 1 < first_slot_.size(); ++k) {
    kept.emplace_back();
    for (const Slot& slot : slots_of(k))
      if (slot.saved >= 0)
        kept.back().push_back(
            reshaped(saved_[static_cast<size_t>(slot.saved)].variable.unpack(self), slot));
  }
  return kept;
}

void PipelineBackward::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  saved_.clear();
  slots_.clear();
  first_slot_.clear();
  numbers_.clear();
  workspaces_.clear();
  buffers_ = {};
  state_.clear();
  is_released_ = true;
}

std::vector<bool> PipelineBackward::requested() const {
  std::vector<bool> requested(plan_->gradients.size());
  for (size_t i = 0; i < requested.size(); ++i)
    requested[i] =
        (exists(plan_->gradients[i]) || plan_->absorbed[i]) && task_should_compute_output(i);
  return requested;
}

BackwardMask PipelineBackward::mask_of(const variable_list& gradients,
                                       const std::vector<bool>& requested) const {
  BackwardMask mask{{}, requested};
  for (const at::Tensor& gradient : gradients) mask.given.push_back(gradient.defined());
  return mask;
}

namespace {

/// Throws c10::NotImplementedError for a gradient with a tangent.
void check_tangents(const variable_list& gradients) {
  for (const at::Tensor& gradient : gradients)
    TORCH_CHECK_NOT_IMPLEMENTED(
        !gradient.defined() || !has_tangent(gradient),
        "pipeline: expected gradients without a tangent, got one under forward-mode "
        "differentiation. Use torch.func.jvp of torch.func.vjp, which differentiate the "
        "composite form.");
}

/// Saved tensors of a run that serve several slots. Each is unpacked once and held until its last
/// slot is dropped.
class SharedTensors {
 public:
  template <typename Unpack>
  const at::Tensor& get(size_t saved, Unpack&& unpack) {
    for (const Entry& entry : entries_)
      if (entry.saved == saved) return entry.tensor;
    return entries_.emplace_back(Entry{saved, 0, unpack(saved)}).tensor;
  }
  /// Drops a slot; returns whether it was the last of `slots`.
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

/// Kernels rely on the plan's dtype and layout. A hook of saved tensors may return others, and
/// module.to(dtype) changes those of a saved parameter.
void check_unpacked(const Frame& frame, Value value, const at::Tensor& tensor) {
  const Type& type = frame.type(value);
  if (frame.path() != Path::direct || type.format != Format::plain) return;
  TORCH_CHECK_TYPE(is_plain(tensor) && tensor.scalar_type() == type.dtype, "pipeline: expected ",
                   type.name, " in backward as forward saved it, a plain ", "tensor of dtype ",
                   type.dtype, ", got ", tensor.toString(), " of dtype ", tensor.scalar_type(),
                   ". Let a hook of saved tensors return what it was given, ",
                   "and convert modules before forward or after backward.");
}

}  // namespace

template <typename Unpack>
variable_list PipelineBackward::run(const variable_list& gradients,
                                    const std::vector<bool>& requested, bool keep,
                                    Unpack&& unpack) {
  const Plan& plan = *plan_;
  const BackwardMask mask = mask_of(gradients, requested);
  if (std::find(mask.given.begin(), mask.given.end(), true) == mask.given.end())
    return variable_list(plan.gradients.size());  // for undefined gradients, undefined ones
  const auto backward = backward_plan(plan, mask);
  check_tangents(gradients);
  Session session(
      plan, path_, backward->steps,
      {.gradients = gradients, .workspaces = workspaces_, .state = state_, .buffers = buffers_});
  Frame& frame = session.frame();
  for (const auto& [codes, sizes] : numbers_) frame.note_sizes(codes, sizes);
  SharedTensors shared;
  // A traced node has slots only, and nothing to release.
  const auto users_of = [&](size_t saved) {
    return saved < saved_.size() ? size_t{saved_[saved].slots} : 1;
  };
  const auto unpack_slot = [&](const Slot& slot) {
    if (slot.saved < 0) return at::Tensor();
    const size_t saved = static_cast<size_t>(slot.saved);
    return reshaped(users_of(saved) > 1 ? shared.get(saved, unpack) : unpack(saved), slot);
  };
  const auto load = [&](Value value, size_t index) {
    const std::span<const Slot> slots = slots_of(index);
    switch (frame.type(value).format) {
      case Format::shape:
        frame.shape(value) = *slots[0].sizes;
        break;
      case Format::opaque:
        frame.opaque(value).fields = slots[0].fields;
        for (const Slot& slot : slots.subspan(1))
          frame.opaque(value).tensors.push_back(unpack_slot(slot));
        break;
      default:
        for (size_t part = 0; part < slots.size(); ++part) {
          at::Tensor tensor = unpack_slot(slots[part]);
          check_unpacked(frame, value, tensor);
          frame.tensor(value, part) = std::move(tensor);
        }
    }
  };
  const auto release = [&](size_t index) {
    if (!keep) is_released_ = true;
    for (size_t s = first_slot_[index]; s < first_slot_[index + 1]; ++s) {
      Slot& slot = slots_[s];
      if (!keep) slot.fields = nullptr;
      if (slot.saved < 0) continue;
      const size_t saved = static_cast<size_t>(slot.saved);
      const bool is_last = users_of(saved) == 1 || shared.drop(saved, users_of(saved));
      if (is_last && !keep) saved_[saved].variable.reset_data();
    }
  };
  return session.run_backward(*backward, load, release);
}

variable_list PipelineBackward::refuse_double_backward(const variable_list& gradients,
                                                       variable_list results) {
  // Under create_graph=True these results carry no graph. Differentiating them reaches a node that
  // raises, where autograd would otherwise return a gradient without their terms.
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
  for (at::Tensor& gradient : gradients)  // a lazily negated one would leave the direct path
    if (gradient.defined() && gradient.is_neg()) gradient = gradient.resolve_neg();
  const auto self = getptr();
  variable_list results =
      run(gradients, requested(), torch::autograd::get_current_graph_task_keep_graph(),
          // Above autograd, because the unpack hook of a checkpoint runs the forward of other
          // modules.
          [&](size_t saved) { return saved_[saved].variable.unpack(self); });
  if (to_come_ != nullptr) to_come_->note_run(used_states(*plan_, state_, /*is_backward=*/true));
  if (c10::GradMode::is_enabled()) return refuse_double_backward(gradients, std::move(results));
  return results;
}

void PipelineBackward::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  const bool is_plain =
      std::ranges::all_of(slots_, [](const Slot& slot) { return slot.saved >= 0; });
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_plain && workspaces_.empty() && buffers_.count == 0 && state_.empty(),
      "pipeline: expected a backward of plain tensors under ",
      "compiled autograd, got what a Python op or a recipe saved, or a "
      "main_grad. Compile the forward as well.");
  args.collect(plan_->number);  // an address could be reused by another plan
  for (const Slot& slot : slots_) {
    TORCH_CHECK_NOT_IMPLEMENTED(!slot.sizes,
                                "pipeline: expected kept tensors that are no views of arguments "
                                "under compiled autograd, got ",
                                "a reshaped input. Compile the forward as well.");
    args.collect(static_cast<uint64_t>(slot.saved));
  }
  for (const SavedTensor& saved : saved_) args.collect(saved.variable, saved.is_output);
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
      [plan = plan_, slots = slots_, first_slot = first_slot_, requested = requested()](
          const variable_list& gradients, const std::vector<c10::IValue>& tensors) {
        auto traced = compat::make_node<PipelineBackward>(plan, Path::dispatch);
        traced->slots_ = slots;
        traced->first_slot_ = first_slot;
        return traced->run(gradients, requested, /*keep=*/true,
                           [&](size_t saved) { return tensors[saved].toTensor(); });
      },
      schema, /*is_custom_function=*/true, /*is_traceable=*/true);
  auto results = interface->call_function(swap.get_py_compiler(), "apply_functional", function,
                                          inputs, packed, metadata);
  for (SavedTensor& saved : saved_) swap.after(saved.variable);
  return results;
}

}  // namespace tandem
