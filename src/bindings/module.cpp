// tandem._C: what the Python front calls. No arithmetic, no planning.
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "autograd/call.h"
#include "bindings/autocast.h"
#include "bindings/hold.h"
#include "bindings/python_ops.h"
#include "bindings/signature.h"
#include "core/build_id.h"
#include "kernel_ops/weights.h"
#include "pipeline/explain.h"
#include "pipeline/pipeline.h"
#include "pipeline/verify.h"
#include "planner/program.h"
#include "planner/registry.h"
#include "tandem/memory.h"
#include "tandem/version.h"

namespace py = pybind11;

namespace tandem::bindings {

namespace {

/// Where a parameter is: under `name` in its module's `_parameters`, or, where a wrapper such as FSDP has put a plain tensor in its
/// place, among the module's attributes, which come first, as in Python.
struct __attribute__((visibility("hidden"))) Slot {
  py::dict parameters, attributes;
  py::str name;

  PyObject* find() const {
    PyObject* param = PyDict_GetItem(attributes.ptr(), name.ptr());
    return param != nullptr ? param : PyDict_GetItem(parameters.ptr(), name.ptr());
  }
};

/// A module of a pipeline: its `__dict__`, and whether a plain container would call it, so that its hooks would run.
using Member = std::pair<py::dict, bool>;

/// Whether hooks are registered for all modules.
bool any_global_hooks() {
  static const auto* const kHooks = [] {
    const auto module = py::module_::import("torch.nn.modules.module");
    auto* hooks = new std::vector<PyObject*>;
    for (const char* name : {"_global_forward_hooks", "_global_forward_pre_hooks",
                             "_global_backward_hooks", "_global_backward_pre_hooks"})
      hooks->push_back(module.attr(name).cast<py::dict>().release().ptr());
    return hooks;
  }();
  for (PyObject* hooks : *kHooks)
    if (PyDict_GET_SIZE(hooks) != 0) return true;
  return false;
}

/// Whether `__torch_function__` of a tensor's type wants to be asked about what is done with it.
bool has_torch_function(PyObject* object) {
  using at::impl::PythonTorchFunctionTLS;
  PyTypeObject* const type = Py_TYPE(object);
  if (THPVariable_CheckTypeExact(type)) return false;
  if (PythonTorchFunctionTLS::get_disabled_state() != at::impl::ENABLED) return false;
  static PyObject* const kDisabled =
      py::object(py::module_::import("torch._C").attr("_disabled_torch_function_impl"))
          .release()
          .ptr();
  const py::handle asked(reinterpret_cast<PyObject*>(type));
  const py::object function = py::getattr(asked, "__torch_function__", py::none());
  return !function.is_none() && function.ptr() != kDisabled;
}

/// Whether a `__torch_function__` mode wants to be asked. A default device (`torch.set_default_device`, `with torch.device(...)`) does not:
/// it speaks to functions that make tensors of nothing.
bool asks_a_mode() {
  using at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) return false;
  static PyObject* const kDefaultDevice =
      py::object(py::module_::import("torch.utils._device").attr("DeviceContext")).release().ptr();
  for (int64_t i = 0; i < PythonTorchFunctionTLS::stack_len(); ++i) {
    const PyObject* mode = PythonTorchFunctionTLS::get_stack_at(i)->ptr(getPyInterpreter());
    if (reinterpret_cast<PyObject*>(Py_TYPE(mode)) != kDefaultDevice) return true;
  }
  return false;
}

/// A pipeline whose parameters are read from their modules' dictionaries at every call: what replaced a parameter takes effect at once,
/// and no module is referenced from the graph.
class __attribute__((visibility("hidden"))) EagerPipeline {
 public:
  EagerPipeline(std::string ops, const std::vector<std::tuple<py::dict, py::dict, py::str>>& slots,
                std::vector<Member> modules, bool is_container,
                std::vector<std::string> required_fusions, std::vector<size_t> buffer_params)
      : pipeline_(std::make_unique<Pipeline>(std::move(ops), std::move(required_fusions))),
        modules_(std::move(modules)),
        is_container_(is_container),
        buffer_params_(std::move(buffer_params)) {
    for (const auto& [parameters, attributes, name] : slots)
      slots_.push_back({parameters, attributes, name});
  }

  /// The outputs, or None where an inner module has hooks or parametrizations, where `__torch_function__` of a tensor or a mode wants to
  /// be asked, or an argument is no tensor but, perhaps, a proxy of torch.fx: the caller then calls that module itself, or torch's
  /// dispatcher.
  py::object call(const py::handle& x, bool training) const {
    if (!is_tensor(x) || is_watched()) return py::none();
    return run({&THPVariable_Unpack(x.ptr()), 1}, training);
  }

