#include "pipeline/functional_call.h"

#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <span>

#include "autograd/call.h"
#include "autograd/direct.h"
#include "autograd/session.h"
#include "kernel_ops/weights/weights.h"
#include "pipeline/on_demand.h"
#include "planner/planner.h"
#include "planner/program.h"
#include "planner/registry.h"

namespace tandem {

namespace {

using at::Tensor;

/// The arguments with their plan.
struct Planned {
  explicit Planned(const FunctionalArguments& given)
      : program(program_of(write_description(given.ops, given.recipe,
                                             {.training = given.training,
                                              .cache_weights = given.workspaces.has_value(),
                                              .fusions_version = fusions_version()}))),
        arguments{.inputs = given.inputs,
                  .params = given.params,
                  .workspaces = {},
                  .buffers = Buffers::of(given.buffers),
                  .state = given.state,
                  .quantized = quantized_among(given.inputs, given.params)},
        plan(program->plan_for(key(given))),
        path(is_direct(arguments) ? Path::direct : Path::dispatch) {
    if (given.workspaces) fit_workspaces(*given.workspaces);
    arguments.workspaces = workspaces;
  }

  /// Makes detached views that require the requested gradients, because a key reads flags of
  /// tensors.
  PlanKey key(const FunctionalArguments& given) {
    std::vector<Tensor> inputs = given.inputs, params = given.params;
    const bool asks = std::ranges::count(given.requested, true) != 0;
    size_t place = 0;
    for (auto* list : {&inputs, &params})
      for (Tensor& tensor : *list) {
        const bool requested = given.requested[place++];
        if (!tensor.defined() || (tensor.requires_grad() == requested && requested)) continue;
        const c10::AutoGradMode no_grad(false);
        tensor = tensor.detach();
        if (requested && tensor.is_floating_point()) tensor.set_requires_grad(true);
      }
    Arguments marked = arguments;
    marked.inputs = inputs;
    marked.params = params;
    return key_of(marked, asks, /*traced=*/false, program->description().sizes_in_key);
  }

  /// Replaces workspaces of another recipe, and those that lack a direction, by new ones.
  void fit_workspaces(at::TensorList given) {
    const bool are_as_many = given.size() == plan->workspaces.size();
    size_t next = 0;
    for (const CachedWeight& cached : plan->cached_weights) {
      kernel_ops::Workspace workspace;
      for (size_t part = 0; part < workspace.size(); ++part)
        if (are_as_many && kernel_ops::has_part(*cached.quantizer, cached.parts, part))
          workspace[part] = given[next++];
      Tensor& stamp = workspace[kernel_ops::stamp_part];
      if (stamp.defined() && !kernel_ops::is_stamp(stamp)) stamp = Tensor();
      const auto made = kernel_ops::fitting_workspace(pieces_of(cached, *plan, arguments.params),
                                                      *cached.quantizer, cached.parts, workspace);
      std::ranges::copy_if(made, std::back_inserter(workspaces), &Tensor::defined);
    }
  }

  /// The argument that shares memory with the tensor, or whose codes do; nullptr: none.
  const Tensor* argument_behind(const Tensor& tensor) const {
    const auto in = [&](const auto& list) -> const Tensor* {
      for (const Tensor& other : list)
        if (other.defined() && shares_memory(other, tensor)) return &other;
      return nullptr;
    };
    const Tensor* found = in(arguments.inputs);
    if (found == nullptr) found = in(arguments.params);
    for (const QuantizedArgument& param : arguments.quantized)
      if (found == nullptr) found = in(param.codes.parts);
    return found;
  }
  bool is_an_argument(const Tensor& tensor) const { return argument_behind(tensor) != nullptr; }

