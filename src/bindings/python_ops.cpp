#include "bindings/python_ops.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "bindings/hold.h"
#include "core/call.h"
#include "core/json_fields.h"
#include "planner/registry.h"
#include "quantization/recipe.h"

namespace tandem::bindings {

namespace py = pybind11;

namespace {

/// `tandem._runtime`: calls user code in the style it is written in. Set once, when the package is imported.
py::object& runtime() {
  static auto& runtime = *new py::object();
  return runtime;
}

py::object held(const std::shared_ptr<void>& fields) {
  return fields ? py::reinterpret_borrow<py::object>(static_cast<PyObject*>(fields.get()))
                : py::none();
}

/// Text that definitions refer to: they live as long as the process.
std::string_view permanent(std::string text) {
  static auto& mutex = *new std::mutex;
  static auto& texts = *new std::deque<std::string>;
  const std::lock_guard<std::mutex> lock(mutex);
  return texts.emplace_back(std::move(text));
}

/// Of a Python op: what its class declares, which nobody writes by hand.
constexpr size_t kMostOperands = 4096;

/// What a Python op or fusion is known by, and how many operands of each sort each covered op has.
struct PythonOptions {
  struct Counts {
    size_t extra_inputs = 0, params = 0, extra_outputs = 0, context = 0;
    size_t buffers =
        0;  ///< the last of `params`: backward neither reads them nor returns gradients
  };
  std::string key;
  std::vector<Counts> ops;

  /// What messages call it: the key without the part that only caches understand.
  std::string label() const { return key.substr(0, key.find('#')); }
};

py::object to_python(const at::Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::none();
}

at::Tensor to_tensor(const py::handle& object, const std::string& label, const char* what) {
  if (object.is_none()) return {};
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), label, ": expected ", what,
                   " to be a tensor or None, got ", Py_TYPE(object.ptr())->tp_name,
                   ". Return tensors.");
  return THPVariable_Unpack(object.ptr());
}

/// A result without a history of its own, which user code may have recorded, or which a parameter has that nobody declared: the history of
/// results is the pipeline's, but in composite form, which is differentiated as it is. An argument is what it was.
at::Tensor without_history(const Call& call, at::Tensor tensor) {
  if (!tensor.defined() || !tensor.requires_grad() || call.path() == Path::composite) return tensor;
  const size_t reads = call.step().reads.size();
  for (size_t i = 0; i < reads; ++i)
    if (call.has(i) && call.format(i) != Format::opaque && call.in(i).is_same(tensor))
      return tensor;
  return tensor.detach();
}

py::list list_of(Call& call, size_t& next, size_t count) {
  py::list list;
  for (size_t i = 0; i < count; ++i, ++next)
    list.append(call.has(next) ? to_python(call.in(next)) : py::none());
  return list;
}

py::tuple checked(const py::handle& object, size_t count, const std::string& label,
                  const char* what) {
  const auto items = py::reinterpret_steal<py::tuple>(PySequence_Tuple(object.ptr()));
  if (!items) throw py::error_already_set();
  TORCH_CHECK_VALUE(items.size() == count, label, ": expected ", count, " ", what, ", got ",
                    items.size(), ". Return one for each, None where there is none.");
  return items;
}

/// Hands results to the writes [next, next + n); values that a Python op returns are new unless they are its arguments.
void write_all(Call& call, size_t& next, const py::tuple& results, const std::string& label,
               const char* what) {
  for (const auto& result : results) {
    const size_t write = next++;
    if (!call.wants(write)) continue;
    at::Tensor tensor = to_tensor(result, label, what);
    TORCH_CHECK_VALUE(tensor.defined(), label, ": expected ", what,
                      ", which is required by an operation outside, got None. Return it.");
    const at::ScalarType planned = call.out_type(write).dtype;
    TORCH_CHECK_TYPE(
        call.out_type(write).format != Format::plain || tensor.scalar_type() == planned, label,
        ": expected ", what, " in ", planned, ", to which the op's tensors promote, got ",
        tensor.scalar_type(),
        ". Convert it in the op's forward: results of another dtype cannot be planned.");
    call.out(write, without_history(call, std::move(tensor)));
  }
}

