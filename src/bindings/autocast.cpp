#include "bindings/autocast.h"

#include <pybind11/stl.h>

#include <atomic>
#include <iterator>
#include <optional>

#include "bindings/hold.h"
#include "kernel_ops/quantize/delayed.h"
#include "kernel_ops/weights/weights.h"
#include "pipeline/pipeline.h"
#include "quantization/recipe.h"

namespace tandem::bindings {

namespace py = pybind11;

namespace {

/// How many regions Python has entered and not left. If there are none, calls do not look for one.
std::atomic<int64_t> open_regions{0};

PyObject* variable() {
  static PyObject* const variable = PyContextVar_New("tandem.autocast", nullptr);
  return variable;
}

void set_context_region(RegionPtr region) {
  const py::capsule value(new RegionPtr(std::move(region)),
                          [](void* pointer) { delete static_cast<RegionPtr*>(pointer); });
  PyObject* token = PyContextVar_Set(variable(), value.ptr());
  if (token == nullptr) throw py::error_already_set();
  Py_DECREF(token);
}

/// The innermost region of the Python context. If the context has none, a region that C++ code has
/// entered around Python counts, but never one of another context.
RegionPtr context_region() {
  PyObject* value = nullptr;
  if (PyContextVar_Get(variable(), nullptr, &value) != 0) throw py::error_already_set();
  const auto kept = py::reinterpret_steal<py::object>(value);
  if (kept)
    if (RegionPtr region =
            innermost_open(*static_cast<RegionPtr*>(PyCapsule_GetPointer(kept.ptr(), nullptr))))
      return region;
  RegionPtr region = thread_region();
  while (region && region->owner) region = innermost_open(region->outer);
  return region;
}

ActiveRecipePtr context_recipe() {
  if (open_regions.load(std::memory_order_relaxed) == 0) return kept_active_recipe();
  const RegionPtr region = context_region();
  return region ? region->recipe : nullptr;
}

void put_in_force(RegionPtr region) {
  set_context_region(region);
  exchange_thread_region(std::move(region));
  ++open_regions;
}

void enter(const std::string& json, py::object owner) {
  put_in_force(make_region(json, context_region(), hold(std::move(owner))));
}

std::optional<double> context_budget() {
  if (open_regions.load(std::memory_order_relaxed) == 0) return active_memory_budget();
  const RegionPtr region = context_region();
  return region ? region->memory_budget : std::nullopt;
}

void enter_budget(std::optional<double> bytes_per_row, py::object owner) {
  put_in_force(make_budget_region(bytes_per_row, context_region(), hold(std::move(owner))));
}

/// The region around the caller, for `enter_recompute`; None if there is none.
py::object region_now() {
  RegionPtr region = context_region();
  if (!region) return py::none();
  return py::capsule(new RegionPtr(std::move(region)),
                     [](void* pointer) { delete static_cast<RegionPtr*>(pointer); });
}

void enter_recompute(const py::object& region, py::object owner) {
  RegionPtr then;
  if (!region.is_none())
    then = *static_cast<RegionPtr*>(PyCapsule_GetPointer(region.ptr(), nullptr));
  put_in_force(make_recompute_region(then, context_region(), hold(std::move(owner))));
}

int64_t context_number() {
  if (open_regions.load(std::memory_order_relaxed) == 0) return number_of(thread_region());
  const py::gil_scoped_acquire gil;
  return number_of(context_region());
}

void leave(const py::object& owner, const char* what) {
  const RegionPtr innermost = context_region();
  RegionPtr region = innermost;
  while (region && region->owner.get() != owner.ptr()) region = innermost_open(region->outer);
  TORCH_CHECK(region != nullptr, what,
              ": expected a region that was entered in this thread and async context, got "
              "one that was not. Leave it where it was entered.");
  region->is_open.store(false, std::memory_order_relaxed);
  --open_regions;
  set_context_region(innermost_open(innermost));
  exchange_thread_region(thread_region());
  {
    const py::gil_scoped_release no_gil;  // processes may have to wait for each other
    close_region(region);
  }
  TORCH_CHECK(region == innermost, what,
              ": expected the innermost region to be left first, got one that others were "
              "entered in since. It has ended and they are in force until they are left. Nest the "
              "blocks, and yield from none in a generator whose caller enters regions.");
}

/// `tandem._C.in_force.recipe`: an attribute of a C type, which Dynamo can read, guard and set.
/// Guards read the recipe of the calling thread and context.
PyObject* get_recipe(PyObject*, void*) {
  try {
    const ActiveRecipePtr recipe = context_recipe();
    return recipe == nullptr ? PyUnicode_InternFromString("null")
                             : PyUnicode_FromString(recipe->json.c_str());
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyObject* get_budget(PyObject*, void*) {
  try {
    const std::optional<double> budget = context_budget();
    return budget ? py::repr(py::float_(*budget)).release().ptr() : PyUnicode_InternFromString("");
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

/// Called by a compiled function at its end with the recipe or the budget that it leaves in force,
/// which must be the one from before. `region`: what enters such regions.
template <PyObject* (*get)(PyObject*, void*)>
int check_unchanged(PyObject* self, PyObject* value, void* region) {
  const auto before = py::reinterpret_steal<py::object>(get(self, nullptr));
  if (!before) return -1;
  if (value != nullptr && PyUnicode_Check(value) && PyUnicode_Compare(value, before.ptr()) == 0)
    return 0;
  PyErr_Format(PyExc_RuntimeError,
               "%s: expected a compiled function to leave the regions that it enters, innermost "
               "first, got one that did not. Use with blocks in it.",
               static_cast<const char*>(region));
  return -1;
}

constexpr const char* kSaid[] = {"", "first micro-batch", "unchanged"};

PyObject* get_said(PyObject*, void*) {
  return PyUnicode_InternFromString(kSaid[static_cast<size_t>(kernel_ops::said_now())]);
}

int set_said(PyObject*, PyObject* value, void*) {
  for (size_t i = 0; i < std::size(kSaid); ++i)
    if (value != nullptr && PyUnicode_Check(value) &&
        PyUnicode_CompareWithASCIIString(value, kSaid[i]) == 0) {
      kernel_ops::say(static_cast<kernel_ops::Said>(i));
      return 0;
    }
  PyErr_SetString(
      PyExc_ValueError,
      "weights: expected \"\", \"first micro-batch\" or \"unchanged\" as what is said of "
      "them, got another value. Use is_first_microbatch or tandem.weights_unchanged().");
  return -1;
}

py::object in_force() {
  static char autocast[] = "autocast", budget[] = "memory_budget";
  static PyGetSetDef attributes[] = {
      {"said_of_weights", get_said, set_said, "What this thread says of the weights that it uses.",
       nullptr},
      {"memory_budget", get_budget, check_unchanged<get_budget>,
       "The memory budget in force as text, empty where there is none.", budget},
      {"recipe", get_recipe, check_unchanged<get_recipe>, "The recipe in force as JSON.", autocast},
      {"outside_compiled_code", get_recipe, nullptr, "The same, never set while tracing.", nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  PyType_Slot slots[] = {{Py_tp_getset, attributes}, {0, nullptr}};
  PyType_Spec spec{"tandem._C.InForce", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  return type();
}

}  // namespace

ContextRegion::ContextRegion() {
  if (open_regions.load(std::memory_order_relaxed) == 0) return;
  RegionPtr region = context_region();
  if (region == thread_region()) return;
  before_ = exchange_thread_region(std::move(region));
  is_exchanged_ = true;
}

ContextRegion::~ContextRegion() {
  if (is_exchanged_) exchange_thread_region(std::move(before_));
}

void bind_autocast(py::module_& module) {
  module.def("enter_autocast", &enter, py::arg("recipe"), py::arg("owner"));
  module.def("enter_memory_budget", &enter_budget, py::arg("bytes_per_row"), py::arg("owner"));
  module.def("exit_autocast", [](const py::object& owner) { leave(owner, "autocast"); });
  module.def("exit_memory_budget", [](const py::object& owner) { leave(owner, "memory_budget"); });
  module.def("region_now", &region_now);
  module.def("enter_recompute", &enter_recompute, py::arg("region"), py::arg("owner"));
  module.def("recipe_history_length", &recipe_history_length);
  py::tuple names(kScalingState.size());
  for (size_t i = 0; i < kScalingState.size(); ++i) names[i] = kScalingState[i].name;
  module.attr("SCALING_STATE") = names;
  module.def("state_in_region", [](std::vector<at::Tensor> state) {
    const ContextRegion region;
    return state_in_region(std::move(state));
  });
  module.def(
      "register_scale_update",
      [](std::string name, py::object function) {
        register_scale_update(std::move(name), [held = hold(std::move(function))](
                                                   const at::Tensor& amax_history,
                                                   const at::Tensor& scale, double format_max) {
          const py::gil_scoped_acquire gil;
          py::handle(static_cast<PyObject*>(held.get()))(amax_history, scale, format_max);
        });
      },
      py::arg("name"), py::arg("function"));
  module.def(
      "register_quantizer_choice",
      [](std::string name, py::object function) {
        register_quantizer_choice(
            std::move(name), [held = hold(std::move(function))](const QuantizeSlot& slot) {
              const py::gil_scoped_acquire gil;
              const char* const role = slot.role == Role::input    ? "input"
                                       : slot.role == Role::weight ? "weight"
                                                                   : "grad_output";
              return py::handle(static_cast<PyObject*>(held.get()))(
                         py::str(slot.kind.data(), slot.kind.size()), role,
                         py::str(slot.op.data(), slot.op.size()), slot.slot)
                  .cast<std::string>();
            });
      },
      py::arg("name"), py::arg("function"));
  kernel_ops::set_region_reader(&context_number);
  module.def("active_recipe", []() -> std::optional<std::string> {
    const ActiveRecipePtr recipe = context_recipe();
    return recipe == nullptr ? std::nullopt : std::optional(recipe->json);
  });
  module.attr("in_force") = in_force();
  module.def(
      "native_getter",
      [](const py::function& getter, const py::object& changes, const py::object& token,
         const py::object& value) {
        return py::cpp_function([=](const py::object& self) -> py::object {
          if (!token.is_none()) {
            const py::dict fields = self.attr("__dict__");
            PyObject* known = PyDict_GetItem(fields.ptr(), token.ptr());
            PyObject* told = PyDict_GetItem(fields.ptr(), changes.ptr());
            if (known != nullptr && told != nullptr && told != Py_None &&
                known == py::reinterpret_borrow<py::object>(told).attr("token").ptr())
              if (PyObject* found = PyDict_GetItem(fields.ptr(), value.ptr()))
                return py::reinterpret_borrow<py::object>(found);
          }
          return getter(self);
        });
      },
      py::arg("getter"), py::arg("changes") = py::none(), py::arg("token") = py::none(),
      py::arg("value") = py::none(),
      "A property of this getter is an attribute to Dynamo: it calls the getter instead of tracing "
      "it, and guards by calling it again. "
      "Where the object's attribute `token` is that of its attribute `changes`, its attribute "
      "`value` is the answer, and no Python runs.");
}

}  // namespace tandem::bindings
