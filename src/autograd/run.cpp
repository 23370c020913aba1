#include "autograd/run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include "autograd/direct.h"
#include "autograd/node.h"
#include "executor/executor.h"
#include "kernel_ops/weights.h"

namespace tandem {

namespace {

using torch::autograd::Node;

/// What a caller of the dispatcher op passes as workspaces, before any step runs.
void check_workspaces(const Plan& plan, const Arguments& arguments) {
  for (size_t w = 0; w < plan.workspace_weights.size(); ++w) {
    const auto param = std::find(plan.params.begin(), plan.params.end(), plan.workspace_weights[w]);
    const at::Tensor* parts = &arguments.workspaces[4 * w];
    kernel_ops::check_workspace(arguments.params[static_cast<size_t>(param - plan.params.begin())],
                                parts[0], parts[1], parts[2], parts[3]);
  }
}

void fill(Frame& frame, const Plan& plan, const Arguments& arguments) {
  for (size_t i = 0; i < plan.inputs.size(); ++i)
    frame.tensor(plan.inputs[i]) = arguments.inputs[i];
  for (size_t i = 0; i < plan.params.size(); ++i)
    frame.tensor(plan.params[i]) = arguments.params[i];
  TORCH_CHECK_VALUE(arguments.workspaces.size() == plan.workspaces.size(), "pipeline: expected ",
                    plan.workspaces.size(), " workspace tensors, got ", arguments.workspaces.size(),
                    ". Allocate them for the weights of this pipeline.");
  if (frame.path() == Path::dispatch) check_workspaces(plan, arguments);
  for (size_t i = 0; i < plan.workspaces.size(); ++i)
    frame.tensor(plan.workspaces[i]) = arguments.workspaces[i];
  if (plan.opaques + plan.shapes != 0) frame.reserve_side_values(plan.opaques, plan.shapes);
}

/// The argument or earlier output that an output shares memory with.
const at::Tensor* base_of(const Outputs& outputs, size_t index, const Arguments& arguments) {
  for (const at::TensorList list : {arguments.inputs, arguments.params})
    for (const at::Tensor& argument : list)
      if (shares_memory(argument, outputs[index])) return &argument;
  for (size_t i = 0; i < index; ++i)
    if (shares_memory(outputs[i], outputs[index])) return &outputs[i];
  return nullptr;
}

/// Tracing knows of no memory that results share.
void clone_shared(Outputs& outputs, const Arguments& arguments) {
  for (size_t i = 0; i < outputs.size(); ++i)
    if (base_of(outputs, i, arguments) != nullptr) outputs[i] = outputs[i].clone();
}

/// A differentiable view of `base` that is `tensor`, without its history. One with a history of its own cannot be written in place:
/// autograd could not tell the node that the memory of its other outputs, or of an argument, has changed.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& tensor, bool has_history) {
  using torch::autograd::CreationMeta;
  at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const auto version = impl->is_inference() ? impl->version_counter() : c10::VariableVersion(0);
  return torch::autograd::as_view(
      base,
      at::Tensor(impl->shallow_copy_and_detach(version, /*allow_tensor_metadata_change=*/true)),
      /*is_bw_differentiable=*/true, /*is_fw_differentiable=*/true, /*view_func=*/nullptr,
      /*rev_view_func=*/nullptr,
      has_history ? CreationMeta::IN_CUSTOM_FUNCTION : CreationMeta::DEFAULT);
}

/// A tensor with a history that the call has overwritten: it goes on with the output's, as behind any in-place operation. A leaf stays
/// one: its old value is gone, and the gradient of that is what it gets.
void rebase_mutated(const Outputs& outputs, const Arguments& arguments, const Plan& plan) {
  for (const Step& step : plan.forward)
    for (const Value value : step.mutates)
      for (size_t i = 0; i < plan.inputs.size(); ++i) {
        const at::Tensor& input = arguments.inputs[i];
        if (plan.inputs[i] != value || !input.requires_grad() || input.is_leaf()) continue;
        for (const at::Tensor& output : outputs)
          if (output.requires_grad() && shares_memory(output, input)) {
            torch::autograd::impl::set_gradient_edge(input,
                                                     torch::autograd::impl::gradient_edge(output));
            if (auto* view = torch::autograd::impl::get_view_autograd_meta(input);
                view != nullptr && view->has_bw_view())
              view->set_creation_meta(torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
            break;
          }
      }
}

/// Outputs get the node as their history.
void set_history(Outputs& outputs, const Arguments& arguments, const Plan& plan,
                 const compat::NodePtr& node, Path path) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const bool has_history = plan.output_requires_grad[i];
    if (path != Path::dispatch)
      if (const at::Tensor* base = base_of(outputs, i, arguments))
        outputs[i] = view_of(*base, outputs[i], has_history);
    if (has_history) {
      torch::autograd::impl::set_gradient_edge(outputs[i],
                                               {node, node->add_input_metadata(outputs[i])});
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  }
}

class Versions {
 public:
  Versions(const Plan& plan, const Arguments& arguments)
      : watches_(plan.mutates_arguments || plan.runs_user_code), arguments_(arguments) {
    if (!watches_) return;
    for (const at::TensorList list : {arguments.inputs, arguments.params})
      for (const at::Tensor& tensor : list) versions_.push_back(version_of(tensor));
  }
  /// What backward will read must be what forward read: nothing may have written it since, not even this pipeline.
  void check(const Plan& plan) const {
    if (!watches_) return;
    size_t next = 0;
    for (const auto& [list, values] :
         {std::pair(arguments_.inputs, &plan.inputs), std::pair(arguments_.params, &plan.params)})
      for (size_t i = 0; i < list.size(); ++i, ++next)
        TORCH_CHECK(
            plan.kept_at[index_of((*values)[i])] < 0 || versions_[next] == version_of(list[i]),
            "pipeline: expected ", plan.types[index_of((*values)[i])].name,
            " unchanged until the end of the call, as backward reads it, got an in-place ",
            "write by an op of the pipeline. Use in_place=False, or write into a copy.");
  }

