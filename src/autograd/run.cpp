#include "autograd/run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "autograd/direct.h"
#include "autograd/node.h"
#include "autograd/session.h"
#include "executor/executor.h"
#include "kernel_ops/weights/weights.h"

namespace tandem {

namespace {

using torch::autograd::Node;

/// The argument or earlier output that an output shares memory with. It is the one that the plan
/// names, or, because user code may return any tensor, the first one found.
const at::Tensor* base_of(const Outputs& outputs, size_t index, const Arguments& arguments,
                          const Plan& plan) {
  const at::Tensor* root = argument_of(plan, arguments, root_of(plan, plan.outputs[index]));
  if (root != nullptr && shares_memory(*root, outputs[index])) return root;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (shares_memory(arguments.at(i), outputs[index])) return &arguments.at(i);
  for (size_t i = 0; i < index; ++i)
    if (shares_memory(outputs[i], outputs[index])) return &outputs[i];
  return nullptr;
}

/// Tracing does not know of memory that results share.
void clone_shared(Outputs& outputs, const Arguments& arguments, const Plan& plan) {
  for (size_t i = 0; i < outputs.size(); ++i)
    if (base_of(outputs, i, arguments, plan) != nullptr) outputs[i] = outputs[i].clone();
}

/// Gives outputs that are one tensor but different values an object each: a reentrant checkpoint,
/// which runs forward without a graph, would otherwise send the gradients of all to one of them.
/// torch itself does this for outputs that are arguments.
void separate(Outputs& outputs, const Arguments& arguments, const Plan& plan) {
  for (size_t i = 1; i < outputs.size(); ++i)
    for (size_t k = 0; k < i; ++k)
      if (outputs[i].is_same(outputs[k]) && plan.outputs[i] != plan.outputs[k] &&
          !arguments.has(outputs[i])) {
        outputs[i] = outputs[i].detach();
        break;
      }
}

/// `tensor` as a differentiable view of `base`, without history. If it has a history of its own,
/// writing it in place raises: autograd could not tell the node that the memory of other outputs or
/// of an argument has changed.
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

/// Represents an in-place sum in the history of the view's base: torch sends it the gradient of
/// what the view now holds.
class OverwrittenView : public Node {
 public:
  OverwrittenView(const at::Tensor& view, torch::autograd::Edge now) {
    add_input_metadata(view);
    // The gradient of the view's old value, which the sum has read, comes through the pipeline and
    // is zero here. torch expects an edge here if the base has one, and uses the base's own edge.
    add_next_edge(torch::autograd::impl::gradient_edge(at::Tensor(view._base())));
    add_next_edge(std::move(now));
  }
  std::string name() const override { return "TandemOverwrittenView"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    return {at::zeros_like(gradients[0]), gradients[0]};
  }
};

/// The edge of a tensor that holds the value of `result`: of the output that it is, or of an error
/// if it is no output. The error leads to everything that the pipeline leads to, because torch runs
/// a node only for gradients of what it leads to.
torch::autograd::Edge edge_of(const Overwritten& overwritten, const at::Tensor& tensor,
                              const Outputs& outputs, const Plan& plan, const Node& node) {
  const auto output = std::find(plan.outputs.begin(), plan.outputs.end(), overwritten.result);
  if (output != plan.outputs.end())
    return torch::autograd::impl::gradient_edge(
        outputs[static_cast<size_t>(output - plan.outputs.begin())]);
  auto refusal = compat::make_node<torch::autograd::Error>(
      "pipeline: expected no gradient for a tensor that an in-place sum inside of a pipeline has "
      "overwritten, got one. Use in_place=False, or pass the extra input detached.",
      torch::autograd::edge_list(node.next_edges()));
  refusal->add_input_metadata(tensor);
  return {std::move(refusal), 0};
}

/// Gives overwritten arguments, and the bases of views, the history of the sum, as any in-place
/// operation does. A leaf stays a leaf and gets the gradient of its old value.
void rebase_overwritten(const Outputs& outputs, const Arguments& arguments, const Plan& plan,
                        const Node& node) {
  for (const Overwritten& overwritten : plan.overwritten) {
    const at::Tensor& input = arguments.inputs[overwritten.input];
    if (!overwritten.requires_grad || (input.requires_grad() && input.is_leaf())) continue;
    torch::autograd::Edge edge = edge_of(overwritten, input, outputs, plan, node);
    const auto* view = torch::autograd::impl::get_view_autograd_meta(input);
    if (view != nullptr && view->has_bw_view())
      edge = {compat::make_node<OverwrittenView>(input, std::move(edge)), 0};
    torch::autograd::impl::rebase_history(input, std::move(edge));
  }
}

/// Gives outputs the node as their history.
void set_history(Outputs& outputs, const Arguments& arguments, const Plan& plan,
                 const compat::NodePtr& node, Path path) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const bool has_history = plan.output_requires_grad[i];
    if (path != Path::dispatch)
      if (const at::Tensor* base = base_of(outputs, i, arguments, plan))
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
      : watches_(!plan.overwritten.empty() || plan.runs_user_code), arguments_(arguments) {
    if (!watches_) return;
    for (size_t i = 0; i < arguments.size(); ++i) versions_.push_back(version_of(arguments.at(i)));
  }
  /// What backward will read must be as forward read it: nothing may have written it since, also
  /// not this pipeline.
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
  bool watches_;
  const Arguments& arguments_;
  c10::SmallVector<int64_t, 16> versions_;
};

/// What an in-place step writes must be writable, and no second in-place step may write that
/// memory: a kept result would change.
void check_in_place(const Plan& plan, const Arguments& arguments, Path path) {
  TORCH_CHECK_VALUE(!plan.mutates_buffers_in_forward || !is_recompute(),
                    "pipeline: expected no tensor of the caller for an output while backward ",
                    "recomputes a forward that has written it already, got one under a ",
                    "checkpoint. Leave \"output\" out of op_kwargs.");
  if (plan.overwritten.empty()) return;
  TORCH_CHECK_VALUE(!is_recompute(),
                    "pipeline: expected no write into a caller's tensor while backward recomputes ",
                    "a forward that has written it already, got in_place=True under a ",
                    "checkpoint. Use in_place=False.");
  for (size_t i = 0; i < plan.overwritten.size(); ++i) {
    const at::Tensor& input = arguments.inputs[plan.overwritten[i].input];
    for (size_t k = 0; k < i; ++k)
      TORCH_CHECK_VALUE(!arguments.inputs[plan.overwritten[k].input].is_alias_of(input),
                        "pipeline: expected memory that no other in-place op of the pipeline ",
                        "writes, got the same twice. Use in_place=False, or pass a copy.");
    if (path != Path::direct || !plan.overwritten[i].requires_grad || !input.is_view()) continue;
    TORCH_CHECK_VALUE(!input.requires_grad() || !input._base().is_leaf(),
                      "pipeline: expected memory that no leaf shares for an in-place sum, got a ",
                      "view of a leaf that requires grad. Use in_place=False, or pass the leaf.");
    torch::autograd::check_inplace(input, /*requires_grad=*/true);
  }
}

}  // namespace

