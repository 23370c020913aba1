#include "autograd/call.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <atomic>

#include "autograd/direct.h"
#include "kernel_ops/quantize/delayed.h"

namespace tandem {

namespace {

using at::Tensor;
using c10::DispatchKey;

/// Whether `predicate` holds for a tensor that kernels read; for an argument in codes these are its
/// codes.
template <typename Predicate>
bool any_of(const Arguments& arguments, Predicate&& predicate) {
  size_t next = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (next < arguments.quantized.size() && arguments.quantized[next].place == i) {
      for (const Tensor& part : arguments.quantized[next++].codes.parts)
        if (part.defined() && predicate(part)) return true;
    } else if (arguments.at(i).defined() && predicate(arguments.at(i))) {
      return true;
    }
  }
  return false;
}

std::vector<Tensor> returned(Outputs outputs) { return {outputs.begin(), outputs.end()}; }

std::vector<Tensor> run_composite(const Arguments& arguments, std::string_view description) {
  const auto program = program_of(description);
  const auto plan = program->plan_for(key_of(arguments, /*grad_mode=*/false, /*traced=*/true));
  TORCH_CHECK_NOT_IMPLEMENTED(
      plan->buffers.empty() || !c10::GradMode::is_enabled(),
      "pipeline: expected gradients that are returned, as torch.func returns them, got an op with ",
      "accumulate_into_main_grad=True. Build it without, or call backward().");
  TORCH_CHECK_NOT_IMPLEMENTED(
      plan->no_composite.empty(),
      "pipeline: expected ops with a composite form under torch.func, torch.jit.trace and "
      "forward-mode differentiation, got op ",
      plan->no_composite, ". Write its forward in differentiable torch operations.");
  if (plan->is_quantized && c10::GradMode::is_enabled()) {
    const auto differentiated = program->plan_for(key_of(
        arguments, /*grad_mode=*/true, /*traced=*/true, program->description().sizes_in_key));
    const bool rounds =
        std::any_of(differentiated->backward.begin(), differentiated->backward.end(),
                    [](const Step& step) { return step.kind == StepKind::quantize; });
    TORCH_CHECK_NOT_IMPLEMENTED(
        !rounds, "pipeline: expected no recipe where torch.func differentiates, got one whose ",
        "backward rounds gradients. Leave the autocast region, or call backward().");
  }
  return returned(run_pipeline(plan, arguments, Path::composite));
}

std::atomic<void (*)(const Tensor&)> state_listener = nullptr;

void tell_of_written_state(at::TensorList state) {
  const auto told = state_listener.load();
  if (told == nullptr || !c10::GradMode::is_enabled()) return;
  for (size_t holder = 0; scaling_state_place(holder, true) < state.size(); ++holder)
    for (size_t i = 0; i < kScalingState.size(); ++i)
      told(state[scaling_state_place(holder, true) + i]);
}

std::vector<Tensor> run_above_autograd(const Arguments& arguments, std::string_view description) {
  if (any_of(arguments, has_tangent)) return run_composite(arguments, description);
  tell_of_written_state(arguments.state);
  const auto program = program_of(description);
  const auto plan = program->plan_for(key_for(*program, arguments, /*traced=*/true));
  return returned(run_pipeline(plan, arguments, Path::dispatch));
}

std::vector<Tensor> run_below_autograd(const Arguments& arguments, std::string_view description) {
  const auto plan =
      program_of(description)->plan_for(key_of(arguments, /*grad_mode=*/false, /*traced=*/true));
  return returned(run_pipeline(plan, arguments, Path::dispatch));
}

std::vector<Tensor> run_traced(const Arguments& arguments, std::string_view description) {
  TORCH_CHECK_NOT_IMPLEMENTED(!program_of(description)->description().recipe,
                              "pipeline: expected no recipe under torch.jit.trace, got one. Trace ",
                              "outside of the tandem.autocast region, or use torch.export.");
  return run_composite(arguments, description);
}

/// The dispatcher op for a dispatch key, whose calls `run` takes.
template <std::vector<Tensor> (*run)(const Arguments&, std::string_view)>
std::vector<Tensor> pipeline_op(const Tensor& x, const c10::List<std::optional<Tensor>>& extra,
                                at::TensorList params, at::TensorList workspaces,
                                at::TensorList state, at::TensorList buffers,
                                std::string_view description) {
  std::vector<Tensor> inputs{x};
  for (size_t i = 0; i < extra.size(); ++i) inputs.push_back(extra.get(i).value_or(Tensor()));
  return run(
      {inputs, params, workspaces, Buffers::of(buffers), state, quantized_among(inputs, params)},
      description);
}

}  // namespace

void set_state_listener(void (*told)(const Tensor& state)) { state_listener = told; }

