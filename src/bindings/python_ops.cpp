#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <deque>
#include <nlohmann/json.hpp>
#include <tuple>

#include "autograd/call.h"
#include "bindings/bindings.h"
#include "bindings/hold.h"
#include "core/call.h"
#include "core/json_fields.h"
#include "core/op_source.h"
#include "planner/registry.h"
#include "quantization/recipe.h"

namespace tandem::bindings {

namespace py = pybind11;

namespace {

/// `tandem.user_ops.runtime`, which calls user code. Set once, when the package is imported.
py::object& runtime() {
  static auto& runtime = *new py::object();
  return runtime;
}

py::object held(const std::shared_ptr<void>& fields) {
  return fields ? py::reinterpret_borrow<py::object>(static_cast<PyObject*>(fields.get()))
                : py::none();
}

/// A limit for the operands that the class of a Python op declares.
constexpr size_t kMostOperands = 4096;

/// The key of a Python op or fusion, and how many operands of each sort its ops have.
struct PythonOptions {
  struct Counts {
    size_t extra_inputs = 0, params = 0, extra_outputs = 0, context = 0;
    /// How many of the last `params` backward neither reads nor returns gradients for.
    size_t buffers = 0;
    /// How many sizes of x backward gets besides the context.
    size_t shapes = 0;
    /// Whether the op is written in Python: its context is one value that only the op understands.
    bool is_opaque = false;
    /// Of an op in Python: the declared dtypes of y and the extra outputs, or Undefined.
    std::vector<at::ScalarType> declared = {};
  };
  std::string key;
  std::vector<Counts> ops;
  /// Whether each covered op has a context of its own: true for a fusion of one direction.
  bool has_contexts = false;
  /// The object by which the runtime finds a fusion. Null for an op, which has a key.
  std::shared_ptr<void> fused;
  /// For a fusion: the owner of the texts that steps refer to.
  std::shared_ptr<const void> fusion;

