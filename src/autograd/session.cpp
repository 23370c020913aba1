#include "autograd/session.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/isnan.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <algorithm>
#include <cstring>

#include "autograd/direct.h"
#include "kernel_ops/framework/memory.h"
#include "kernel_ops/weights/weights.h"

namespace tandem {

namespace {

/// Checks the workspaces that a caller of the dispatcher op passes, before any step runs.
void check_workspaces(const Plan& plan, const Arguments& arguments) {
  size_t next = 0;
  for (const CachedWeight& cached : plan.cached_weights) {
    kernel_ops::Workspace workspace;
    for (size_t part = 0; part < workspace.size(); ++part)
      if (kernel_ops::has_part(*cached.quantizer, cached.parts, part))
        workspace[part] = arguments.workspaces[next++];
    kernel_ops::check_workspace(pieces_of(cached, plan, arguments.params), workspace,
                                *cached.quantizer);
  }
}

ScalingState state_at(at::TensorList state, size_t holder, bool is_backward) {
  return scaling_state([&](size_t place) { return state[place]; },
                       scaling_state_place(holder, is_backward));
}

void check_states(const Plan& plan, at::TensorList state) {
  TORCH_CHECK_VALUE(state.size() == plan.state.size(), "pipeline: expected ", plan.state.size(),
                    " tensors as state of the recipe, got ", state.size(),
                    ". Pass the region's number, then scale, amax_history and pending of forward "
                    "and backward of each module, where the recipe keeps amaxes.");
  for (size_t holder = 0; holder < plan.state_holders.size(); ++holder) {
    const StateHolder& used = plan.state_holders[holder];
    kernel_ops::check_state(state_at(state, holder, false), 0, used.forward.slots);
    kernel_ops::check_state(state_at(state, holder, true), 0, used.backward.slots);
  }
}

/// Fills `to` with the one element that `repeated` repeats, if that is faster than torch's copy.
/// Returns whether it did.
bool fill_small(const at::Tensor& to, const at::Tensor& repeated) {
  constexpr int64_t kSmall = 4096;  // elements
  if (!to.is_cpu() || to.numel() > kSmall ||
      std::ranges::count(repeated.strides(), 0) != repeated.dim())
    return false;
  const auto fill = [&](auto word) {
    std::memcpy(&word, repeated.const_data_ptr(), sizeof(word));
    std::fill_n(static_cast<decltype(word)*>(to.mutable_data_ptr()), to.numel(), word);
    return true;
  };
  switch (to.itemsize()) {
    case sizeof(uint16_t):
      return fill(uint16_t{});
    case sizeof(uint32_t):
      return fill(uint32_t{});
    case sizeof(uint64_t):
      return fill(uint64_t{});
    default:
      return false;
  }
}

/// A dense copy of a gradient that repeats elements, as the gradient of a sum does: otherwise every
/// product and kernel that reads it would copy it.
at::Tensor dense(const at::Tensor& gradient) {
  if (!gradient.defined() || gradient.is_non_overlapping_and_dense() ||
      std::ranges::count(gradient.strides(), 0) == 0)
    return gradient;
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor copy = kernel_ops::empty_beside(gradient, gradient.sizes(), gradient.scalar_type());
  if (!fill_small(copy, gradient)) copy.copy_(gradient);
  return copy;
}

/// The path of backward: kernels read dense tensors, unless a mode must see what they compute.
Path path_for(Path forward, at::TensorList gradients) {
  const bool is_direct =
      !is_watched() && std::ranges::all_of(gradients, [](const at::Tensor& each) {
        return !each.defined() || is_plain(each);
      });
  return is_direct ? forward : Path::dispatch;
}

void check_no_nan(Frame& frame, const Step& step) {
  if (step.kind == StepKind::join) return;  // a parameter
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

Session::Session(const Plan& plan, Path path)
    : plan_(plan), frame_(path, plan.types, plan.slot_of, plan.tensor_slots) {
  if (plan.opaques + plan.shapes != 0) frame_.reserve_side_values(plan.opaques, plan.shapes);
}

Session::Session(const Plan& plan, Path path, const Arguments& arguments) : Session(plan, path) {
  for (size_t i = 0; i < plan.inputs.size(); ++i)
    frame_.tensor(plan.inputs[i]) = arguments.inputs[i];
  for (size_t i = 0; i < plan.params.size(); ++i)
    frame_.tensor(plan.params[i]) = arguments.params[i];
  for (size_t i = 0; i < arguments.quantized.size(); ++i)
    for (size_t direction = 0; direction < 2; ++direction)
      if (const Value codes = plan.argument_codes[2 * i + direction]; exists(codes))
        frame_.set_codes(codes, arguments.quantized[i].codes);
  TORCH_CHECK_VALUE(arguments.workspaces.size() == plan.workspaces.size(), "pipeline: expected ",
                    plan.workspaces.size(), " workspace tensors, got ", arguments.workspaces.size(),
                    ". Allocate them for the weights of this pipeline.");
  if (frame_.path() == Path::dispatch) check_workspaces(plan, arguments);
  for (size_t i = 0; i < plan.workspaces.size(); ++i)
    frame_.tensor(plan.workspaces[i]) = arguments.workspaces[i];
  check_states(plan, arguments.state);
  for (size_t i = 0; i < plan.state.size(); ++i) frame_.tensor(plan.state[i]) = arguments.state[i];
  TORCH_CHECK_VALUE(arguments.buffers.count == plan.buffers.size(), "pipeline: expected ",
                    plan.buffers.size(), " buffers, got ", arguments.buffers.count,
                    ". Pass one tensor for each that an op writes.");
  if (plan.mutates_buffers_in_forward) take_buffers(arguments.buffers, plan.forward);
  frame_.give(arguments.given);
}

Session::Session(const Plan& plan, Path path, const Steps& backward,
                 const BackwardArguments& arguments)
    : Session(plan, path_for(path, arguments.gradients)) {
  for (size_t i = 0; i < plan.output_gradients.size(); ++i)
    if (const Value gradient = plan.output_gradients[i]; exists(gradient))
      frame_.tensor(gradient) = frame_.path() == Path::direct && !backward.empty()
                                    ? dense(arguments.gradients[i])
                                    : arguments.gradients[i];
  for (size_t i = 0; i < arguments.workspaces.size(); ++i)
    frame_.tensor(plan.workspaces[i]) = arguments.workspaces[i];
  for (size_t i = 0; i < arguments.state.size(); ++i)
    frame_.tensor(plan.state[i]) = arguments.state[i];
  if (plan.mutates_buffers_in_backward) take_buffers(arguments.buffers, backward);
}

void Session::take_buffers(const Buffers& buffers, const Steps& steps) {
  for (size_t i = 0; i < plan_.buffers.size(); ++i) {
    const Value buffer = plan_.buffers[i];
    const bool is_mutated = std::ranges::any_of(steps, [&](const Step& step) {
      return std::ranges::find(step.mutates, buffer) != step.mutates.end();
    });
    if (!is_mutated) continue;
    frame_.tensor(buffer) = buffers.take(i);
    TORCH_CHECK_VALUE(frame_.tensor(buffer).defined(), "pipeline: expected a tensor as ",
                      plan_.types[index_of(buffer)].name, ", got an undefined one. Pass a tensor.");
  }
}

void Session::run_keeping(Step step) {
  step.dead.clear();
  run_step(frame_, step);
}

void Session::run_backward_step(const Step& step, bool check_nan) {
  {
    const NoAutocast no_autocast;  // hooks of the caller, which give back values, run outside of it
    run_step(frame_, step);
  }
  if (C10_UNLIKELY(check_nan)) check_no_nan(frame_, step);
}

bool Session::checks_nan() {
  return torch::autograd::AnomalyMode::is_enabled() &&
         torch::autograd::AnomalyMode::should_check_nan();
}

std::vector<PendingUpdate> used_states(const Plan& plan, at::TensorList state, bool is_backward) {
  std::vector<PendingUpdate> used;
  for (size_t holder = 0; holder < plan.state_holders.size(); ++holder) {
    const StateHolder& each = plan.state_holders[holder];
    const StateHolder::Direction& direction = is_backward ? each.backward : each.forward;
    if (direction.is_used) used.push_back({state_at(state, holder, is_backward), direction.update});
  }
  return used;
}

std::vector<at::Tensor> pieces_of(const CachedWeight& cached, const Plan& plan,
                                  at::TensorList params) {
  std::vector<at::Tensor> pieces;
  for (const Value piece : cached.pieces)
    pieces.push_back(
        params[static_cast<size_t>(std::ranges::find(plan.params, piece) - plan.params.begin())]);
  return pieces;
}

}  // namespace tandem