  py::object call_with_extra(const py::handle& x, const py::list& extra, bool training) const {
    if (!is_tensor(x) || is_watched()) return py::none();
    c10::SmallVector<at::Tensor, 8> inputs{THPVariable_Unpack(x.ptr())};
    for (const py::handle& tensor : extra) {
      if (!is_tensor(tensor)) return py::none();
      inputs.push_back(THPVariable_Unpack(tensor.ptr()));
    }
    return run(inputs, training);
  }

  /// The same with `arguments`: of forwards that are written in Python, by op. None also where the call must go through the dispatcher,
  /// whose ops know no arguments but those in a description.
  py::object call_with_arguments(const py::handle& x, const py::list& extra, bool training,
                                 const py::dict& arguments) const {
    if (!is_tensor(x) || is_watched()) return py::none();
    c10::SmallVector<at::Tensor, 8> inputs{THPVariable_Unpack(x.ptr())};
    for (const py::handle& tensor : extra) {
      if (!is_tensor(tensor)) return py::none();
      inputs.push_back(THPVariable_Unpack(tensor.ptr()));
    }
    if (!is_direct({inputs, params(), {}})) return py::none();
    return run(inputs, training, arguments.ptr());
  }

  /// Before the dispatcher op; what is no tensor is a proxy of torch.fx, which records.
  void check_no_writes(const py::handle& x, const py::list& extra) const {
    std::vector<at::Tensor> inputs;
    if (!THPVariable_Check(x.ptr())) return;
    inputs.push_back(THPVariable_Unpack(x.ptr()));
    for (const py::handle& tensor : extra) {
      if (!THPVariable_Check(tensor.ptr())) return;
      inputs.push_back(THPVariable_Unpack(tensor.ptr()));
    }
    pipeline_->check_no_writes(inputs);
  }

