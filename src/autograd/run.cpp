#include "autograd/run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "autograd/node.h"
#include "executor/executor.h"

namespace tandem {

namespace {

using torch::autograd::Node;

/// The same memory and version counter as another tensor object, without its history.
at::Tensor shared(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      tensor.unsafeGetTensorImpl()->version_counter(),
      /*allow_tensor_metadata_change=*/false));
}

void fill(Frame& frame, const Plan& plan, const Arguments& arguments) {
  for (size_t i = 0; i < plan.inputs.size(); ++i)
    frame.tensor(plan.inputs[i]) = arguments.inputs[i];
  for (size_t i = 0; i < plan.params.size(); ++i)
    frame.tensor(plan.params[i]) = arguments.params[i];
  TORCH_CHECK_VALUE(arguments.workspaces.size() == plan.workspaces.size(), "pipeline: expected ",
                    plan.workspaces.size(), " workspace tensors, got ", arguments.workspaces.size(),
                    ". Allocate them for the weights of this pipeline.");
  for (size_t i = 0; i < plan.workspaces.size(); ++i)
    frame.tensor(plan.workspaces[i]) = arguments.workspaces[i];
  if (plan.opaques + plan.shapes != 0) frame.reserve_side_values(plan.opaques, plan.shapes);
}

/// Every output as its own tensor object: an argument, or what another output is already, must not be marked.
void make_distinct(Outputs& outputs, const Arguments& arguments, Path path) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    bool is_taken = false;
    for (size_t j = 0; j < i; ++j) is_taken |= outputs[j].is_same(outputs[i]);
    for (const at::TensorList list : {arguments.inputs, arguments.params})
      for (const at::Tensor& argument : list)
        is_taken |= outputs[i].is_same(argument) ||
                    (path == Path::dispatch && outputs[i].is_alias_of(argument));
    if (is_taken) outputs[i] = path == Path::dispatch ? outputs[i].clone() : shared(outputs[i]);
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
  c10::SmallVector<const at::Tensor*, 4> written;
  for (const Step& step : plan.forward)
    for (const Value value : step.mutates)
      for (size_t i = 0; i < plan.inputs.size(); ++i) {
        if (plan.inputs[i] != value) continue;
        const at::Tensor& input = arguments.inputs[i];
        TORCH_CHECK_VALUE(
            !(c10::GradMode::is_enabled() && input.requires_grad() && input.is_leaf()), step.kind,
            ": expected a tensor that may be written in place, got a leaf ",
            "that requires grad. Use in_place=False.");
        for (const at::Tensor* other : written)
          TORCH_CHECK_VALUE(!other->is_alias_of(input), step.kind,
                            ": expected memory that no other ",
                            "in-place op of the pipeline writes, got the same twice. Use ",
                            "in_place=False, or pass a copy.");
        written.push_back(&input);
      }
}

/// Extra keys that are on while autocast is: steps have their dtypes from the plan.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

}  // namespace

Outputs run_pipeline(const std::shared_ptr<const Plan>& plan, const Arguments& arguments,
                     Path path) {
  check_in_place(*plan, arguments);
  const NoAutocast no_autocast;
  Frame frame(path, plan->has_kernels, plan->types, plan->slot_of, plan->tensor_slots);
  fill(frame, *plan, arguments);
  Outputs outputs;
  if (!plan->needs_backward) {
    run_forward(frame, *plan);
    for (const Value output : plan->outputs) outputs.push_back(frame.tensor(output));
    if (path == Path::dispatch) make_distinct(outputs, arguments, path);
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
    make_distinct(outputs, arguments, path);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (plan->output_requires_grad[i]) {
      torch::autograd::impl::set_gradient_edge(outputs[i],
                                               {node, node->add_input_metadata(outputs[i])});
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  }
  for (size_t i = 0; i < outputs.size();
       ++i)  // a kept output is saved as the tensor that the caller gets
    if (plan->kept_at[index_of(plan->outputs[i])] >= 0 &&
        plan->types[index_of(plan->outputs[i])].origin == Origin::result)
      frame.tensor(plan->outputs[i]) = outputs[i];
  node->save(frame, arguments.inputs, arguments.params, arguments.workspaces);
  return outputs;
}

std::vector<int64_t> kept_bytes(const Outputs& outputs) {
  for (const at::Tensor& output : outputs)
    if (const auto node = output.grad_fn())
      if (const auto* pipeline = dynamic_cast<const PipelineBackward*>(node.get()))
        return pipeline->kept_bytes();
  return {};
}

int64_t saved_bytes(const Outputs& outputs) {
  for (const at::Tensor& output : outputs)
    if (const auto node = output.grad_fn())
      if (const auto* pipeline = dynamic_cast<const PipelineBackward*>(node.get()))
        return pipeline->saved_bytes();
  return 0;
}

std::vector<at::Tensor> gradients_of(at::TensorList outputs, at::TensorList inputs,
                                     at::TensorList grad_outputs) {
  return torch::autograd::grad(outputs.vec(), inputs.vec(), grad_outputs.vec(),
                               /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

}  // namespace tandem