bool is_direct(const Arguments& arguments) {
  if (is_watched()) return false;
  return !any_of(arguments,
                 [](const Tensor& tensor) { return !is_plain(tensor) || has_tangent(tensor); });
}

namespace {

/// Adds sizes. Under but_rows, sizes that grow with the rows of x are replaced: the first size of
/// x, and of extra inputs with an equal one, by kGrowsAsFirst; the first size of extra inputs that
/// equals the product of all of x's leading sizes by kGrowsAsRows.
void add_sizes(const Arguments& arguments, SizesInKey which, PlanKey& key) {
  const Tensor& x = arguments.inputs[0];
  const bool has_rows = which == SizesInKey::but_rows && x.defined() && x.dim() >= 2;
  c10::SymInt rows = 1;
  for (int64_t d = 0; has_rows && d + 1 < x.dim(); ++d) rows = rows * x.sym_size(d);
  const auto in_key = [&](const c10::SymInt& size, bool may_grow) {
    if (may_grow && size == x.sym_size(0)) return PlanKey::kGrowsAsFirst;
    if (may_grow && size == rows) return PlanKey::kGrowsAsRows;
    return size.guard_int(__FILE__, __LINE__);
  };
  c10::SmallVector<int64_t, 8> sizes;
  for (const at::TensorList list : {arguments.inputs, arguments.params})
    for (const Tensor& tensor : list) {
      sizes.clear();
      const bool may_grow = has_rows && list.data() == arguments.inputs.data();
      for (int64_t d = 0; tensor.defined() && d < tensor.dim(); ++d)
        sizes.push_back(in_key(tensor.sym_size(d), may_grow && d == 0));
      key.add_sizes(sizes);
    }
}

}  // namespace

at::ScalarType autocast_dtype_of(at::DeviceType device) {
  const bool is_on =
      at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
  return is_on ? at::autocast::get_autocast_dtype(device) : at::ScalarType::Undefined;
}

PlanKey key_for(const Program& program, const Arguments& arguments, bool traced) {
  return key_of(arguments, c10::GradMode::is_enabled(), traced, program.description().sizes_in_key);
}

PlanKey key_of(const Arguments& arguments, bool grad_mode, bool traced, SizesInKey sizes) {
  PlanKey::Call call{grad_mode, traced};
  TORCH_CHECK_VALUE(!arguments.inputs.empty(),
                    "pipeline: expected the main input, got no tensor. Pass it first.");
  if (arguments.inputs[0].defined())
    call.autocast_dtype = autocast_dtype_of(arguments.inputs[0].device().type());
  PlanKey key(call, arguments.inputs.size());
  for (const at::TensorList list : {arguments.inputs, arguments.params})
    for (const Tensor& tensor : list) {
      TORCH_CHECK_VALUE(
          !tensor.defined() || !tensor.is_nested(),
          "pipeline: expected tensors whose rows have one length, got a nested tensor. ",
          "Pass a padded tensor, or the rows of all sequences one after another.");
      key.add(tensor, grad_mode);
    }
  for (const auto& [place, codes] : arguments.quantized) key.add_codes(place, codes);
  if (grad_mode && sizes != SizesInKey::none) add_sizes(arguments, sizes, key);
  return key;
}

Outputs call_op(const Arguments& arguments, const std::string& description) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tandem::pipeline", "")
                             .typed<decltype(pipeline_op<run_composite>)>();
  c10::List<std::optional<Tensor>> extra;
  for (size_t i = 1; i < arguments.inputs.size(); ++i) extra.push_back(arguments.inputs[i]);
  std::vector<Tensor> buffers;
  for (size_t i = 0; i < arguments.buffers.count; ++i) buffers.push_back(arguments.buffers.take(i));
  const auto results = op.call(arguments.inputs[0], extra, arguments.params, arguments.workspaces,
                               arguments.state, buffers, description);
  return {results.begin(), results.end()};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  library.def(
      "pipeline(Tensor x, Tensor?[] extra, Tensor[] params, Tensor(a!)[] workspaces, Tensor(b!)[] "
      "state, Tensor(c!)[] buffers, str "
      "description) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  library.impl("pipeline", DispatchKey::Autograd, &pipeline_op<run_above_autograd>);
  // torch.jit.trace can record neither this schema nor those of kernel ops, because it does not
  // know their lists.
  library.impl("pipeline", DispatchKey::Tracer, &pipeline_op<run_traced>);
  library.impl("pipeline", DispatchKey::CompositeExplicitAutograd,
               &pipeline_op<run_below_autograd>);
  library.impl("pipeline", DispatchKey::FuncTorchDynamicLayerFrontMode,
               &pipeline_op<run_composite>);
}

}  // namespace tandem
