#include "planner/description.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/build_id.h"

namespace py = pybind11;

namespace tandem::bindings {

namespace {

/// The name of a channel, or None.
using Channel = std::optional<std::string>;

OpEntry op_entry(std::string op, std::string label, const py::dict& options,
                 std::vector<size_t> params, std::vector<size_t> joins,
                 std::vector<size_t> main_grads, size_t deferred, size_t given,
                 const std::vector<Channel>& extra_inputs,
                 const std::vector<std::pair<Channel, bool>>& extra_outputs, bool in_place,
                 const std::optional<std::tuple<uint32_t, uint32_t, uint32_t>>& state,
                 std::string instance, bool recompute, bool keeps_dtype) {
  OpEntry entry{.op = std::move(op),
                .label = std::move(label),
                .options = options_of(options),
                .params = std::move(params),
                .joins = std::move(joins),
                .main_grads = std::move(main_grads),
                .deferred = deferred,
                .given = given,
                .in_place = in_place,
                .instance = std::move(instance),
                .recompute = recompute,
                .keeps_dtype = keeps_dtype};
  for (const Channel& channel : extra_inputs)
    entry.extra_inputs.push_back({.channel = channel.value_or("")});
  for (const auto& [channel, to_caller] : extra_outputs)
    entry.extra_outputs.push_back({channel.value_or(""), to_caller});
  if (state)
    entry.state = StateSlots{std::get<0>(*state), std::get<1>(*state), std::get<2>(*state)};
  return entry;
}

}  // namespace

// pybind11's caster of variants depends on its version: 3.1 makes an int a double.
OptionValues options_of(const py::dict& options) {
  const auto converted = [](const py::handle& value) -> OptionValue {
    if (PyBool_Check(value.ptr())) return value.cast<bool>();
    if (PyLong_Check(value.ptr())) return value.cast<int64_t>();
    if (PyFloat_Check(value.ptr())) return value.cast<double>();
    if (PyUnicode_Check(value.ptr())) return value.cast<std::string>();
    return value.cast<std::vector<int64_t>>();
  };
  OptionValues values;
  for (const auto& [name, value] : options)
    values.emplace_back(name.cast<std::string>(), converted(value));
  return values;
}

void bind_description(py::module_& module) {
  py::class_<OpEntry>(module, "OpEntry")
      .def(py::init(&op_entry), py::kw_only(), py::arg("op"), py::arg("label") = "",
           py::arg("options") = py::dict(), py::arg("params") = std::vector<size_t>(),
           py::arg("joins") = std::vector<size_t>(), py::arg("main_grads") = std::vector<size_t>(),
           py::arg("deferred") = 0, py::arg("given") = 0,
           py::arg("extra_inputs") = std::vector<Channel>(),
           py::arg("extra_outputs") = std::vector<std::pair<Channel, bool>>(),
           py::arg("in_place") = false, py::arg("state") = py::none(), py::arg("instance") = "",
           py::arg("recompute") = false, py::arg("keeps_dtype") = false);
  module.def("write_ops", &write_ops, py::arg("ops"));
  module.def(
      "write_description",
      [](const std::string& ops, const std::string& recipe, bool training,
         std::vector<std::string> required_fusions, uint64_t fusions_version,
         const std::string& process, std::optional<double> memory_budget, bool cache_weights) {
        return write_description(ops, recipe,
                                 {.training = training,
                                  .cache_weights = cache_weights,
                                  .required_fusions = std::move(required_fusions),
                                  .fusions_version = fusions_version,
                                  .memory_budget = memory_budget},
                                 process);
      },
      py::arg("ops"), py::arg("recipe"), py::kw_only(), py::arg("training"),
      py::arg("required_fusions"), py::arg("fusions_version"), py::arg("process"),
      py::arg("memory_budget"), py::arg("cache_weights"));
  module.attr("DESCRIPTION_VERSION") = kDescriptionVersion;
  module.def("build_id", &build_id);
}

}  // namespace tandem::bindings