namespace {
std::atomic<QuantizedReader> quantized_reader{nullptr};
}  // namespace

void set_quantized_reader(QuantizedReader reader) { quantized_reader = reader; }

std::vector<QuantizedArgument> quantized_among(at::TensorList inputs, at::TensorList params) {
  std::vector<QuantizedArgument> found;
  const QuantizedReader read = quantized_reader.load(std::memory_order_relaxed);
  if (read == nullptr) return found;
  for (size_t i = 0; i < inputs.size() + params.size(); ++i) {
    const at::Tensor& tensor = i < inputs.size() ? inputs[i] : params[i - inputs.size()];
    if (!tensor.defined() || !tensor.key_set().has(c10::DispatchKey::Python)) continue;
    if (auto codes = read(tensor)) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !has_tangent(tensor), "pipeline: expected arguments in codes without tangents, got one ",
          "under forward-mode differentiation, and codes have none. Pass its numbers: "
          "dequantize().");
      if (serves_both_directions(*codes->quantizer) && !codes->has(Direction::row))
        std::swap_ranges(codes->parts.begin(), codes->parts.begin() + column_codes,
                         codes->parts.begin() + column_codes);  // one value serves both
      found.push_back({i, *std::move(codes)});
    }
  }
  return found;
}

Value root_of(const Plan& plan, Value value) {
  while (exists(plan.types[index_of(value)].view_of)) value = plan.types[index_of(value)].view_of;
  return value;
}