  bool any_hooks() const {
    static PyObject* const kNames[] = {PyUnicode_InternFromString("_forward_hooks"),
                                       PyUnicode_InternFromString("_forward_pre_hooks"),
                                       PyUnicode_InternFromString("_backward_hooks"),
                                       PyUnicode_InternFromString("_backward_pre_hooks")};
    static PyObject* const kModules = PyUnicode_InternFromString("_modules");
    static PyObject* const kParametrizations = PyUnicode_InternFromString("parametrizations");
    if (is_container_ && any_global_hooks()) return true;
    for (const auto& [module, is_called] : modules_) {
      if (is_called)
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
    for (const Slot& slot : slots_) {
      PyObject* param = slot.find();
      TORCH_CHECK_VALUE(param != nullptr && THPVariable_Check(param),
                        "pipeline: expected a tensor as parameter ", slot.name.cast<std::string>(),
                        ", got ", param == nullptr ? "nothing" : Py_TYPE(param)->tp_name,
                        ". Assign a torch.nn.Parameter to it.");
      params.push_back(THPVariable_Unpack(param));
    }
    return params;
  }

  VerifyReport verify(const std::vector<at::Tensor>& inputs, bool training, int masks) const {
    const auto parameters = params();
    const ContextRegion region;
    const py::gil_scoped_release no_gil;
    return tandem::verify(*pipeline_, inputs, parameters, training, masks);
  }

  Pipeline& pipeline() const { return *pipeline_; }

  /// For the collector of cycles: an op keeps the pipeline in which it runs alone, and a pipeline the dictionary of its op.
  int traverse(visitproc visit, void* arg) const {
    for (const Slot& slot : slots_) {
      Py_VISIT(slot.parameters.ptr());
      Py_VISIT(slot.attributes.ptr());
    }
    for (const auto& [module, is_called] : modules_) Py_VISIT(module.ptr());
    return 0;
  }

  void drop_modules() {
    std::exchange(slots_, {});  // moved away first: what is destroyed may look here
    std::exchange(modules_, {});
  }

 private:
  py::object run(at::TensorList inputs, bool training, const void* given = nullptr) const {
    const auto parameters = params();
    const ContextRegion region;
    Outputs outputs;
    {
      Buffers buffers = buffer_params_.empty() ? Buffers() : main_grads();
      const py::gil_scoped_release
          no_gil;  // a collective would deadlock otherwise; steps of user code take it back
      outputs = (*pipeline_)(inputs, parameters, training, std::move(buffers), given);
    }
    if (outputs.size() == 1) return py::reinterpret_steal<py::object>(THPVariable_Wrap(outputs[0]));
    py::tuple result(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i)
      result[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(outputs[i]));
    return result;
  }

  /// The main_grad of each parameter that has one for its gradient, as it will be when backward writes it.
  Buffers main_grads() const {
    auto owners = std::make_shared<std::vector<std::shared_ptr<void>>>();
    for (const size_t place : buffer_params_)
      owners->push_back(hold(py::reinterpret_borrow<py::object>(slots_[place].find())));
    return {owners->size(), [owners](size_t i) {
              const py::gil_scoped_acquire gil;
              const py::handle owner(static_cast<PyObject*>((*owners)[i].get()));
              const py::object tensor =
                  py::module_::import("tandem.ops.main_grad").attr("take")(owner);
              return THPVariable_Unpack(tensor.ptr());
            }};
  }

  static bool is_tensor(const py::handle& object) {
    return THPVariable_Check(object.ptr()) && !has_torch_function(object.ptr());
  }

  /// Whether an inner module must be called as such, or a mode or a parameter's type must be asked.
  bool is_watched() const {
    if (any_hooks() || asks_a_mode()) return true;
    for (const Slot& slot : slots_) {
      PyObject* param = slot.find();
      if (param != nullptr && has_torch_function(param)) return true;
    }
    return false;
  }

  std::unique_ptr<Pipeline> pipeline_;
  std::vector<Slot> slots_;
  std::vector<Member> modules_;
  bool is_container_;  ///< else the ops are parts of one module, whose hooks have run
  std::vector<size_t>
      buffer_params_;  ///< by buffer: the slot of the parameter whose main_grad it is
};

void collect_cycles(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!py::detail::is_holder_constructed(self)) return 0;
    return py::cast<const EagerPipeline&>(py::handle(self)).traverse(visit, arg);
  };
  type.tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self))
      py::cast<EagerPipeline&>(py::handle(self)).drop_modules();
    return 0;
  };
}

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
  py::class_<EagerPipeline>(module, "EagerPipeline", py::custom_type_setup(collect_cycles))
      .def(py::init<std::string, const std::vector<std::tuple<py::dict, py::dict, py::str>>&,
                    std::vector<Member>, bool, std::vector<std::string>, std::vector<size_t>>(),
           py::arg("ops"), py::arg("slots"), py::arg("modules"), py::arg("is_container"),
           py::arg("required_fusions"), py::arg("buffer_params"))
      .def("__call__", &EagerPipeline::call)
      .def("call_with_extra", &EagerPipeline::call_with_extra)
      .def("call_with_arguments", &EagerPipeline::call_with_arguments)
      .def("any_hooks", &EagerPipeline::any_hooks)
      .def("check_no_writes", &EagerPipeline::check_no_writes)
      .def("note_recipe",
           [](const EagerPipeline& self, bool training) {
             const ContextRegion region;
             self.pipeline().note_recipe(training);
           })
      .def("explain",
           [](const EagerPipeline& self, const std::string& format) {
             return self.pipeline().explain(format_of(format));
           })
      .def("description",
           [](const EagerPipeline& self, bool training) {
             const ContextRegion region;
             return self.pipeline().description(training);
           })
      .def("saved_bytes", [](const EagerPipeline& self) { return self.pipeline().saved_bytes(); })
      .def("has_run", [](const EagerPipeline& self) { return self.pipeline().has_run(); })
      .def("fusions_made", [](const EagerPipeline& self) { return self.pipeline().fusions_made(); })
      .def("verify", [](const EagerPipeline& self, const std::vector<at::Tensor>& inputs,
                        bool training, int masks) {
        const VerifyReport report = self.verify(inputs, training, masks);
        return py::make_tuple(report.passed, report.comparisons, report.text);
      });
  module.def("weights_changed", &kernel_ops::weights_changed);
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
  module.attr("DESCRIPTION_VERSION") = kDescriptionVersion;
  module.def("plans_made", &Program::plans_made);
  module.def("programs_alive", &Program::alive);
  module.def("fusions_version", &fusions_version);
  module.def("build_id", &build_id);
  module.def("version", &version);
  module.def("built_against_torch", &built_against_torch);
  module.def("op_names", &op_names);
  module.def("op_signature", &signature_of);
  module.def("explain_description", [](const std::string& text, const std::string& format) {
    const auto program = program_of(text);
    std::vector<ExplainedPlan> plans;
    for (auto& plan : program->plans()) plans.push_back(explained(std::move(plan), *program));
    return explain(plans, /*saved_bytes=*/std::nullopt, format_of(format));
  });
  module.def("fusions_of_description",
             [](const std::string& text) { return fusions_in(program_of(text)->plans()); });
  bind_autocast(module);
  bind_python_ops(module);
}

}  // namespace tandem::bindings