  std::shared_ptr<Program> program;
  Arguments arguments;
  std::shared_ptr<const Plan> plan;
  Path path;
  std::vector<Tensor> workspaces;
};

/// A view that a step made has a version counter of its own, so the argument's version is noted.
ReadArgument seen(const Tensor* argument) {
  if (argument == nullptr) return {};
  return {kernel_ops::number_of_memory(*argument), version_of(*argument)};
}

/// The memory and versions of codes in workspaces. The library writes them without counting
/// versions, so another version means that someone else has written. A stamp is not noted: only the
/// library writes it.
std::vector<ReadArgument> seen_codes(at::TensorList workspaces) {
  std::vector<ReadArgument> seen_of_each;
  for (const Tensor& tensor : workspaces)
    seen_of_each.push_back(tensor.scalar_type() == at::kLong ? ReadArgument() : seen(&tensor));
  return seen_of_each;
}

/// Outputs that share no memory with an argument or another output.
std::vector<Tensor> fresh_outputs(const Planned& planned, Frame& frame) {
  std::vector<Tensor> outputs;
  for (const Value value : planned.plan->outputs) {
    const Tensor& output = frame.tensor(value);
    const bool is_shared =
        planned.is_an_argument(output) ||
        std::ranges::any_of(outputs, [&](const Tensor& o) { return shares_memory(o, output); });
    outputs.push_back(is_shared ? output.clone() : output);
  }
  return outputs;
}

}  // namespace

FunctionalResults functional_forward(const FunctionalArguments& given) {
  const Planned planned(given);
  const Plan& plan = *planned.plan;
  const c10::AutoGradMode no_grad(false);
  Session session(plan, planned.path, planned.arguments);
  Frame& frame = session.frame();
  session.run_forward();
  FunctionalResults results;
  results.outputs = fresh_outputs(planned, frame);
  for (size_t k = 0; k < plan.kept.size(); ++k) {
    const Value value = plan.kept[k];
    const Format format = plan.types[index_of(value)].format;
    TORCH_INTERNAL_ASSERT(format != Format::opaque, "plain functions run no user code");
    const c10::SymDimVector* sizes = format == Format::shape   ? &frame.shape(value)
                                     : format == Format::codes ? frame.noted_sizes(value)
                                                               : nullptr;
    if (sizes != nullptr)
      results.carried.emplace_back(k, std::vector(sizes->begin(), sizes->end()));
    if (format == Format::shape) continue;
    for (const Tensor& tensor : frame.tensors(value)) {
      const Tensor* const argument = planned.argument_behind(tensor);
      results.saved.push_back(argument == nullptr ? tensor : Tensor());
      results.read.push_back(seen(argument));
    }
  }
  results.workspaces = planned.workspaces;
  std::ranges::copy(seen_codes(results.workspaces), std::back_inserter(results.read));
  return results;
}

struct FunctionalContext::Kept {
  std::shared_ptr<const Plan> plan;
  Path path;
  /// By index in Plan::kept: the parts of each value.
  std::vector<std::vector<Tensor>> tensors;
  std::vector<std::pair<size_t, c10::SymDimVector>> carried;
  std::vector<Tensor> workspaces, state;
  std::vector<ReadArgument> codes;  // in the workspaces
  Buffers buffers;
  /// Arguments that backward reads, with their versions.
  struct Read {
    std::string name;
    Tensor tensor;
    int64_t version;
  };
  std::vector<Read> reads;
  /// The traits that gradients of the outputs must have.
  struct OutputTraits {
    c10::SymDimVector sizes;
    at::ScalarType dtype;
    c10::Device device;
  };
  std::vector<OutputTraits> outputs;
  void check(const Tensor& gradient, size_t place) const;
  /// Saved tensors that are no arguments.
  std::vector<Tensor> own;
  bool is_released = false;