Buffers Buffers::of(at::TensorList tensors) {
  if (tensors.empty()) return {};
  return {tensors.size(), [held = tensors.vec()](size_t i) { return held[i]; }};
}

const at::Tensor* argument_of(const Plan& plan, const Arguments& arguments, Value root) {
  for (const auto& [values, tensors] :
       {std::pair(&plan.inputs, arguments.inputs), std::pair(&plan.params, arguments.params)})
    if (const auto found = std::find(values->begin(), values->end(), root); found != values->end())
      return &tensors[static_cast<size_t>(found - values->begin())];
  return nullptr;
}

Outputs run_pipeline(const std::shared_ptr<const Plan>& plan, const Arguments& arguments,
                     Path path) {
  check_in_place(*plan, arguments, path);
  Session session(*plan, path, arguments);
  Outputs outputs;
  const bool is_first = arguments.region != nullptr && !plan->state.empty() &&
                        arguments.state[0].is_same(arguments.region->token(false));
  if (is_first)  // this call is no recompute
    arguments.region->note_forward(used_states(*plan, arguments.state, /*is_backward=*/false));
  if (!plan->needs_backward) {
    session.run_forward();
    session.hand_out(outputs);
    if (path == Path::dispatch)
      clone_shared(outputs, arguments, *plan);
    else
      separate(outputs, arguments, *plan);
    return outputs;
  }
  auto node = compat::make_node<PipelineBackward>(plan, path);
  torch::autograd::edge_list edges;
  edges.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i)
    edges.push_back(arguments.at(i).requires_grad()
                        ? torch::autograd::impl::gradient_edge(arguments.at(i))
                        : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  const Versions versions(*plan, arguments);
  session.run_forward();
  versions.check(*plan);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    session.hand_out(outputs);
    if (path == Path::dispatch) clone_shared(outputs, arguments, *plan);
  }
  set_history(outputs, arguments, *plan, node, path);
  if (path == Path::direct) rebase_overwritten(outputs, arguments, *plan, *node);
  node->save(session.frame(), arguments, outputs);
  return outputs;
}

bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

bool is_recompute() { return c10::GradMode::is_enabled() && is_in_backward(); }

namespace {

const PipelineBackward* node_of(const Outputs& outputs) {
  for (const at::Tensor& output : outputs)
    if (const auto node = output.grad_fn())
      if (const Node& its = *node; typeid(its) == typeid(PipelineBackward))
        return static_cast<const PipelineBackward*>(&its);
  return nullptr;
}

}  // namespace

int64_t note_kept_bytes(const Outputs& outputs, std::span<std::atomic<int64_t>> by_value) {
  const PipelineBackward* node = node_of(outputs);
  return node == nullptr ? 0 : node->note_kept_bytes(by_value);
}

std::vector<std::vector<at::Tensor>> kept_tensors(const Outputs& outputs) {
  const PipelineBackward* node = node_of(outputs);
  return node == nullptr ? std::vector<std::vector<at::Tensor>>() : node->kept_tensors();
}

std::vector<at::Tensor> gradients_of(at::TensorList outputs, at::TensorList inputs,
                                     at::TensorList grad_outputs) {
  return torch::autograd::grad(outputs.vec(), inputs.vec(), grad_outputs.vec(),
                               /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

}  // namespace tandem
