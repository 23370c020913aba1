#include "pipeline/op_call.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/autocast.h"
#include "bindings/bindings.h"
#include "front/attention_rules.h"
#include "kernel_ops/framework/gradient.h"
#include "kernel_ops/weights/weights.h"
#include "ops/deferred.h"
#include "ops/groups.h"
#include "pipeline/functional_call.h"

namespace py = pybind11;

namespace tandem::bindings {

namespace {

using Maybe = std::optional<at::Tensor>;

std::vector<at::Tensor> tensors_of(const std::vector<Maybe>& given) {
  std::vector<at::Tensor> tensors;
  for (const Maybe& tensor : given) tensors.push_back(tensor.value_or(at::Tensor()));
  return tensors;
}

std::vector<Maybe> maybes_of(at::TensorList tensors) {
  std::vector<Maybe> result;
  for (const at::Tensor& tensor : tensors)
    result.push_back(tensor.defined() ? Maybe(tensor) : std::nullopt);
  return result;
}

void bind_functional(py::module_& module) {
  py::class_<FunctionalArguments>(module, "FunctionalArguments")
      .def(py::init<std::string, std::string, std::vector<at::Tensor>, std::vector<at::Tensor>,
                    std::vector<bool>, std::optional<std::vector<at::Tensor>>,
                    std::vector<at::Tensor>, std::vector<at::Tensor>>(),
           py::kw_only(), py::arg("ops"), py::arg("recipe"), py::arg("inputs"), py::arg("params"),
           py::arg("requested"), py::arg("workspaces"), py::arg("state"), py::arg("buffers"));
  module.def(
      "functional_forward",
      [](const FunctionalArguments& arguments) {
        const ContextRegion region;
        const py::gil_scoped_release no_gil;
        const FunctionalResults results = functional_forward(arguments);
        return std::tuple(results.outputs, maybes_of(results.saved), results.read, results.carried,
                          results.workspaces);
      },
      py::arg("arguments"),
      "Outputs, what backward reads, memory and version of what of it are arguments, sizes that it "
      "reads, workspaces.");
  py::class_<FunctionalContext>(module, "FunctionalContext")
      .def(py::init([](const FunctionalArguments& arguments, std::vector<at::Tensor> outputs,
                       const std::vector<Maybe>& saved, std::vector<ReadArgument> read,
                       std::vector<std::pair<size_t, std::vector<c10::SymInt>>> carried,
                       std::vector<at::Tensor> workspaces) {
             return FunctionalContext(arguments, {.outputs = std::move(outputs),
                                                  .saved = tensors_of(saved),
                                                  .read = std::move(read),
                                                  .carried = std::move(carried),
                                                  .workspaces = std::move(workspaces)});
           }),
           py::arg("arguments"), py::arg("outputs"), py::arg("saved"), py::arg("read"),
           py::arg("carried"), py::arg("workspaces"))
      .def(
          "backward",
          [](FunctionalContext& self, const std::vector<Maybe>& gradients, bool retain) {
            const ContextRegion region;
            const py::gil_scoped_release no_gil;
            return maybes_of(self.backward(tensors_of(gradients), retain));
          },
          py::arg("gradients"), py::arg("retain"))
      .def("saved_bytes", &FunctionalContext::saved_bytes)
      .def("saved", &FunctionalContext::saved);
}

void bind_attention(py::module_& module) {
  module.attr("attn_mask_types") =
      py::tuple(py::cast(std::vector<std::string>(kAttnMaskNames.begin(), kAttnMaskNames.end())));
  module.def("attention_heads", [](const std::string& op, int64_t hidden_size,
                                   int64_t num_attention_heads,
                                   std::optional<int64_t> num_gqa_groups,
                                   std::optional<int64_t> kv_channels, int64_t ranks) {
    const AttentionHeads own =
        attention_heads(op, hidden_size, num_attention_heads, num_gqa_groups, kv_channels, ranks);
    return std::tuple(own.channels, own.heads, own.groups);
  });
}

}  // namespace

void bind_op_call(py::module_& module) {
  bind_functional(module);
  bind_attention(module);
  module.def("left_grad_weight", [](const std::vector<at::Tensor>& left) {
    const py::gil_scoped_release no_gil;
    return ops::left_grad_weight(left);
  });
  module.def("left_grad_weights", [](const std::vector<at::Tensor>& left) {
    const py::gil_scoped_release no_gil;
    return ops::left_grad_weights(left);
  });
  module.def("add_left_grad_weight",
             [](const std::vector<at::Tensor>& left, const at::Tensor& target, bool accumulate) {
               const py::gil_scoped_release no_gil;
               ops::add_left_grad_weight(left, target, accumulate);
             });
  module.def(
      "op_forward",
      [](const std::string& description, const std::vector<at::Tensor>& inputs,
         const std::vector<at::Tensor>& params) {
        const ContextRegion region;
        const py::gil_scoped_release no_gil;
        const OpResults results = op_forward(description, inputs, params);
        return std::pair(std::vector<at::Tensor>(results.outputs.begin(), results.outputs.end()),
                         maybes_of(results.context));
      },
      py::arg("description"), py::arg("inputs"), py::arg("params"),
      "Outputs of an op by itself, and what its backward reads.");
  module.def(
      "op_backward",
      [](const std::string& description, const std::vector<Maybe>& saved,
         std::vector<c10::SymInt> sizes, at::ScalarType dtype, std::vector<bool> requested,
         const std::vector<Maybe>& gradients, const std::vector<Maybe>& params) {
        const ContextRegion region;
        const py::gil_scoped_release no_gil;
        const OpContext context{tensors_of(saved), std::move(sizes), dtype, std::move(requested)};
        return maybes_of(
            op_backward(description, context, tensors_of(gradients), tensors_of(params)));
      },
      py::arg("description"), py::arg("saved"), py::arg("sizes"), py::arg("dtype"),
      py::arg("requested"), py::arg("gradients"), py::arg("params"),
      "Gradients of x, extra inputs and params, None where there is none.");
  module.def(
      "workspace_specs",
      [](const std::string& description,
         const std::vector<std::tuple<bool, at::ScalarType, c10::Device>>& inputs,
         const std::vector<at::Tensor>& params) {
        std::vector<PlanKey::TensorTraits> traits;
        for (const auto& [requires_grad, dtype, device] : inputs)
          traits.push_back({true, c10::GradMode::is_enabled() && requires_grad, dtype, device});
        std::vector<std::tuple<std::vector<size_t>, std::string, GroupMask>> specs;
        for (const WorkspaceSpec& spec : workspace_specs(description, traits, params))
          specs.emplace_back(spec.params, spec.quantizer, spec.parts);
        return specs;
      },
      py::arg("description"), py::arg("inputs"), py::arg("params"),
      "Parameters, quantizer and wanted parts of each workspace that a traced call is given.");
  module.def(
      "make_workspace",
      [](const std::vector<at::Tensor>& weight, const std::string& quantizer, GroupMask parts,
         bool has_other_parts, bool has_other_quantizer) {
        using kernel_ops::CodesWere;
        return make_workspace(weight, quantizer, parts,
                              has_other_parts       ? CodesWere::lacking_a_direction
                              : has_other_quantizer ? CodesWere::of_another_recipe
                                                    : CodesWere::first_used);
      },
      py::arg("weight"), py::arg("quantizer"), py::arg("parts"), py::arg("has_other_parts"),
      py::arg("has_other_quantizer"),
      "A fresh workspace; whether codes of the weight were used in other directions, or in "
      "others.");
  module.def(
      "quantize_weight",
      [](const at::Tensor& weight, const std::string& text, GroupMask parts,
         const std::vector<Maybe>& workspace, int64_t said) {
        kernel_ops::Workspace given;
        for (size_t part = 0; part < workspace.size() && part < given.size(); ++part)
          given[part] = workspace[part].value_or(at::Tensor());
        const ContextRegion region;
        const py::gil_scoped_release no_gil;
        const kernel_ops::WeightCodes codes = kernel_ops::quantize_weight(
            weight, quantizer(text), parts, given, static_cast<kernel_ops::Said>(said));
        return std::pair(maybes_of(codes.workspace), std::string(kernel_ops::text_of(codes.were)));
      },
      py::arg("weight"), py::arg("quantizer"), py::arg("parts"), py::arg("workspace"),
      py::arg("said"));
  module.def("has_tangent", &kernel_ops::has_tangent, py::arg("x"),
             "Whether forward-mode differentiation follows x, requested below autograd too.");
  module.def(
      "forbid_memory",
      [](const at::Tensor& x, const std::string& text) {
        // The function releases nothing, despite its name.
        x.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
            text);
      },
      py::arg("x"), py::arg("text"), "Has whoever asks for the memory of x get a RuntimeError.");
}

}  // namespace tandem::bindings