  /// The name in messages: the key without the part that only caches need.
  std::string label() const { return key.substr(0, key.find('#')); }
  py::object target() const { return fused ? held(fused) : py::str(key); }
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

/// A result without the history of user code or of an undeclared parameter. In composite form,
/// which is differentiated itself, the history stays. An argument is returned unchanged.
at::Tensor without_history(const Call& call, at::Tensor tensor) {
  if (!tensor.defined() || !tensor.requires_grad() || call.path() == Path::composite) return tensor;
  const size_t reads = call.step().reads.size();
  for (size_t i = 0; i < reads; ++i)
    if (call.has(i) && call.format(i) != Format::opaque && call.in(i).is_same(tensor))
      return tensor;
  return tensor.detach();
}

/// A read of a step as user code gets it. User code may check `requires_grad` to decide whether to
/// compute a gradient; arguments have that flag, results in a frame do not.
at::Tensor telling(const Call& call, size_t read) {
  const at::Tensor& tensor = call.in(read);
  if (call.path() == Path::composite || !call.type(read).requires_grad || !tensor.defined() ||
      tensor.requires_grad())
    return tensor;
  return tensor.detach().set_requires_grad(true);
}

/// Calls runtime.in_codes(parts, quantizer, whether they are column codes, whether one value serves
/// both directions, dtype, sizes) -> QuantizedTensor.
py::object in_codes(Call& call, size_t read) {
  const Type& type = call.type(read);
  py::list parts;
  for (size_t part = 0; part < tensors_per_value(type); ++part)
    parts.append(to_python(call.in(read, part)));
  // If codes do not determine the sizes of their tensor, the frame has a note of them.
  const c10::SymDimVector* noted = call.frame().noted_sizes(call.step().reads[read]);
  const c10::SymIntArrayRef sizes = noted != nullptr ? *noted : call.in(read).sym_sizes();
  return runtime().attr("in_codes")(
      parts, type.quantizer->text, type.direction == Direction::column,
      serves_both_directions(*type.quantizer), py::cast(type.dtype),
      py::tuple(py::cast(std::vector<c10::SymInt>(sizes.begin(), sizes.end()))));
}

/// `tells`: whether results pass through `telling`.
py::list list_of(Call& call, size_t& next, size_t count, bool tells = false) {
  py::list list;
  for (size_t i = 0; i < count; ++i, ++next)
    list.append(!call.has(next) ? py::none()
                : call.format(next) == Format::codes
                    ? in_codes(call, next)
                    : to_python(tells ? telling(call, next) : call.in(next)));
  return list;
}

py::tuple checked(const py::handle& object, size_t count, const std::string& label,
                  const char* what) {
  const auto items = py::reinterpret_steal<py::tuple>(PySequence_Tuple(object.ptr()));
  if (!items) throw py::error_already_set();
  TORCH_CHECK(items.size() == count, label, ": expected ", count, " ", what, ", got ", items.size(),
              ". Return one for each, None where there is none.");
  return items;
}

/// Stores results in the writes [next, next + n), new tensors unless they are arguments.
/// `declared`: the dtype that the op declares for each.
void write_all(Call& call, size_t& next, const py::tuple& results, const std::string& label,
               const char* what, std::span<const at::ScalarType> declared = {}) {
  const size_t first = next;
  for (const auto& result : results) {
    const size_t write = next++;
    if (!call.wants(write)) continue;
    at::Tensor tensor = to_tensor(result, label, what);
    TORCH_CHECK(tensor.defined(), label, ": expected ", what,
                ", which is public or required by an operation outside its forward fusion, got "
                "None. Return it.");
    const at::ScalarType planned = call.out_type(write).dtype;
    const bool is_planned =
        call.out_type(write).format != Format::plain || tensor.scalar_type() == planned;
    const bool is_declared =
        write - first < declared.size() && declared[write - first] != at::ScalarType::Undefined;
    TORCH_CHECK_TYPE(is_planned || !is_declared, label, ": expected ", what, " in ", planned,
                     ", which the op declares, got ", tensor.scalar_type(),
                     ". Convert it in the op's forward, or declare that dtype as output_dtype or "
                     "in extra_output_dtypes.");
    TORCH_CHECK_TYPE(
        is_planned, label, ": expected ", what, " in ", planned,
        ", to which the op's tensors promote, got ", tensor.scalar_type(),
        ". Convert it in the op's forward, or declare output_dtype or extra_output_dtypes on the "
        "op: a plan knows dtypes before it runs.");
    call.out(write, without_history(call, std::move(tensor)));
  }
}

/// The caller's arguments for each op that a step covers, None if there are none.
py::list given_to(const Call& call, const Frame& frame, size_t count) {
  uint32_t first = call.step().covers.empty() ? 0 : call.step().covers.front().op;
  for (const Part& part : call.step().covers) first = std::min(first, part.op);
  const auto* given = static_cast<PyObject*>(const_cast<void*>(frame.given()));
  py::list by_op;
  for (size_t op = first; op < first + count; ++op) {
    const py::int_ key(op);
    PyObject* own =
        given == nullptr ? nullptr : PyDict_GetItem(const_cast<PyObject*>(given), key.ptr());
    by_op.append(own == nullptr ? py::none() : py::reinterpret_borrow<py::object>(own));
  }
  return by_op;
}

/// Calls runtime.forward(key or fused op, x, extra inputs per op, params per op, save, arguments
/// per op) -> Forward.
void python_forward(Call& call) {
  const py::gil_scoped_acquire gil;
  const auto& options = call.options<PythonOptions>();
  const std::string label = options.label();
  size_t next = 1;
  py::list extras, params;
  for (const auto& counts : options.ops)
    extras.append(list_of(call, next, counts.extra_inputs, /*tells=*/true));
  for (const auto& counts : options.ops) params.append(list_of(call, next, counts.params));
  const size_t last = call.step().writes.size() - 1;
  const bool is_opaque =
      !options.has_contexts && call.wants(last) && call.out_type(last).format == Format::opaque;
  bool save = is_opaque;
  size_t outputs = 1;
  for (const auto& counts : options.ops) outputs += counts.extra_outputs;
  if (!is_opaque)
    for (size_t w = outputs; w < call.step().writes.size(); ++w) save |= call.wants(w);
  const py::object results =
      runtime().attr("forward")(options.target(), to_python(telling(call, 0)), extras, params, save,
                                given_to(call, call.frame(), options.ops.size()));
  size_t write = 0;
  write_all(
      call, write, py::make_tuple(results.attr("y")), label, "the output",
      std::span(options.ops.back().declared).subspan(0, options.ops.back().is_opaque ? 1 : 0));
  const auto extra_outputs =
      checked(results.attr("extra_outputs"), options.ops.size(), label, "groups of extra outputs");
  for (size_t op = 0; op < options.ops.size(); ++op)
    write_all(call, write,
              checked(extra_outputs[op], options.ops[op].extra_outputs, label, "extra outputs"),
              label, "an extra output",
              std::span(options.ops[op].declared).subspan(options.ops[op].is_opaque ? 1 : 0));
  if (!save) return;
  const auto write_opaque = [&](size_t at, const py::handle& saved, py::object fields) {
    if (!call.wants(at)) return;
    Opaque& opaque = call.frame().opaque(call.step().writes[at]);
    for (const auto& tensor : saved)
      opaque.tensors.push_back(without_history(call, to_tensor(tensor, label, "a saved tensor")));
    opaque.fields = hold(std::move(fields));
  };
  if (is_opaque) {
    write_opaque(last, results.attr("saved"), results.attr("fields"));
    return;
  }
  const auto saved = checked(results.attr("saved"), options.ops.size(), label, "contexts");
  const auto fields = checked(results.attr("fields"), options.ops.size(), label, "contexts");
  for (size_t op = 0; op < options.ops.size(); ++op) {
    if (options.ops[op].is_opaque) {
      write_opaque(write++, saved[op], fields[op]);
      continue;
    }
    if (options.ops[op].context == 0) continue;  // in evaluation it is another op, or absent
    write_all(call, write,
              checked(saved[op], options.ops[op].context, label, "saved tensors of a covered op"),
              label, "a saved tensor");
  }
}

/// The gradients that a backward must return: of x, of parameters and of extra inputs, by op.
py::tuple asked_of(const Call& call, const PythonOptions& options) {
  size_t write = 0;
  const auto list = [&](size_t count) {
    py::list requested;
    for (size_t i = 0; i < count; ++i) requested.append(call.wants(write++));
    return requested;
  };
  const bool x = call.wants(write++);
  py::list params, extra_inputs;
  for (const auto& counts : options.ops) params.append(list(counts.params - counts.buffers));
  for (const auto& counts : options.ops) extra_inputs.append(list(counts.extra_inputs));
  return py::make_tuple(x, params, extra_inputs);
}

/// Calls runtime.backward(key or fused op, saved, fields, grad_y, grads of extra outputs per op,
/// params per op, which gradients are requested, sizes of x per op) -> Gradients.
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
  py::list shapes;
  py::object saved = py::none(), fields = py::none();
  const auto of_opaque = [&](Value value) {
    const Opaque& opaque = call.frame().opaque(value);
    py::list tensors;
    for (const at::Tensor& tensor : opaque.tensors) tensors.append(to_python(tensor));
    return std::pair(std::move(tensors), held(opaque.fields));
  };
  if (const Value last = call.step().reads.back();
      !options.has_contexts && exists(last) && call.frame().type(last).format == Format::opaque) {
    std::tie(saved, fields) = of_opaque(last);
  } else {
    py::list of_ops;
    for (const auto& counts : options.ops) {
      if (counts.is_opaque && call.has(next)) {
        auto [tensors, own] = of_opaque(call.step().reads[next]);
        contexts.append(tensors);
        of_ops.append(own);
      } else {
        contexts.append(counts.is_opaque ? py::list() : list_of(call, next, counts.context));
        of_ops.append(py::none());
      }
      next += counts.is_opaque ? 1 : 0;
      py::object shape = py::none();
      for (size_t i = 0; i < counts.shapes; ++i, ++next)
        if (const Value value = call.step().reads[next]; exists(value))
          shape = py::tuple(py::cast(c10::SymIntArrayRef(call.frame().shape(value)).vec()));
      shapes.append(shape);
    }
    saved = contexts;
    fields = of_ops;
  }
  const py::object grad_y = call.has(0) ? to_python(call.in(0)) : py::none();
  const py::object results =
      runtime().attr("backward")(options.target(), saved, fields, grad_y, grad_extras, params,
                                 asked_of(call, options), shapes);
  const auto put = [&](size_t write, const py::handle& result, auto&& like) {
    if (!call.wants(write)) return;
    at::Tensor gradient = to_tensor(result, label, "a gradient");
    if (!gradient.defined()) gradient = to_tensor(like(), label, "zeros");
    TORCH_CHECK_VALUE(gradient.defined(), label, ": expected a gradient for ",
                      call.out_type(write).name,
                      ", which requires grad, got None, and a fusion of backward alone knows no "
                      "sizes. Return zeros from fuser_backward.");
    // autograd does this with the results of a torch.autograd.Function.
    call.out(write, without_history(call, gradient.to(call.out_type(write).dtype)));
  };
  const auto zeros = [&](const char* which, auto... place) {
    return [&, which, place...] { return results.attr("zeros")(which, place...); };
  };
  size_t write = 0;
  put(write++, results.attr("x"), zeros("x", 0, 0));
  const auto param_groups =
      checked(results.attr("params"), options.ops.size(), label, "groups of parameter gradients");
  for (size_t op = 0; op < options.ops.size(); ++op) {
    size_t place = 0;
    for (const auto& gradient :
         checked(param_groups[op], options.ops[op].params - options.ops[op].buffers, label,
                 "parameter gradients"))
      put(write++, gradient, zeros("params", op, place++));
  }
  const auto extra_groups = checked(results.attr("extra_inputs"), options.ops.size(), label,
                                    "groups of extra input gradients");
  for (size_t op = 0; op < options.ops.size(); ++op) {
    size_t place = 0;
    for (const auto& gradient :
         checked(extra_groups[op], options.ops[op].extra_inputs, label, "extra input gradients"))
      put(write++, gradient, zeros("extra_inputs", op, place++));
  }
}

Options parse_python(const OpDef& def, const OptionValues& options);

bool is_shape(const ResultDef& result) { return result.kind == ResultDef::shape; }

/// `options`: of the op; they determine the lengths of its lists.
PythonOptions::Counts counts_of(const OpDef& def, const void* options) {
  PythonOptions::Counts counts;
  counts.extra_inputs = extra_input_count(def, options);
  for (const ParamDef& param : def.params)
    counts.params += is_list(param.name) ? def.list_length(options, param.name) : 1;
  counts.extra_outputs = def.extra_outputs.size();
  counts.context = def.context.size();
  counts.buffers = def.fixed_params;
  counts.shapes = static_cast<size_t>(std::ranges::count_if(def.results, is_shape));
  counts.is_opaque = def.parse == parse_python;
  if (counts.is_opaque)
    for (size_t i = 0; i <= counts.extra_outputs; ++i)
      counts.declared.push_back(def.results[i].dtype);
  return counts;
}

/// The definition determines how many operands the op has.
Options parse_python(const OpDef& def, const OptionValues& options) {
  const auto* key = options.size() == 1 ? std::get_if<std::string>(&options[0].second) : nullptr;
  TORCH_CHECK_VALUE(key && options[0].first == "key", "op options: expected a text \"key\" alone, ",
                    "got ", options.size(), " options. Descriptions are made by the fronts.");
  auto parsed = std::make_shared<PythonOptions>();
  parsed->key = *key;
  parsed->ops.push_back(counts_of(def, nullptr));
  return parsed;
}

/// A definition or a fusion, together with the texts that it refers to.
template <typename T>
struct WithTexts {
  T made;
  std::deque<std::string> texts;
  std::string_view text(std::string text) { return texts.emplace_back(std::move(text)); }
};

/// The dtypes behind '>' in a name, as ">int64,-,float32"; Undefined for '-' and missing ones.
std::vector<at::ScalarType> dtypes_in(std::string_view text) {
  std::vector<at::ScalarType> dtypes;
  while (!text.empty()) {
    text.remove_prefix(1);  // '>' or ','
    const std::string_view each = text.substr(0, text.find(','));
    text.remove_prefix(each.size());
    at::ScalarType found = at::ScalarType::Undefined;
    for (int8_t i = 0; i < static_cast<int8_t>(at::ScalarType::NumOptions); ++i)
      if (const auto dtype = static_cast<at::ScalarType>(i);
          dtype != at::ScalarType::Undefined && c10::getDtypeNames(dtype).first == each)
        found = dtype;
    TORCH_CHECK_VALUE(found != at::ScalarType::Undefined || each == "-",
                      "op: expected dtypes of results by torch's names, got \"", shown(each),
                      "\". Descriptions are made by the fronts.");
    dtypes.push_back(found);
  }
  return dtypes;
}

/// The numbers of extra inputs, parameters, extra outputs and buffers at the end of a Python op's
/// name, as "0x1x0x0", before a '>' if there is one; nullopt if the name ends otherwise.
std::optional<std::array<size_t, 4>> counts_in(std::string_view name) {
  std::array<size_t, 4> counts{};
  std::string_view rest = name.substr(name.rfind(':') + 1);
  rest = rest.substr(0, rest.find('>'));
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), counts[i]);
    if (error != std::errc()) return std::nullopt;
    rest.remove_prefix(static_cast<size_t>(end - rest.data()));
    const bool is_last = i + 1 == counts.size();
    if (is_last ? !rest.empty() : !rest.starts_with('x')) return std::nullopt;
    if (!is_last) rest.remove_prefix(1);
  }
  return counts;
}