  /// Leaves each value to the last step of backward that reads it, which then releases it.
  void hand_over() {
    own.clear();
    reads.clear();
    workspaces.clear();
    state.clear();
    buffers = {};
    is_released = true;
  }
  void release() {
    hand_over();
    tensors.clear();
  }
};

FunctionalContext::~FunctionalContext() = default;
FunctionalContext::FunctionalContext(FunctionalContext&&) noexcept = default;

FunctionalContext::FunctionalContext(const FunctionalArguments& given,
                                     const FunctionalResults& results)
    : kept_(std::make_unique<Kept>()) {
  Planned planned(given);
  const Plan& plan = *planned.plan;
  if (!results.workspaces.empty()) {  // the workspaces that forward has created
    planned.workspaces = results.workspaces;
    planned.arguments.workspaces = planned.workspaces;
  }
  size_t expected = 0;
  for (const Value value : plan.kept)
    if (plan.types[index_of(value)].format != Format::shape)
      expected += tensors_per_value(plan.types[index_of(value)]);
  TORCH_CHECK_VALUE(results.saved.size() == expected, "setup_context: expected the ", expected,
                    " tensors that forward of these arguments saves, got ", results.saved.size(),
                    ". Pass the arguments and results of one call.");
  TORCH_CHECK_VALUE(results.outputs.size() == plan.outputs.size() &&
                        results.read.size() == expected + results.workspaces.size(),
                    "setup_context: expected ", plan.outputs.size(),
                    " outputs, and of what is saved whether it is an argument, got ",
                    results.outputs.size(), " outputs and ", results.read.size(), " of ",
                    expected + results.workspaces.size(), ". Pass all that forward has returned.");
  for (const Tensor& output : results.outputs) {
    const c10::SymIntArrayRef sizes = output.sym_sizes();
    kept_->outputs.push_back({{sizes.begin(), sizes.end()}, output.scalar_type(), output.device()});
  }
  kept_->codes = seen_codes(results.workspaces);
  TORCH_CHECK_VALUE(std::ranges::equal(kept_->codes, std::span(results.read).subspan(expected)),
                    "setup_context: expected the tensors of weight_workspaces unchanged since "
                    "forward but by the library, as backward reads the codes in them, got an "
                    "in-place write, or others. Write into copies.");
  kept_->plan = planned.plan;
  kept_->path = planned.path;
  kept_->workspaces = planned.workspaces;
  kept_->state = given.state;
  kept_->buffers = planned.arguments.buffers;
  for (const auto& [place, sizes] : results.carried)
    kept_->carried.emplace_back(place, c10::SymDimVector(sizes.begin(), sizes.end()));
  const c10::AutoGradMode no_grad(false);
  OnDemand arguments(plan, planned.arguments, planned.path);
  size_t next = 0;
  for (const Value value : plan.kept) {
    auto& parts = kept_->tensors.emplace_back();
    if (plan.types[index_of(value)].format == Format::shape) continue;
    for (size_t part = 0; part < tensors_per_value(plan.types[index_of(value)]); ++part) {
      const auto& [memory, version] = results.read[next];
      const Tensor& saved = results.saved[next++];
      if (saved.defined()) {
        parts.push_back(saved);
        kept_->own.push_back(saved);
        continue;
      }
      arguments.provide(value);  // by steps that create views
      parts.push_back(arguments.frame().tensor(value, part));
      const Tensor* const argument = planned.argument_behind(parts.back());
      const auto [memory_now, version_now] = seen(argument);
      const std::string& name = plan.types[index_of(value)].name;
      TORCH_CHECK_VALUE(argument != nullptr && memory_now == memory,
                        "setup_context: expected results of these arguments, got other memory as ",
                        name,
                        ", which backward reads. Pass the arguments and results of one call.");
      TORCH_CHECK_VALUE(version_now == version, "setup_context: expected ", name,
                        " unchanged since forward, as backward reads it, got an in-place write. "
                        "Write into a copy.");
      kept_->reads.push_back({name, *argument, version_now});
    }
  }
}

void FunctionalContext::Kept::check(const Tensor& gradient, size_t place) const {
  const OutputTraits& output = outputs[place];
  TORCH_CHECK_VALUE(gradient.sym_sizes() == c10::SymIntArrayRef(output.sizes),
                    "backward: expected a gradient of shape ", c10::SymIntArrayRef(output.sizes),
                    ", as output ", place, " has, got ", gradient.sym_sizes(),
                    ". Expand or reshape it.");
  TORCH_CHECK_TYPE(gradient.scalar_type() == output.dtype, "backward: expected a gradient in ",
                   output.dtype, ", as output ", place, " is, got ", gradient.scalar_type(),
                   ". Convert it with .to().");
  TORCH_CHECK_VALUE(gradient.device() == output.device, "backward: expected a gradient on ",
                    output.device, ", where output ", place, " is, got one on ", gradient.device(),
                    ". Move it with .to().");
}

std::vector<Tensor> FunctionalContext::backward(at::TensorList gradients, bool retain) {
  TORCH_CHECK(!kept_->is_released,
              "backward: expected a context whose activations are there, got one whose backward "
              "has run. Pass retain=True to all calls but the last.");
  const Plan& plan = *kept_->plan;
  TORCH_CHECK_VALUE(gradients.size() == plan.outputs.size(), "backward: expected ",
                    plan.outputs.size(), " gradients, one per output, got ", gradients.size(),
                    ". Pass None for an output that nobody differentiates.");
  for (size_t i = 0; i < gradients.size(); ++i)
    if (gradients[i].defined()) kept_->check(gradients[i], i);
  for (const Kept::Read& read : kept_->reads)
    TORCH_CHECK_VALUE(version_of(read.tensor) == read.version, "backward: expected ", read.name,
                      " unchanged since the setup of the context, as backward reads it, got an "
                      "in-place write. Write into a copy.");
  if (!kept_->codes.empty())
    TORCH_CHECK_VALUE(seen_codes(kept_->workspaces) == kept_->codes,
                      "backward: expected the tensors of weight_workspaces unchanged since the "
                      "setup of the context but by the library, as backward reads the codes in "
                      "them, got an in-place write. Write into copies.");
  std::vector<Tensor> results(plan.gradients.size());
  BackwardMask mask = full_mask(plan);
  for (size_t i = 0; i < gradients.size(); ++i)
    mask.given[i] = mask.given[i] && gradients[i].defined();
  const c10::AutoGradMode no_grad(false);
  if (std::ranges::find(mask.given, true) != mask.given.end()) {
    const auto backward = backward_plan(plan, mask);
    Session session(plan, kept_->path, backward->steps,
                    {.gradients = gradients,
                     .workspaces = kept_->workspaces,
                     .state = kept_->state,
                     .buffers = kept_->buffers});
    if (!retain) kept_->hand_over();
    const auto load = [&](Value value, size_t index) {
      for (size_t part = 0; part < kept_->tensors[index].size(); ++part)
        session.frame().tensor(value, part) = kept_->tensors[index][part];
      for (const auto& [place, sizes] : kept_->carried) {
        if (place != index) continue;
        if (plan.types[index_of(value)].format == Format::shape)
          session.frame().shape(value) = sizes;
        else
          session.frame().note_sizes(value, sizes);
      }
    };
    const auto release = [&](size_t index) {
      if (!retain) kept_->tensors[index].clear();
    };
    results = session.run_backward(*backward, load, release);
  }
  if (!retain) kept_->release();
  return results;
}

std::vector<Tensor> FunctionalContext::saved() const { return kept_->own; }

int64_t FunctionalContext::saved_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < kept_->own.size(); ++i) {
    const bool is_counted = std::ranges::any_of(
        kept_->own.begin(), kept_->own.begin() + static_cast<std::ptrdiff_t>(i),
        [&](const Tensor& other) { return shares_memory(other, kept_->own[i]); });
    if (!is_counted) bytes += static_cast<int64_t>(kept_->own[i].nbytes());
  }
  return bytes;
}

}  // namespace tandem
