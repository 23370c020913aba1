// tandem._C: what the Python front calls. No arithmetic, no planning.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "bindings/python_ops.h"
#include "core/build_id.h"
#include "kernel_ops/weights.h"
#include "pipeline/pipeline.h"
#include "pipeline/verify.h"
#include "planner/program.h"
#include "planner/registry.h"
#include "tandem/memory.h"
#include "tandem/version.h"

namespace py = pybind11;

namespace tandem::bindings {

namespace {

/// A pipeline whose parameters are read from their modules' dictionaries at every call: what replaced a parameter takes effect at once,
/// and no module is referenced from the graph.
class __attribute__((visibility("hidden"))) EagerPipeline {
 public:
  EagerPipeline(std::string ops, std::vector<std::pair<py::dict, py::str>> slots,
                std::vector<py::dict> modules, std::vector<std::string> required_fusions)
      : pipeline_(std::make_unique<Pipeline>(std::move(ops), std::move(required_fusions))),
        slots_(std::move(slots)),
        modules_(std::move(modules)) {}

  /// The outputs, or None where an inner module has hooks or parametrizations: the caller then calls that module itself.
  py::object call(const at::Tensor& x, bool training) const {
    if (any_hooks()) return py::none();
    return run({&x, 1}, training);
  }

  py::object call_with_extra(const at::Tensor& x, const std::vector<at::Tensor>& extra,
                             bool training) const {
    if (any_hooks()) return py::none();
    c10::SmallVector<at::Tensor, 8> inputs{x};
    inputs.append(extra.begin(), extra.end());
    return run(inputs, training);
  }

  bool any_hooks() const {
    static PyObject* const kNames[] = {PyUnicode_InternFromString("_forward_hooks"),
                                       PyUnicode_InternFromString("_forward_pre_hooks"),
                                       PyUnicode_InternFromString("_backward_hooks"),
                                       PyUnicode_InternFromString("_backward_pre_hooks")};
    static PyObject* const kModules = PyUnicode_InternFromString("_modules");
    static PyObject* const kParametrizations = PyUnicode_InternFromString("parametrizations");
    for (const py::dict& module : modules_) {
      for (PyObject* name : kNames) {
        PyObject* hooks = PyDict_GetItem(module.ptr(), name);
        if (hooks != nullptr && PyDict_GET_SIZE(hooks) != 0) return true;
      }
      PyObject* children = PyDict_GetItem(module.ptr(), kModules);
      if (children != nullptr && PyDict_GET_SIZE(children) != 0 &&
          PyDict_GetItem(children, kParametrizations) != nullptr)
        return true;
    }
    return false;
  }

  c10::SmallVector<at::Tensor, 16> params() const {
    c10::SmallVector<at::Tensor, 16> params;
    for (const auto& [dictionary, name] : slots_) {
      PyObject* param = PyDict_GetItem(dictionary.ptr(), name.ptr());
      TORCH_CHECK_VALUE(param != nullptr && THPVariable_Check(param),
                        "pipeline: expected a tensor as parameter ", name.cast<std::string>(),
                        ", got ", param == nullptr ? "nothing" : Py_TYPE(param)->tp_name,
                        ". Assign a torch.nn.Parameter to it.");
      params.push_back(THPVariable_Unpack(param));
    }
    return params;
  }

  VerifyReport verify(const std::vector<at::Tensor>& inputs, bool training, int masks) const {
    const auto parameters = params();
    const py::gil_scoped_release no_gil;
    return tandem::verify(*pipeline_, inputs, parameters, training, masks);
  }

  Pipeline& pipeline() const { return *pipeline_; }

 private:
  py::object run(at::TensorList inputs, bool training) const {
    const auto parameters = params();
    Outputs outputs;
    {
      const py::gil_scoped_release
          no_gil;  // a collective would deadlock otherwise; steps of user code take it back
      outputs = (*pipeline_)(inputs, parameters, training);
    }
    if (outputs.size() == 1) return py::reinterpret_steal<py::object>(THPVariable_Wrap(outputs[0]));
    py::tuple result(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i)
      result[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(outputs[i]));
    return result;
  }

  std::unique_ptr<Pipeline> pipeline_;
  std::vector<std::pair<py::dict, py::str>> slots_;
  std::vector<py::dict> modules_;
};

ExplainFormat format_of(const std::string& name) {
  if (name == "text") return ExplainFormat::text;
  if (name == "svg") return ExplainFormat::svg;
  if (name == "html") return ExplainFormat::html;
  TORCH_CHECK_VALUE(name == "json",
                    "explain: expected format \"text\", \"svg\", \"html\" or \"json\", got \"",
                    name, "\". Choose one of them.");
  return ExplainFormat::json;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::class_<EagerPipeline>(module, "EagerPipeline")
      .def(py::init<std::string, std::vector<std::pair<py::dict, py::str>>, std::vector<py::dict>,
                    std::vector<std::string>>(),
           py::arg("ops"), py::arg("slots"), py::arg("modules"), py::arg("required_fusions"))
      .def("__call__", &EagerPipeline::call)
      .def("call_with_extra", &EagerPipeline::call_with_extra)
      .def("any_hooks", &EagerPipeline::any_hooks)
      .def("explain",
           [](const EagerPipeline& self, const std::string& format) {
             return self.pipeline().explain(format_of(format));
           })
      .def("description", [](const EagerPipeline& self,
                             bool training) { return self.pipeline().description(training); })
      .def("saved_bytes", [](const EagerPipeline& self) { return self.pipeline().saved_bytes(); })
      .def("fusions_made", [](const EagerPipeline& self) { return self.pipeline().fusions_made(); })
      .def("verify", [](const EagerPipeline& self, const std::vector<at::Tensor>& inputs,
                        bool training, int masks) {
        const VerifyReport report = self.verify(inputs, training, masks);
        return py::make_tuple(report.passed, report.comparisons, report.text);
      });
  module.def("enter_autocast", &enter_autocast);
  module.def("exit_autocast", &exit_autocast);
  module.def("active_recipe", []() -> std::optional<std::string> {
    const ActiveRecipe* recipe = active_recipe();
    return recipe == nullptr ? std::nullopt : std::optional(recipe->json);
  });
  module.def("weights_changed", &kernel_ops::weights_changed);
  module.def("set_check_weights", &kernel_ops::set_check_weights);
  module.def("cached_bytes", &cached_bytes,
             "Bytes of freed memory that are kept for the next CPU tensors of a pipeline.");
  module.def("empty_cache", &empty_cache, "Gives all cached bytes back to the system.");
  module.def("set_cache_limit", &set_cache_limit, py::arg("bytes"),
             "Keeps at most `bytes` cached, 0: none. At first an eighth of the machine's memory. "
             "Returns the limit before.");
  module.def("refresh_counts", [] {
    const auto counts = kernel_ops::refresh_counts();
    return py::make_tuple(counts.made, counts.reused);
  });
  module.def("plans_made", &Program::plans_made);
  module.def("fusions_version", &fusions_version);
  module.def("build_id", &build_id);
  module.def("version", &version);
  module.def("built_against_torch", &built_against_torch);
  module.def("op_names", &op_names);
  bind_python_ops(module);
}

}  // namespace tandem::bindings