/// The definition of a class of Python ops, from a name as "python:module:class:0x1x0x0".
std::shared_ptr<const OpKind> python_kind(std::string_view name) {
  if (!name.starts_with("python:")) return nullptr;
  const auto counts = counts_in(name);
  TORCH_CHECK_VALUE(counts.has_value(), "op: expected the name of a Python op to end in its ",
                    "numbers of operands, such as \":0x1x0x0\", got \"", shown(name),
                    "\". Descriptions are made by the fronts.");
  for (const size_t count : *counts)
    TORCH_CHECK_VALUE(count <= kMostOperands, "op: expected at most ", kMostOperands,
                      " operands of each sort, got ", count, ". Split the op.");
  const auto [extra_inputs, params, extra_outputs, buffers] = *counts;
  const std::string_view ending = name.substr(name.rfind(':') + 1);
  std::vector<at::ScalarType> dtypes =
      dtypes_in(ending.substr(std::min(ending.find('>'), ending.size())));
  TORCH_CHECK_VALUE(dtypes.size() <= 1 + extra_outputs, "op: expected dtypes of at most ",
                    1 + extra_outputs, " results, got ", dtypes.size(),
                    ". Give extra_output_dtypes one entry for each extra output.");
  dtypes.resize(1 + extra_outputs, at::ScalarType::Undefined);
  struct Owner : WithTexts<OpDef> {
    std::optional<OpKind> kind;
  };
  const auto owner = std::make_shared<Owner>();
  OpDef& def = owner->made;
  def.name = owner->text(std::string(name));
  def.formula = "written in Python";
  def.runs_user_code = true;
  def.dtype = DtypeRule::promote;
  def.results[0].dtype = dtypes[0];
  def.parse = parse_python;
  StepDef forward{.name = "forward", .reads = {}, .writes = {}, .run = python_forward},
      backward{
          .name = "backward", .reads = {"grad_y"}, .writes = {"grad_x"}, .run = python_backward};
  for (size_t i = 0; i < extra_inputs; ++i)
    def.inputs.push_back(owner->text("extra" + std::to_string(i)));
  for (size_t i = 0; i < params; ++i)
    def.params.push_back(owner->text("param" + std::to_string(i)));
  def.fixed_params = buffers;
  for (size_t i = 0; i < buffers; ++i)
    def.params.push_back(owner->text("buffer" + std::to_string(i)));
  for (size_t i = 0; i < extra_outputs; ++i) {
    const auto output = owner->text("extra_output" + std::to_string(i));
    def.results.push_back({.name = output, .dtype = dtypes[1 + i]});
    def.extra_outputs.push_back(output);
    backward.reads.push_back(owner->text("grad_" + std::string(output)));
  }
  def.results.push_back({"saved", ResultDef::opaque});
  for (size_t i = 0; i < params; ++i) backward.reads.push_back(def.params[i].name);
  backward.reads.push_back("saved");
  for (size_t i = 0; i < params; ++i)
    backward.writes.push_back(owner->text("grad_" + std::string(def.params[i].name)));
  for (size_t i = 1; i < def.inputs.size(); ++i)
    backward.writes.push_back(owner->text("grad_" + std::string(def.inputs[i])));
  forward.reads = def.inputs;
  for (const ParamDef& param : def.params) forward.reads.push_back(param.name);
  for (const ResultDef& result : def.results) forward.writes.push_back(result.name);
  def.forward = {std::move(forward)};
  def.backward = {std::move(backward)};
  owner->kind.emplace(def);
  return {owner, &*owner->kind};
}

