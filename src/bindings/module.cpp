// tandem._C: the functions that the Python front calls. No arithmetic, no planning.
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/call.h"
#include "bindings/autocast.h"
#include "bindings/bindings.h"
#include "bindings/hold.h"
#include "fusions/table.h"
#include "kernel_ops/elementwise/join.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/weights/weights.h"
#include "ops/glue.h"
#include "pipeline/explain.h"
#include "pipeline/pipeline.h"
#include "pipeline/verify.h"
#include "planner/program.h"
#include "planner/registry.h"
#include "quantization/inspection.h"
#include "tandem/memory.h"
#include "tandem/sequential.h"
#include "tandem/version.h"

namespace py = pybind11;

namespace tandem::bindings {

namespace {

using Params = c10::SmallVector<at::Tensor, 16>;

/// The item as a borrowed reference; nullptr if there is none.
PyObject* find_in(const py::handle& dict, PyObject* name) {
  PyObject* const item = PyDict_GetItemWithError(dict.ptr(), name);
  if (item == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return item;
}

/// Finds a parameter: under `name` in its module's `_parameters`, or among the module's attributes,
/// if a wrapper such as FSDP has put a tensor that is no parameter there. Attributes come first, as
/// in Python.
struct __attribute__((visibility("hidden"))) Slot {
  py::dict parameters, attributes;
  py::str name;

  PyObject* find() const {
    PyObject* param = find_in(attributes, name.ptr());
    return param != nullptr ? param : find_in(parameters, name.ptr());
  }
  at::Tensor tensor(PyObject* param) const {
    TORCH_CHECK_VALUE(param != nullptr && THPVariable_Check(param),
                      "pipeline: expected a tensor as parameter ", name.cast<std::string>(),
                      ", got ", param == nullptr ? "nothing" : Py_TYPE(param)->tp_name,
                      ". Assign a torch.nn.Parameter to it.");
    return THPVariable_Unpack(param);
  }
};

/// A module that keeps state of recipes: its `__dict__`, and its numbers of slots in forward and
/// backward.
using StateOwner = std::tuple<py::dict, int64_t, int64_t>;

/// A module of a pipeline: its `__dict__`, and whether a torch.nn.Sequential would call it, so that
/// its hooks would run.
using Member = std::pair<py::dict, bool>;

/// The items of a collection in `tandem.op_base.hooks`, which lists where modules have hooks.
std::vector<PyObject*>& hook_list(const char* name) {
  auto* items = new std::vector<PyObject*>;
  for (const py::handle item : py::module_::import("tandem.op_base.hooks").attr(name))
    items->push_back(py::reinterpret_borrow<py::object>(item).release().ptr());
  return *items;
}

/// Whether the type of a tensor has a `__torch_function__` that must be called.
bool has_torch_function(PyObject* object) {
  using at::impl::PythonTorchFunctionTLS;
  PyTypeObject* const type = Py_TYPE(object);
  if (THPVariable_CheckTypeExact(type)) return false;
  if (PythonTorchFunctionTLS::get_disabled_state() != at::impl::ENABLED) return false;
  static PyObject* const kDisabled =
      py::object(py::module_::import("torch._C").attr("_disabled_torch_function_impl"))
          .release()
          .ptr();
  const py::handle requested(reinterpret_cast<PyObject*>(type));
  const py::object function = py::getattr(requested, "__torch_function__", py::none());
  return !function.is_none() && function.ptr() != kDisabled;
}

/// Whether there is a `__torch_function__` mode that must be called. A default device
/// (`torch.set_default_device`, `with torch.device(...)`) is none: it affects only functions that
/// create tensors from nothing.
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

/// A pipeline that reads its parameters from the modules' dictionaries at every call: a replaced
/// parameter takes effect at once, and the graph references no module.
class __attribute__((visibility("hidden"))) EagerPipeline {
 public:
  EagerPipeline(std::string ops, const std::vector<std::tuple<py::dict, py::dict, py::str>>& slots,
                std::vector<Member> modules, bool is_container,
                std::vector<std::string> required_fusions, std::optional<double> memory_budget,
                std::vector<size_t> buffer_params, std::vector<py::object> buffer_makers,
                std::vector<StateOwner> state_owners)
      : pipeline_(
            std::make_unique<Pipeline>(std::move(ops), std::move(required_fusions), memory_budget)),
        modules_(std::move(modules)),
        is_container_(is_container),
        buffer_params_(std::move(buffer_params)),
        buffer_makers_(std::move(buffer_makers)),
        state_owners_(std::move(state_owners)) {
    for (const auto& [parameters, attributes, name] : slots)
      slots_.push_back({parameters, attributes, name});
  }

  /// The outputs; or None if an inner module has hooks or parametrizations, if the
  /// `__torch_function__` of a tensor or mode must be called, or if an argument is no tensor but,
  /// for example, a proxy of torch.fx. The caller then calls that module or torch's dispatcher
  /// itself.
  py::object call(const py::handle& x, bool training) const {
    const auto params = is_tensor(x) ? unwatched_params() : std::nullopt;
    return params ? run({&THPVariable_Unpack(x.ptr()), 1}, *params, training) : py::none();
  }

  py::object call_with_extra(const py::handle& x, const py::list& extra, bool training) const {
    const auto inputs = inputs_of(x, extra, is_tensor);
    const auto params = inputs ? unwatched_params() : std::nullopt;
    return params ? run(*inputs, *params, training) : py::none();
  }

  /// call() with `arguments` for the forwards written in Python, by op, and with tensors of the
  /// caller that steps write. Returns None also if the call must be dispatched, because the
  /// dispatcher's op knows no arguments but those in the description.
  py::object call_with_arguments(const py::handle& x, const py::list& extra, bool training,
                                 const py::dict& arguments,
                                 const std::vector<at::Tensor>& written) const {
    const auto inputs = inputs_of(x, extra, is_tensor);
    const auto params = inputs ? unwatched_params() : std::nullopt;
    if (!params || !is_direct({.inputs = *inputs,
                               .params = *params,
                               .workspaces = {},
                               .quantized = quantized_among(*inputs, *params)}))
      return py::none();
    return run(*inputs, *params, training, arguments.ptr(), written);
  }

  /// To be called before the dispatcher op. An argument that is no tensor is a proxy of torch.fx,
  /// which only records.
  void check_no_writes(const py::handle& x, const py::list& extra) const {
    const auto inputs = inputs_of(
        x, extra, [](const py::handle& object) { return THPVariable_Check(object.ptr()); });
    if (inputs) pipeline_->check_no_writes(*inputs);
  }

  bool any_hooks() const {
    static const auto& kOfAModule = hook_list("OF_A_MODULE");
    static const auto& kOfAllModules = hook_list("OF_ALL_MODULES");
    static PyObject* const kModules = PyUnicode_InternFromString("_modules");
    static PyObject* const kParametrizations = PyUnicode_InternFromString("parametrizations");
    if (is_container_)
      for (PyObject* hooks : kOfAllModules)
        if (PyDict_GET_SIZE(hooks) != 0) return true;
    for (const auto& [module, is_called] : modules_) {
      if (is_called)
        for (PyObject* name : kOfAModule) {
          PyObject* hooks = find_in(module, name);
          if (hooks != nullptr && PyDict_GET_SIZE(hooks) != 0) return true;
        }
      PyObject* children = find_in(module, kModules);
      if (children != nullptr && PyDict_GET_SIZE(children) != 0 &&
          find_in(children, kParametrizations) != nullptr)
        return true;
    }
    return false;
  }

  Params params() const {
    Params params;
    for (const Slot& slot : slots_) params.push_back(slot.tensor(slot.find()));
    return params;
  }

  VerifyReport verify(const std::vector<at::Tensor>& inputs, bool training, int masks) const {
    const auto parameters = params();
    const ContextRegion region;
    const py::gil_scoped_release no_gil;
    return tandem::verify(*pipeline_, inputs, parameters, training, masks,
                          [this](int64_t history_length) { return state(history_length); });
  }

  Pipeline& pipeline() const { return *pipeline_; }

  /// For the garbage collector, because there are cycles: an op holds the pipeline that runs it
  /// alone, and a pipeline holds the dictionary of its op.
  int traverse(visitproc visit, void* arg) const {
    for (const Slot& slot : slots_) {
      Py_VISIT(slot.parameters.ptr());
      Py_VISIT(slot.attributes.ptr());
    }
    for (const auto& [module, is_called] : modules_) Py_VISIT(module.ptr());
    for (const auto& [fields, forward, backward] : state_owners_) Py_VISIT(fields.ptr());
    for (const py::object& maker : buffer_makers_) Py_VISIT(maker.ptr());
    return 0;
  }

  void drop_modules() {
    std::exchange(slots_, {});  // moved away first: destructors may look here
    std::exchange(modules_, {});
    std::exchange(state_owners_, {});
    std::exchange(buffer_makers_, {});
  }

 private:
  py::object run(at::TensorList inputs, at::TensorList params, bool training,
                 const void* given = nullptr, const std::vector<at::Tensor>& written = {}) const {
    const ContextRegion region;
    Outputs outputs;
    {
      Buffers buffers = buffers_of(written);
      const py::gil_scoped_release
          no_gil;  // a collective would deadlock otherwise; steps of user code take it back
      outputs = (*pipeline_)(
          inputs, params, training, std::move(buffers),
          [this](int64_t history_length) { return state(history_length); }, given);
    }
    if (outputs.size() == 1) return py::reinterpret_steal<py::object>(THPVariable_Wrap(outputs[0]));
    py::tuple result(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i)
      result[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(outputs[i]));
    return result;
  }

  /// The state that the modules keep for a recipe with a history of so many rows, created if it
  /// does not exist.
  std::vector<at::Tensor> state(int64_t history_length) const {
    const py::gil_scoped_acquire gil;
    static PyObject* const kTensors =
        py::object(py::module_::import("tandem.recipe_state").attr("tensors")).release().ptr();
    std::vector<at::Tensor> tensors;
    for (const auto& [fields, forward, backward] : state_owners_)
      for (const py::handle& tensor :
           py::reinterpret_borrow<py::object>(kTensors)(fields, forward, backward, history_length))
        tensors.push_back(THPVariable_Unpack(tensor.ptr()));
    return tensors;
  }

  /// The main_grad of each parameter that accumulates its gradient there, then what the makers
  /// return, both read when backward writes them; then the tensors that are passed with the call.
  Buffers buffers_of(const std::vector<at::Tensor>& written) const {
    const size_t params = buffer_params_.size(), made = params + buffer_makers_.size();
    if (made + written.size() == 0) return {};
    auto owners = std::make_shared<std::vector<std::shared_ptr<void>>>();
    for (const size_t place : buffer_params_)
      owners->push_back(hold(py::reinterpret_borrow<py::object>(slots_[place].find())));
    for (const py::object& maker : buffer_makers_) owners->push_back(hold(maker));
    return {made + written.size(), [owners, params, made, written](size_t i) {
              if (i >= made) return written[i - made];
              const py::gil_scoped_acquire gil;
              const py::handle owner(static_cast<PyObject*>((*owners)[i].get()));
              const py::object tensor =
                  i < params ? py::module_::import("tandem.op_base.main_grad").attr("take")(owner)
                             : owner();
              return THPVariable_Unpack(tensor.ptr());
            }};
  }

  static bool is_tensor(const py::handle& object) {
    return THPVariable_Check(object.ptr()) && !has_torch_function(object.ptr());
  }

  /// x and the extra inputs; nullopt unless `is_usable` holds for all of them.
  template <typename IsUsable>
  static std::optional<c10::SmallVector<at::Tensor, 8>> inputs_of(const py::handle& x,
                                                                  const py::list& extra,
                                                                  IsUsable&& is_usable) {
    if (!is_usable(x)) return std::nullopt;
    c10::SmallVector<at::Tensor, 8> inputs{THPVariable_Unpack(x.ptr())};
    for (const py::handle& tensor : extra) {
      if (!is_usable(tensor)) return std::nullopt;
      inputs.push_back(THPVariable_Unpack(tensor.ptr()));
    }
    return inputs;
  }

  /// None if an inner module must be called as such, or if a mode or a parameter's type must be
  /// called.
  std::optional<Params> unwatched_params() const {
    if (any_hooks() || asks_a_mode()) return std::nullopt;
    std::optional<Params> params(std::in_place);
    for (const Slot& slot : slots_) {
      PyObject* param = slot.find();
      if (param != nullptr && has_torch_function(param)) return std::nullopt;
      params->push_back(slot.tensor(param));
    }
    return params;
  }

  std::unique_ptr<Pipeline> pipeline_;
  std::vector<Slot> slots_;
  std::vector<Member> modules_;
  /// False: the ops are parts of one module, whose hooks have run.
  bool is_container_;
  /// By buffer: the slot of the parameter that owns the main_grad.
  std::vector<size_t> buffer_params_;
  /// Functions that return the buffers after these.
  std::vector<py::object> buffer_makers_;
  /// In the order of the ops' "state".
  std::vector<StateOwner> state_owners_;
};

/// The parts of a tandem.QuantizedTensor.
std::optional<Codes> read_quantized(const at::Tensor& param) {
  const py::gil_scoped_acquire gil;
  static PyObject* const kType =
      py::object(py::module_::import("tandem.quantized.tensor").attr("QuantizedTensor"))
          .release()
          .ptr();
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(param));
  if (PyObject_IsInstance(object.ptr(), kType) != 1) return std::nullopt;
  Codes codes{&quantizer(object.attr("quantizer").attr("text").cast<std::string_view>())};
  codes.dtype = param.scalar_type();
  const c10::SymIntArrayRef sizes = param.sym_sizes();
  codes.sizes.append(sizes.begin(), sizes.end());
  const char* const names[] = {"rowwise_data",    "rowwise_scale_inv",    "amax_rowwise",
                               "columnwise_data", "columnwise_scale_inv", "amax_columnwise"};
  static_assert(std::size(names) == group_amax);
  for (size_t part = 0; part < codes.parts.size(); ++part)
    if (const py::object tensor = object.attr(names[part]); !tensor.is_none())
      codes.parts[part] = THPVariable_Unpack(tensor.ptr());
  return codes;
}

/// A tandem.QuantizedTensor of these codes.
at::Tensor write_quantized(const Codes& codes) {
  const py::gil_scoped_acquire gil;
  py::list parts;
  for (const at::Tensor& part : codes.parts)
    parts.append(part.defined() ? py::cast(part) : py::none());
  const py::object made =
      py::module_::import("tandem.user_ops.runtime")
          .attr("quantized")(
              parts, codes.quantizer->text, serves_both_directions(*codes.quantizer),
              py::cast(codes.dtype),
              py::cast(std::vector<c10::SymInt>(codes.sizes.begin(), codes.sizes.end())));
  return THPVariable_Unpack(made.ptr());
}

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
  if (name == "dot") return ExplainFormat::dot;
  TORCH_CHECK_VALUE(
      name == "json",
      "explain: expected format \"text\", \"svg\", \"html\", \"dot\" or \"json\", got \"", name,
      "\". Choose one of them.");
  return ExplainFormat::json;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  cpu_targets();  // rejects a wrong TANDEM_MAX_CPU_ISA here, not in a kernel's thread
  py::class_<VerifyReport>(module, "VerifyReport")
      .def_readonly("passed", &VerifyReport::passed)
      .def_readonly("comparisons", &VerifyReport::comparisons)
      .def_readonly("text", &VerifyReport::text);
  py::class_<kernel_ops::RefreshCounts>(module, "RefreshCounts")
      .def_readonly("made", &kernel_ops::RefreshCounts::made)
      .def_readonly("reused", &kernel_ops::RefreshCounts::reused);
  py::class_<Fusion>(module, "Fusion")
      .def_property_readonly("pass_name", [](const Fusion& self) { return pass_name(self.pass); })
      .def_property_readonly("name", &Fusion::spelled)
      .def_readonly("picture", &Fusion::picture)
      .def_property_readonly("steps", [](const Fusion& self) {
        std::vector<std::string_view> names;
        for (const PatternStep& step : self.pattern)
          if (step.kind == StepKind::op) names.push_back(step.name);
        return names;
      });
  py::class_<EagerPipeline>(module, "EagerPipeline", py::custom_type_setup(collect_cycles))
      .def(py::init<std::string, const std::vector<std::tuple<py::dict, py::dict, py::str>>&,
                    std::vector<Member>, bool, std::vector<std::string>, std::optional<double>,
                    std::vector<size_t>, std::vector<py::object>, std::vector<StateOwner>>(),
           py::arg("ops"), py::arg("slots"), py::arg("modules"), py::arg("is_container"),
           py::arg("required_fusions"), py::arg("memory_budget"), py::arg("buffer_params"),
           py::arg("buffer_makers"), py::arg("state_owners"))
      .def("__call__", &EagerPipeline::call)
      .def("call_with_extra", &EagerPipeline::call_with_extra)
      .def("call_with_arguments", &EagerPipeline::call_with_arguments)
      .def("check_no_writes", &EagerPipeline::check_no_writes)
      .def("note_recipe",
           [](const EagerPipeline& self, bool training) {
             const ContextRegion region;
             self.pipeline().note_recipe(training);
           })
      .def(
          "explain",
          [](const EagerPipeline& self, const std::string& format, const StepTimes& times) {
            return self.pipeline().explain(format_of(format), times);
          },
          py::arg("format"), py::arg("times") = StepTimes())
      .def("description",
           [](const EagerPipeline& self, bool training) {
             const ContextRegion region;
             return self.pipeline().description(training);
           })
      .def("find_described", [](const EagerPipeline& self,
                                bool training) { self.pipeline().described_program(training); })
      .def("saved_bytes", [](const EagerPipeline& self) { return self.pipeline().saved_bytes(); })
      .def("last_recipe", [](const EagerPipeline& self) { return self.pipeline().last_recipe(); })
      .def("has_run", [](const EagerPipeline& self) { return self.pipeline().has_run(); })
      .def("set_watched",
           [](const EagerPipeline& self, int64_t number) { self.pipeline().set_watched(number); })
      .def("fusions_made", [](const EagerPipeline& self) { return self.pipeline().fusions_made(); })
      .def("verify", [](const EagerPipeline& self, const std::vector<at::Tensor>& inputs,
                        bool training, int masks) { return self.verify(inputs, training, masks); });
  module.def(
      "quantize_slots",
      [](const std::string& op, const py::dict& options) {
        const SlotCount slots = quantize_slots(op_def(op), options_of(options));
        return std::pair(slots.forward, slots.backward);
      },
      py::arg("op"), py::arg("options") = py::dict(),
      "How many tensors a recipe quantizes for an op with these options, by direction.");
  module.def("resized_history", &resized_history);
  module.def("decomposable_ops", &kernel_ops::decomposable_ops,
             "Names of the kernel ops that have a composition of torch's operations.");
  module.def("weights_changed", &kernel_ops::weights_changed);
  module.def("cached_bytes", &cached_bytes,
             "Bytes of freed memory that are kept for the next CPU tensors of a pipeline.");
  module.def("empty_cache", &empty_cache, "Gives all cached bytes back to the system.");
  module.def("set_cache_limit", &set_cache_limit, py::arg("bytes"),
             "Keeps at most `bytes` cached, 0: none. At first an eighth of the machine's memory. "
             "Returns the limit before.");
  module.def("laid_together",
             [](const std::vector<at::Tensor>& parts) { return kernel_ops::laid_together(parts); });
  module.def("memory_of_parts", [](const std::vector<at::Tensor>& parts) {
    return kernel_ops::memory_of_pieces(parts);
  });
  module.def("are_multiplied_apart", [](const std::vector<at::Tensor>& parts) {
    return kernel_ops::are_multiplied_apart(parts);
  });
  module.def("refresh_counts", &kernel_ops::refresh_counts);
  module.def("take_watched", [] {
    py::list rows;
    for (const WatchedQuantization& each : take_watched()) {
      const QuantizationStatistics& found = each.statistics;
      rows.append(py::make_tuple(each.pipeline, each.op, each.role, each.group, each.region,
                                 each.quantizer, found.amax, found.least_scale, found.largest_scale,
                                 found.underflow, found.saturation, found.signal_to_noise,
                                 found.not_finite));
    }
    return rows;
  });
  module.def("plans_made", &Program::plans_made);
  module.def("programs_alive", &Program::alive);
  module.def("fusions_version", &fusions_version);
  module.def("version", &version);
  module.def("built_against_torch", &built_against_torch);
  module.def("op_names", &op_names);
  module.def("built_in_fusions", [] {
    std::vector<Fusion> fusions;
    for (const Pass pass : {Pass::joint, Pass::forward, Pass::backward})
      std::ranges::copy(built_in_fusions(pass), std::back_inserter(fusions));
    return fusions;
  });
  module.def("op_signature", &signature_of);
  module.def("recipe_signature", &recipe_signature_of);
  module.def(
      "explain_description",
      [](const std::string& text, const std::string& format, const StepTimes& times,
         const std::vector<std::vector<at::Tensor>>& workspaces) {
        const auto program = program_of(text);
        std::vector<ExplainedPlan> plans;
        for (auto& plan : program->plans())
          plans.push_back(explained(std::move(plan), *program, workspaces));
        return explain(plans, /*saved_bytes=*/std::nullopt, format_of(format), times);
      },
      py::arg("description"), py::arg("format"), py::arg("times") = StepTimes(),
      py::arg("workspaces") = std::vector<std::vector<at::Tensor>>());
  module.def("fusions_of_description",
             [](const std::string& text) { return fusions_in(program_of(text)->plans()); });
  set_quantized_reader(&read_quantized);
  set_quantized_writer(&write_quantized);
  bind_autocast(module);
  bind_description(module);
  bind_python_ops(module);
  bind_quantizers(module);
  bind_op_call(module);
}

}  // namespace tandem::bindings