/// runtime.forward(key, x, extra inputs per op, params per op, save) -> (y, extra outputs per op, saved per op, fields)
void python_forward(Call& call) {
  const py::gil_scoped_acquire gil;
  const auto& options = call.options<PythonOptions>();
  const std::string label = options.label();
  size_t next = 1;
  py::list extras, params;
  for (const auto& counts : options.ops) extras.append(list_of(call, next, counts.extra_inputs));
  for (const auto& counts : options.ops) params.append(list_of(call, next, counts.params));
  const size_t last = call.step().writes.size() - 1;
  const bool is_opaque = call.wants(last) && call.out_type(last).format == Format::opaque;
  bool save = is_opaque;
  size_t outputs = 1;
  for (const auto& counts : options.ops) outputs += counts.extra_outputs;
  if (!is_opaque)
    for (size_t w = outputs; w < call.step().writes.size(); ++w) save |= call.wants(w);
  const auto results =
      checked(runtime().attr("forward")(options.key, to_python(call.in(0)), extras, params, save),
              4, label, "results");
  size_t write = 0;
  write_all(call, write, py::make_tuple(results[0]), label, "the output");
  const auto extra_outputs =
      checked(results[1], options.ops.size(), label, "groups of extra outputs");
  for (size_t op = 0; op < options.ops.size(); ++op)
    write_all(call, write,
              checked(extra_outputs[op], options.ops[op].extra_outputs, label, "extra outputs"),
              label, "an extra output");
  if (!save) return;
  if (!is_opaque) {
    const auto saved = checked(results[2], options.ops.size(), label, "contexts");
    for (size_t op = 0; op < options.ops.size(); ++op)
      write_all(call, write,
                checked(saved[op], options.ops[op].context, label, "saved tensors of a covered op"),
                label, "a saved tensor");
    return;
  }
  Opaque& opaque = call.frame().opaque(call.step().writes[last]);
  for (const auto& tensor : results[2])
    opaque.tensors.push_back(without_history(call, to_tensor(tensor, label, "a saved tensor")));
  opaque.fields = hold(py::reinterpret_borrow<py::object>(results[3]));
}

/// runtime.backward(key, saved, fields, grad_y, grads of extra outputs per op, params per op)
///   -> (grad_x, grads of params per op, grads of extra inputs per op)
void python_backward(Call& call) {
  const py::gil_scoped_acquire gil;
  const auto& options = call.options<PythonOptions>();
  const std::string label = options.label();
  size_t next = 1;
  py::list grad_extras, params, contexts;
  for (const auto& counts : options.ops)
    grad_extras.append(list_of(call, next, counts.extra_outputs));
  for (const auto& counts : options.ops)
    params.append(list_of(call, next, counts.params - counts.buffers));
  py::object saved = py::none(), fields = py::none();
  if (const Value last = call.step().reads.back();
      exists(last) && call.frame().type(last).format == Format::opaque) {
    const Opaque& opaque = call.frame().opaque(call.step().reads.back());
    py::list tensors;
    for (const at::Tensor& tensor : opaque.tensors) tensors.append(to_python(tensor));
    saved = tensors;
    fields = held(opaque.fields);
  } else {
    for (const auto& counts : options.ops) contexts.append(list_of(call, next, counts.context));
    saved = contexts;
  }
  const py::object grad_y = call.has(0) ? to_python(call.in(0)) : py::none();
  const auto results =
      checked(runtime().attr("backward")(options.key, saved, fields, grad_y, grad_extras, params),
              3, label, "results");
  const auto zero_for_none = [&](size_t write, const py::handle& result) {
    if (!call.wants(write)) return;
    at::Tensor gradient = to_tensor(result, label, "a gradient");
    TORCH_CHECK_VALUE(gradient.defined(), label, ": expected a gradient for ",
                      call.out_type(write).name,
                      ", which requires grad, got None. Return it from op_backward.");
    // As autograd does with what a torch.autograd.Function returns.
    call.out(write, without_history(call, gradient.to(call.out_type(write).dtype)));
  };
  size_t write = 0;
  zero_for_none(write++, results[0]);
  for (const int group : {1, 2}) {
    const auto per_op =
        checked(results[static_cast<size_t>(group)], options.ops.size(), label,
                group == 1 ? "groups of parameter gradients" : "groups of extra input gradients");
    for (size_t op = 0; op < options.ops.size(); ++op)
      for (const auto& gradient :
           checked(per_op[op],
                   group == 1 ? options.ops[op].params - options.ops[op].buffers
                              : options.ops[op].extra_inputs,
                   label, group == 1 ? "parameter gradients" : "extra input gradients"))
        zero_for_none(write++, gradient);
  }
}