/// The fusion of ops [first, last] that a Python function returned; operands are named by op.
std::shared_ptr<const Fusion> group_fusion(Pass pass, const std::string& name,
                                           const Description& description, size_t first,
                                           size_t last,
                                           const std::shared_ptr<PythonOptions>& options) {
  struct Owner : WithTexts<Fusion> {
    /// The owners of the operands' texts.
    std::vector<std::shared_ptr<const OpKind>> kinds;
  };
  const auto owner = std::make_shared<Owner>();
  owner->kinds = description.kinds;
  Fusion& fusion = owner->made;
  fusion = Fusion{.name = name, .pass = pass, .runs_user_code = true};
  fusion.picture = "written in Python";
  FusedRun ahead{.reads = {{0, "x"}}, .writes = {}, .run = python_forward},
      back{.reads = {}, .writes = {{0, "grad_x"}}, .run = python_backward};
  const auto last_member = static_cast<uint32_t>(last - first);
  ahead.writes.push_back({last_member, description.ops[last].kind->def.results[0].name});
  back.reads.push_back(
      {last_member,
       owner->text("grad_" + std::string(description.ops[last].kind->def.results[0].name))});
  for (size_t op = first; op <= last; ++op)
    options->ops.push_back(
        counts_of(description.ops[op].kind->def, description.ops[op].options.get()));
  const auto each = [&](auto&& visit) {
    for (size_t op = first; op <= last; ++op)
      visit(static_cast<uint32_t>(op - first), description.ops[op].kind->def);
  };
  each([&](uint32_t member, const OpDef& def) {
    for (size_t i = 1; i <= options->ops[member].extra_inputs; ++i)
      ahead.reads.push_back({member, def.inputs[i]});
    for (const auto& output : def.extra_outputs) {
      ahead.writes.push_back({member, output});
      back.reads.push_back({member, owner->text("grad_" + std::string(output))});
    }
  });
  each([&](uint32_t member, const OpDef& def) {
    for (size_t p = 0; p < def.params.size(); ++p) {
      const std::string_view param = def.params[p].name;
      ahead.reads.push_back({member, param});
      if (p + def.fixed_params >= def.params.size()) continue;
      back.reads.push_back({member, param});
      back.writes.push_back({member, owner->text("grad_" + std::string(param))});
    }
  });
  each([&](uint32_t member, const OpDef& def) {
    for (size_t i = 1; i <= options->ops[member].extra_inputs; ++i)
      back.writes.push_back({member, owner->text("grad_" + std::string(def.inputs[i]))});
    const auto keep = [&](std::string_view name) {
      if (pass == Pass::backward) back.reads.push_back({member, name, kAnyStep});
      if (pass == Pass::forward) ahead.writes.push_back({member, name});
    };
    if (def.parse == parse_python) return keep("saved");
    for (const auto& name : def.context) keep(name);
    for (const ResultDef& result : def.results)
      if (pass == Pass::backward && is_shape(result)) back.reads.push_back({member, result.name});
  });
  options->has_contexts = pass != Pass::joint;
  fusion.run = pass == Pass::backward ? back : ahead;
  if (pass == Pass::joint) {
    fusion.backward = back;
    fusion.keeps = {"saved"};
  }
  options->fusion = owner;  // steps hold their options
  return {owner, &fusion};
}