 private:
  static int64_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
  }
  bool watches_;
  const Arguments& arguments_;
  c10::SmallVector<int64_t, 16> versions_;
};

/// What an in-place step writes must be writable, and no second such step may write the same memory: a kept result would change.
void check_in_place(const Plan& plan, const Arguments& arguments) {
  if (!plan.mutates_arguments) return;
  const bool recomputes = is_recompute();
  c10::SmallVector<const at::Tensor*, 4> written;
  for (const Step& step : plan.forward)
    for (const Value value : step.mutates)
      for (size_t i = 0; i < plan.inputs.size(); ++i) {
        if (plan.inputs[i] != value) continue;
        const at::Tensor& input = arguments.inputs[i];
        TORCH_CHECK_VALUE(!recomputes, step.name,
                          ": expected no write into a caller's tensor while backward recomputes ",
                          "a forward that has written it already, got in_place=True under a ",
                          "checkpoint. Use in_place=False.");
        for (const at::Tensor* other : written)
          TORCH_CHECK_VALUE(!other->is_alias_of(input), step.name,
                            ": expected memory that no other ",
                            "in-place op of the pipeline writes, got the same twice. Use ",
                            "in_place=False, or pass a copy.");
        written.push_back(&input);
      }
}

}  // namespace

Outputs run_pipeline(const std::shared_ptr<const Plan>& plan, const Arguments& arguments,
                     Path path) {
  check_in_place(*plan, arguments);
  Frame frame(path, plan->types, plan->slot_of, plan->tensor_slots);
  fill(frame, *plan, arguments);
  Outputs outputs;
  if (!plan->needs_backward) {
    run_forward(frame, *plan);
    for (const Value output : plan->outputs) outputs.push_back(frame.tensor(output));
    if (path == Path::dispatch) clone_shared(outputs, arguments);
    return outputs;
  }
  auto node = compat::make_node<PipelineBackward>(plan, path);
  torch::autograd::edge_list edges;
  edges.reserve(arguments.inputs.size() + arguments.params.size());
  for (const at::TensorList list : {arguments.inputs, arguments.params})
    for (const at::Tensor& tensor : list)
      edges.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                             : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  const Versions versions(*plan, arguments);
  run_forward(frame, *plan);
  versions.check(*plan);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    for (const Value output : plan->outputs) outputs.push_back(frame.tensor(output));
    if (path == Path::dispatch) clone_shared(outputs, arguments);
  }
  set_history(outputs, arguments, *plan, node, path);
  if (plan->mutates_arguments) rebase_mutated(outputs, arguments, *plan);
  node->save(frame, arguments, outputs);
  return outputs;
}

bool is_recompute() {
  return c10::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() != -1;
}

namespace {

const PipelineBackward* node_of(const Outputs& outputs) {
  for (const at::Tensor& output : outputs)
    if (const auto node = output.grad_fn())
      if (const auto* pipeline = dynamic_cast<const PipelineBackward*>(node.get())) return pipeline;
  return nullptr;
}

}  // namespace

int64_t saved_bytes(const Outputs& outputs) { return note_kept_bytes(outputs, {}); }

int64_t note_kept_bytes(const Outputs& outputs, std::span<std::atomic<int64_t>> by_entry) {
  const PipelineBackward* node = node_of(outputs);
  return node == nullptr ? 0 : node->note_kept_bytes(by_entry);
}

std::vector<at::Tensor> kept_tensors(const Outputs& outputs) {
  const PipelineBackward* node = node_of(outputs);
  return node == nullptr ? std::vector<at::Tensor>() : node->kept_tensors();
}

std::vector<at::Tensor> gradients_of(at::TensorList outputs, at::TensorList inputs,
                                     at::TensorList grad_outputs) {
  return torch::autograd::grad(outputs.vec(), inputs.vec(), grad_outputs.vec(),
                               /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

}  // namespace tandem