PythonOptions::Counts counts_of(const OpDef& def) {
  return {def.inputs.size() - 1, def.params.size(), def.extra_outputs.size(), def.context.size(),
          def.fixed_params};
}

/// How many operands the op has is the definition's to say.
Options parse_python(const OpDef& def, const nlohmann::json& options) {
  auto parsed = std::make_shared<PythonOptions>();
  Fields fields(options, "op options");
  fields.at("key");
  fields.get("key", parsed->key, limits::kTextBytes).finish();
  parsed->ops.push_back(counts_of(def));
  return parsed;
}

/// Registers the definition of a class of Python ops with so many operands; once per name.
void register_python_op(const std::string& name, size_t extra_inputs, size_t params,
                        size_t extra_outputs, size_t buffers) {
  for (const size_t count : {extra_inputs, params, extra_outputs, buffers})
    TORCH_CHECK_VALUE(count <= kMostOperands, "op: expected at most ", kMostOperands,
                      " operands of each sort, got ", count, ". Split the op.");
  for (const auto& known : op_names()) {
    if (known != name) continue;
    const OpDef& def = op_def(name);
    const PythonOptions::Counts counts = counts_of(def);
    TORCH_CHECK_VALUE(def.parse_for == parse_python && counts.extra_inputs == extra_inputs &&
                          counts.params == params + buffers &&
                          counts.extra_outputs == extra_outputs && counts.buffers == buffers,
                      "op: expected a new name or the operands that \"", shown(name),
                      "\" is registered with, got others. Rename the op.");
    return;
  }
  auto& def = *new OpDef;  // definitions live as long as the process
  def.name = permanent(name);
  def.formula = "written in Python";
  def.runs_user_code = true;
  def.dtype = DtypeRule::promote;
  def.parse_for = parse_python;
  StepDef forward{.name = "forward", .reads = {}, .writes = {}, .run = python_forward},
      backward{
          .name = "backward", .reads = {"grad_y"}, .writes = {"grad_x"}, .run = python_backward};
  for (size_t i = 0; i < extra_inputs; ++i)
    def.inputs.push_back(permanent("extra" + std::to_string(i)));
  for (size_t i = 0; i < params; ++i) def.params.push_back(permanent("param" + std::to_string(i)));
  def.fixed_params = buffers;
  for (size_t i = 0; i < buffers; ++i)
    def.params.push_back(permanent("buffer" + std::to_string(i)));
  for (size_t i = 0; i < extra_outputs; ++i) {
    const auto output = permanent("extra_output" + std::to_string(i));
    def.results.push_back({output});
    def.extra_outputs.push_back(output);
    backward.reads.push_back(permanent("grad_" + std::string(output)));
  }
  def.results.push_back({"saved", ResultDef::opaque});
  for (size_t i = 0; i < params; ++i) backward.reads.push_back(def.params[i]);
  backward.reads.push_back("saved");
  for (size_t i = 0; i < params; ++i)
    backward.writes.push_back(permanent("grad_" + std::string(def.params[i])));
  for (size_t i = 1; i < def.inputs.size(); ++i)
    backward.writes.push_back(permanent("grad_" + std::string(def.inputs[i])));
  forward.reads = def.inputs;
  forward.reads.insert(forward.reads.end(), def.params.begin(), def.params.end());
  for (const ResultDef& result : def.results) forward.writes.push_back(result.name);
  def.forward = {std::move(forward)};
  def.backward = {std::move(backward)};
  register_op(def);
}