/// Refuses a parameter that is several tensors, as the plan has one value for it.
Refusal refuse_parts(const Description& description, size_t first, size_t last) {
  for (size_t op = first; op <= last && op < description.ops.size(); ++op)
    for (const uint32_t parts : description.ops[op].joins)
      if (parts > 1)
        return "a parameter of op " + std::to_string(op) +
               " is several tensors, which no fusion written in Python takes";
  return std::nullopt;
}

/// Calls runtime.groups(pass, instances, recipe as JSON, joint groups) -> a `Fused` for each group.
std::vector<OpGroup> groups_from_python(Pass pass, const Description& description,
                                        const std::vector<OpGroup>& joint) {
  const py::gil_scoped_acquire gil;
  py::list ops;
  for (const OpNode& op : description.ops) ops.append(op.instance);
  std::vector<OpGroup> groups;
  py::object recipe = py::none();
  if (description.recipe) recipe = py::str(to_json(*description.recipe).dump());
  py::list of_both;
  for (const OpGroup& group : joint)
    of_both.append(held(static_cast<const PythonOptions*>(group.options.get())->fused));
  for (const auto& item : runtime().attr("groups")(pass_name(pass), ops, recipe, of_both)) {
    const auto first = item.attr("first").cast<size_t>(), last = item.attr("last").cast<size_t>();
    const auto name = item.attr("name").cast<std::string>();
    auto refusal = item.attr("refusal").cast<Refusal>();
    if (!refusal) refusal = refuse_parts(description, first, last);
    if (refusal) {
      groups.push_back({first, last, std::make_shared<Fusion>(Fusion{.name = name}), {}, refusal});
      continue;
    }
    auto options = std::make_shared<PythonOptions>();
    options->key = item.attr("key").cast<std::string>();
    options->fused = hold(py::reinterpret_borrow<py::object>(item));
    auto fusion = group_fusion(pass, name, description, first, last, options);
    groups.push_back({first, last, std::move(fusion), std::move(options), std::nullopt});
  }
  return groups;
}

}  // namespace

void bind_python_ops(py::module_& module) {
  module.def("set_runtime", [](py::object object) {
    runtime() = std::move(object);
    set_group_fusions(groups_from_python);
    set_op_source(python_kind);
    set_state_listener([](const at::Tensor& state) {
      const py::gil_scoped_acquire gil;
      runtime().attr("written_in_backward")(state);
    });
  });
  module.def("bump_fusions_version", bump_fusions_version);
}

}  // namespace tandem::bindings