/// The fusion of a group of ops [first, last] that a Python function returned, its operands named by op.
const Fusion* group_fusion(Pass pass, const std::string& name, const Description& description,
                           size_t first, size_t last, PythonOptions& options) {
  static auto& fusions = *new std::deque<Fusion>;
  Fusion fusion{.name = name, .pass = pass, .runs_user_code = true};
  fusion.picture = "written in Python";
  FusedRun ahead{.reads = {{0, "x"}}, .writes = {}, .run = python_forward},
      back{.reads = {}, .writes = {{0, "grad_x"}}, .run = python_backward};
  const auto last_member = static_cast<uint32_t>(last - first);
  ahead.writes.push_back({last_member, description.ops[last].kind->def.results[0].name});
  back.reads.push_back(
      {last_member,
       permanent("grad_" + std::string(description.ops[last].kind->def.results[0].name))});
  const auto each = [&](auto&& visit) {
    for (size_t op = first; op <= last; ++op)
      visit(static_cast<uint32_t>(op - first), description.ops[op].kind->def);
  };
  each([&](uint32_t member, const OpDef& def) {
    options.ops.push_back(counts_of(def));
    for (size_t i = 1; i < def.inputs.size(); ++i) ahead.reads.push_back({member, def.inputs[i]});
    for (const auto& output : def.extra_outputs) {
      ahead.writes.push_back({member, output});
      back.reads.push_back({member, permanent("grad_" + std::string(output))});
    }
  });
  each([&](uint32_t member, const OpDef& def) {
    for (size_t p = 0; p < def.params.size(); ++p) {
      const std::string_view param = def.params[p];
      ahead.reads.push_back({member, param});
      if (p + def.fixed_params >= def.params.size()) continue;
      back.reads.push_back({member, param});
      back.writes.push_back({member, permanent("grad_" + std::string(param))});
    }
  });
  each([&](uint32_t member, const OpDef& def) {
    for (size_t i = 1; i < def.inputs.size(); ++i)
      back.writes.push_back({member, permanent("grad_" + std::string(def.inputs[i]))});
    for (const auto& name : def.context) {
      if (pass == Pass::backward) back.reads.push_back({member, name});
      if (pass == Pass::forward)
        ahead.writes.push_back({member, name});  // operands: see fuse_groups
    }
  });
  fusion.run = pass == Pass::backward ? back : ahead;
  if (pass == Pass::joint) {
    fusion.backward = back;
    fusion.keeps = {"saved"};
  }
  fusions.push_back(std::move(fusion));
  return &fusions.back();
}

/// Asks Python once per plan and pass: runtime.groups(pass, instances, recipe as JSON) -> [(first, last, key)], one per fused op.
std::vector<OpGroup> groups_from_python(Pass pass, const Description& description) {
  const py::gil_scoped_acquire gil;
  static constexpr const char* kPasses[] = {"joint", "forward", "backward"};
  py::list ops;
  for (const OpNode& op : description.ops) ops.append(op.instance);
  std::vector<OpGroup> groups;
  py::object recipe = py::none();
  if (description.recipe) recipe = py::str(to_json(*description.recipe).dump());
  for (const auto& item :
       runtime().attr("groups")(kPasses[static_cast<size_t>(pass)], ops, recipe)) {
    const auto [first, last, key, name] =
        item.cast<std::tuple<size_t, size_t, std::string, std::string>>();
    auto options = std::make_shared<PythonOptions>();
    options->key = key;
    const Fusion* fusion = group_fusion(pass, name, description, first, last, *options);
    groups.push_back({first, last, fusion, std::move(options)});
  }
  return groups;
}

}  // namespace

void bind_python_ops(py::module_& module) {
  module.def("set_runtime", [](py::object object) {
    runtime() = std::move(object);
    set_group_fusions(groups_from_python);
  });
  module.def("register_python_op", register_python_op, py::arg("name"), py::arg("extra_inputs"),
             py::arg("params"), py::arg("extra_outputs"), py::arg("buffers"));
  module.def("bump_fusions_version", bump_fusions_version);
}

}  // namespace tandem::bindings
