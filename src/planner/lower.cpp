#include "planner/lower.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "ops/options.h"
#include "planner/glue.h"

namespace tandem {

namespace {

bool is_gradient(std::string_view name) { return name.starts_with("grad_"); }
std::string_view operand_of(std::string_view gradient) { return gradient.substr(5); }

class Lowering {
 public:
  Lowering(const Description& description, const PlanKey& key)
      : description_(description), key_(key), call_(key.call()) {}

  Lowered run() {
    bind_arguments();
    Value x = program_.inputs[0];
    for (size_t i = 0; i < description_.ops.size(); ++i) x = lower_forward(i, x);
    program_.outputs.push_back(x);
    for (size_t i = 0; i < description_.ops.size(); ++i) collect_outputs(i);
    lower_backward();
    return std::move(program_);
  }

 private:
  /// What backward must be derived from, in the order in which forward happened.
  struct Event {
    enum Kind { op, cast, quantize_gradient } kind;
    size_t index = 0;  ///< of the op
    Value from = Value::none, to = Value::none;
  };

  void bind_arguments() {
    const size_t inputs = 1 + description_.extra_input_count(), params = description_.param_count();
    TORCH_CHECK_VALUE(key_.tensor_count() == inputs + params, "pipeline: expected ", inputs,
                      " inputs and ", params, " parameters, got ", key_.tensor_count(),
                      " tensors. Pass the main input and one tensor per unbound extra input.");
    for (size_t i = 0; i < inputs + params; ++i) {
      const auto traits = key_.tensor(i);
      const bool is_input = i < inputs;
      TORCH_CHECK_VALUE(traits.defined, "pipeline: expected a tensor for ",
                        is_input ? "input " : "parameter ", is_input ? i : i - inputs,
                        ", got an undefined one. Pass a tensor.");
      const std::string name = !is_input ? "param " + std::to_string(i - inputs)
                               : i == 0  ? "x"
                                         : "extra " + std::to_string(i - 1);
      const Value value =
          program_.add({traits.dtype, Format::plain, is_input ? Origin::input : Origin::param,
                        Value::none, name});
      program_.requires_grad.back() = traits.requires_grad;
      (is_input ? program_.inputs : program_.params).push_back(value);
    }
    for (size_t i = 0; i < description_.ops.size(); ++i)
      for (size_t p = 0; p < description_.ops[i].params.size(); ++p)
        program_.types[index_of(program_.params[description_.ops[i].params[p]])].name =
            description_.ops[i].label + "." + std::string(description_.ops[i].def->params[p]);
    program_.operands.resize(description_.ops.size());
  }

  Type result_type(at::ScalarType dtype, std::string name, Format format = Format::plain) {
    return {dtype, format, Origin::result, Value::none, std::move(name)};
  }
  at::ScalarType dtype_of(Value value) const { return program_.types[index_of(value)].dtype; }
  const std::string& name_of(Value value) const { return program_.types[index_of(value)].name; }
  bool needs_grad(Value value) const {
    return exists(value) && program_.requires_grad[index_of(value)];
  }

  Value cast(Value value, at::ScalarType dtype) {
    if (dtype_of(value) == dtype) return value;
    const auto known = casts_.find({value, dtype});
    if (known != casts_.end()) return known->second;
    const Value result =
        program_.add(result_type(dtype, name_of(value) + " as " + c10::toString(dtype)));
    program_.requires_grad[index_of(result)] = needs_grad(value);
    program_.forward.push_back(cast_step(value, result));
    events_.push_back({Event::cast, 0, value, result});
    uncast_[result] = value;
    return casts_[{value, dtype}] = result;
  }

  /// The dtype in which an op computes; its operands are cast to it, unless they promote.
  at::ScalarType compute_dtype(const OpNode& op, Value x) const {
    if (op.def->dtype == DtypeRule::promote) return dtype_of(x);
    if (call_.autocast_dtype != at::ScalarType::Undefined && dtype_of(x) != at::kDouble)
      return call_.autocast_dtype;
    return op.def->dtype == DtypeRule::weight ? dtype_of(program_.params[op.params[0]])
                                              : dtype_of(x);
  }

  Value lower_forward(size_t index, Value x) {
    const OpNode& op = description_.ops[index];
    const OpDef& def = *op.def;
    OperandTable& names = program_.operands[index];
    if (def.training_only && !description_.training) {
      names.bind("x", x);
      names.bind("y", x);
      return x;
    }
    if (!def.has_composite && program_.no_composite.empty()) program_.no_composite = op.label;
    program_.runs_user_code |= def.runs_user_code;
    at::ScalarType dtype = compute_dtype(op, x);
    const bool casts = def.dtype != DtypeRule::promote;
    names.bind("x", casts ? cast(x, dtype) : x);
    bool any_grad = needs_grad(x);
    for (size_t slot = 0; slot < op.extra_inputs.size(); ++slot) {
      const Value extra = extra_input(op.extra_inputs[slot]);
      names.bind(def.inputs[slot + 1], casts ? cast(extra, dtype) : extra);
      any_grad |= needs_grad(extra);
      if (!casts) dtype = c10::promoteTypes(dtype, dtype_of(extra));
    }
    for (size_t p = 0; p < op.params.size(); ++p) {
      Value param = program_.params[op.params[p]];
      // Under autocast a bias follows the sum it is added to, as torch.nn.Linear's does; elsewhere it promotes.
      if (casts || call_.autocast_dtype != at::ScalarType::Undefined) param = cast(param, dtype);
      names.bind(def.params[p], param);
      any_grad |= needs_grad(param);
      if (!casts) dtype = c10::promoteTypes(dtype, dtype_of(param));
    }
    bind_results(op, names, dtype, any_grad);
    if (def.name == "quantize") quantize_op(op, names, index);
    if (def.forward != nullptr) program_.forward.push_back(forward_step(index));
    events_.push_back({Event::op, index, Value::none, Value::none});
    for (size_t slot = 0; slot < op.extra_outputs.size(); ++slot)
      if (!op.extra_outputs[slot].channel.empty())
        channels_[op.extra_outputs[slot].channel] = names.find(def.extra_outputs[slot]);
    return names.find(def.results[0].name);
  }

  Value extra_input(const Binding& binding) {
    if (!binding.channel.empty()) return channels_.at(binding.channel);
    return program_.inputs[++next_extra_];
  }

  void bind_results(const OpNode& op, OperandTable& names, at::ScalarType dtype, bool any_grad) {
    for (const ResultDef& result : op.def->results) {
      const auto same = std::find_if(op.def->same.begin(), op.def->same.end(),
                                     [&](const Same& s) { return s.name == result.name; });
      if (same != op.def->same.end()) {
        names.bind(result.name, names.find(same->operand));
        continue;
      }
      Type type = result_type(dtype, op.label + "." + std::string(result.name));
      switch (result.kind) {
        case ResultDef::computed:
          break;
        case ResultDef::statistic:
          type.dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
          break;
        case ResultDef::seed:
          type.dtype = at::kLong;
          break;
        case ResultDef::shape:
          type.format = Format::shape;
          break;
        case ResultDef::opaque:
          type.format = Format::opaque;
          break;
      }
      if (result.name == op.def->results[0].name) {
        if (op.def->views_input) type.view_of = names.find("x");
        if (writes_caller(op)) type.view_of = names.find(op.def->inputs[1]);
      }
      const Value value = program_.add(std::move(type));
      program_.requires_grad[index_of(value)] =
          any_grad && result.kind == ResultDef::computed && c10::isFloatingType(dtype);
      names.bind(result.name, value);
      if (result.kind == ResultDef::seed)
        program_.forward.push_back(seed_step(program_.inputs[0], value));
    }
  }

  /// in_place on a caller's tensor is a command; on a channel's value it is a permission that nobody needs to use.
  bool writes_caller(const OpNode& op) const {
    return op.in_place && !call_.traced && op.def->forward_in_place != nullptr &&
           op.extra_inputs[0].channel.empty();
  }

  Step forward_step(size_t index) {
    const OpNode& op = description_.ops[index];
    const OpDef& def = *op.def;
    const OperandTable& names = program_.operands[index];
    Step step;
    step.kind = def.name;
    step.family = def.family;
    step.run = def.forward;
    step.covers = {{static_cast<uint16_t>(index), 0}};
    step.options = {op.options};
    step.runs_user_code = def.runs_user_code;
    step.read_names = def.inputs;
    step.read_names.insert(step.read_names.end(), def.params.begin(), def.params.end());
    for (const ResultDef& result : def.results) {
      if (result.kind == ResultDef::seed) {
        step.read_names.push_back(result.name);
      } else if (std::none_of(def.same.begin(), def.same.end(),
                              [&](const Same& s) { return s.name == result.name; })) {
        step.write_names.push_back(result.name);
      }
    }
    for (const auto& name : step.read_names)
      step.reads.push_back(operand(index, name, program_.forward, forward_codes_));
    for (const auto& name : step.write_names) step.writes.push_back(names.find(name));
    if (writes_caller(op)) {
      step.kind = std::string(def.name) + ".in_place";
      step.run = def.forward_in_place;
      step.mutates = {names.find(def.inputs[1])};
    }
    return step;
  }

  /// The value an op reads under a name: quantized where the recipe has a point there, written by a step put into `steps`.
  Value operand(size_t index, std::string_view name, Steps& steps,
                std::map<std::pair<Value, Format>, Value>& codes, Value plain = Value::none) {
    const OpNode& op = description_.ops[index];
    if (!exists(plain)) plain = program_.operands[index].find(name);
    const auto role = std::find_if(op.def->roles.begin(), op.def->roles.end(),
                                   [&](const RoleOf& r) { return r.operand == name; });
    if (!description_.recipe || role == op.def->roles.end() || !exists(plain)) return plain;
    TORCH_CHECK_NOT_IMPLEMENTED(dtype_of(plain) != at::kDouble, op.label,
                                ": expected float32, bfloat16 or float16 under a recipe, got ",
                                "float64. Leave the autocast region or convert the module.");
    if (role->role ==
        Role::
            weight) {  // from the parameter as it is: a copy in autocast's dtype would round twice
      if (const auto original = uncast_.find(plain); original != uncast_.end())
        plain = original->second;
      if (description_.cache_weights) return weight_codes(plain, steps, codes);
    }
    return quantized(plain, role->role, steps, codes);
  }

  Value quantized(Value plain, Role role, Steps& steps,
                  std::map<std::pair<Value, Format>, Value>& codes) {
    const QuantizePoint point = quantize_point(*description_.recipe, role);
    if (const auto known = forward_codes_.find({plain, point.format});
        known != forward_codes_.end())
      return known->second;
    if (const auto known = codes.find({plain, point.format}); known != codes.end())
      return known->second;
    const Value result = program_.add(result_type(
        dtype_of(plain), name_of(plain) + " in " + tandem::name_of(point.format), point.format));
    steps.push_back(quantize_step(plain, result, point));
    return codes[{plain, point.format}] = result;
  }

  /// Codes of a weight in its workspace. Backward asks for them again rather than keep what the next forward may overwrite.
  Value weight_codes(Value weight, Steps& steps, std::map<std::pair<Value, Format>, Value>& codes) {
    const QuantizePoint point = quantize_point(*description_.recipe, Role::weight);
    if (const auto known = codes.find({weight, point.format}); known != codes.end())
      return known->second;
    auto& workspace = workspaces_[weight];
    if (workspace.empty()) {
      program_.workspace_weights.push_back(weight);
      for (const char* part : {"codes", "dequant_scale", "amax", "stamp"}) {
        const at::ScalarType dtype = workspace.empty()       ? at::kByte
                                     : workspace.size() == 3 ? at::kLong
                                                             : at::kFloat;
        workspace.push_back(program_.add(
            {dtype, Format::plain, Origin::workspace, Value::none, name_of(weight) + "." + part}));
        program_.workspaces.push_back(workspace.back());
      }
    }
    const Value result = program_.add(result_type(
        dtype_of(weight), name_of(weight) + " in " + tandem::name_of(point.format), point.format));
    steps.push_back(refresh_weight_step(weight, workspace, result, point,
                                        /*backward=*/&steps == &program_.backward));
    return codes[{weight, point.format}] = result;
  }

  /// The op `quantize`: y is the decoded x, and its codes are there for products that follow.
  void quantize_op(const OpNode& op, OperandTable& names, size_t index) {
    const auto& options = *static_cast<const ops::QuantizeOptions*>(op.options.get());
    if (!description_.recipe || !c10::isFloatingType(dtype_of(names.find("x")))) return;
    Value y = names.find("x");
    if (options.forward) {
      const Value codes = quantized(y, Role::input, program_.forward, forward_codes_);
      const bool grad = needs_grad(y);
      const Value x = y;
      y = program_.add(result_type(dtype_of(x), op.label + ".y"));
      program_.requires_grad[index_of(y)] = grad;
      program_.forward.push_back(dequantize_step(codes, y));
      forward_codes_[{y, program_.types[index_of(codes)].format}] = codes;
      events_.push_back({Event::cast, index, x, y});
    }
    if (options.backward) {
      const Value x = y;
      Type type = result_type(dtype_of(x), op.label + ".y");
      type.view_of = x;
      y = program_.add(std::move(type));
      program_.requires_grad[index_of(y)] = needs_grad(x);
      program_.forward.push_back(rename_step(x, y));
      for (const Format format : {Format::fp8_e4m3, Format::fp8_e5m2})
        if (const auto codes = forward_codes_.find({x, format}); codes != forward_codes_.end())
          forward_codes_[{y, format}] = codes->second;
      events_.push_back({Event::quantize_gradient, index, x, y});
    }
    names.bind("y", y);
  }

  void collect_outputs(size_t index) {
    const OpNode& op = description_.ops[index];
    for (size_t slot = 0; slot < op.extra_outputs.size(); ++slot)
      if (op.extra_outputs[slot].channel.empty() || op.extra_outputs[slot].to_caller)
        program_.outputs.push_back(program_.operands[index].find(op.def->extra_outputs[slot]));
  }

  // ---- backward ----

  void lower_backward() {
    for (const Value output : program_.outputs) {
      Value gradient = Value::none;
      if (needs_grad(output)) {
        gradient = program_.add({dtype_of(output), Format::plain, Origin::gradient, Value::none,
                                 "grad of " + name_of(output)});
        contribute(output, gradient);
      }
      program_.output_gradients.push_back(gradient);
    }
    for (auto event = events_.rbegin(); event != events_.rend(); ++event) {
      if (event->kind == Event::op) {
        lower_backward_of(event->index);
      } else if (const Value gradient = gradient_of(event->to);
                 exists(gradient) && needs_grad(event->from)) {
        if (event->kind == Event::cast) {
          contribute(event->from, gradient);
        } else {
          const Value codes =
              quantized(gradient, Role::grad_output, program_.backward, backward_codes_);
          const Value decoded = gradient_value(event->from);
          program_.backward.push_back(dequantize_step(codes, decoded));
          backward_codes_[{decoded, program_.types[index_of(codes)].format}] = codes;
          contribute(event->from, decoded);
        }
      }
    }
    for (const Value input : program_.inputs)
      program_.gradients.push_back(needs_grad(input) ? gradient_of(input) : Value::none);
    for (const Value param : program_.params)
      program_.gradients.push_back(needs_grad(param) ? gradient_of(param) : Value::none);
    for (size_t i = 0; i < description_.ops.size(); ++i) bind_gradients_of_renames(i);
  }

  /// Groups of ops look up the gradients of operands that no step of the op writes, too.
  void bind_gradients_of_renames(size_t index) {
    static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
        {"x", "grad_x"}, {"y", "grad_y"}, {"extra", "grad_extra"}};
    OperandTable& names = program_.operands[index];
    for (const auto& [operand, gradient] : kNames) {
      const auto contributed = contributions_.find(names.find(operand));
      if (!exists(names.find(gradient)) && contributed != contributions_.end() &&
          contributed->second.size() == 1)
        names.bind(gradient, contributed->second[0]);
    }
  }

  Value gradient_value(Value of) {
    return program_.add(
        {dtype_of(of), Format::plain, Origin::gradient, Value::none, "grad of " + name_of(of)});
  }

  void contribute(Value to, Value gradient) {
    if (dtype_of(to) != dtype_of(gradient)) {
      const Value converted = gradient_value(to);
      program_.backward.push_back(cast_step(gradient, converted));
      gradient = converted;
    }
    contributions_[to].push_back(gradient);
  }

  /// The sum of all that has been contributed; `add` steps where there are several.
  Value gradient_of(Value value) {
    auto& contributed = contributions_[value];
    while (contributed.size() > 1) {
      const Value b = contributed.back();
      contributed.pop_back();
      const Value a = contributed.back();
      contributed.back() = gradient_value(value);
      program_.backward.push_back(add_step(a, b, contributed.back()));
    }
    return contributed.empty() ? Value::none : contributed[0];
  }

  void lower_backward_of(size_t index) {
    const OpNode& op = description_.ops[index];
    const OpDef& def = *op.def;
    OperandTable& names = program_.operands[index];
    std::map<std::string_view, Value> given;
    bool any = false;
    for (const ResultDef& result : def.results) {
      const bool renamed = std::any_of(def.same.begin(), def.same.end(),
                                       [&](const Same& s) { return s.name == result.name; });
      if (result.kind != ResultDef::computed || renamed) continue;
      const Value value = names.find(result.name);
      given[result.name] = needs_grad(value) ? gradient_of(value) : Value::none;
      any |= exists(given[result.name]);
    }
    if (!any) return;
    // "grad_y" of a result named y: the key lives as long as the definition, so the name of a read or of an operand serves.
    for (const BackwardStepDef& step : def.backward)
      for (const auto& name : step.reads)
        if (is_gradient(name) && given.count(operand_of(name)) != 0)
          names.bind(name, given[operand_of(name)]);
    for (const Same& same : def.same_gradients) {
      const Value operand = names.find(operand_of(same.name));
      const auto gradient = given.find(operand_of(same.operand));
      if (needs_grad(operand) && gradient != given.end() && exists(gradient->second))
        contribute(operand, gradient->second);
    }
    for (size_t nth = 0; nth < def.backward.size(); ++nth) {
      const BackwardStepDef& step_def = def.backward[nth];
      Step step;
      step.kind = std::string(def.name) + "." + std::string(step_def.name);
      step.family =
          def.family.empty() ? "" : std::string(def.family) + "." + std::string(step_def.name);
      step.run = step_def.run;
      step.covers = {{static_cast<uint16_t>(index), static_cast<uint16_t>(nth + 1)}};
      step.options = {op.options};
      step.runs_user_code = def.runs_user_code;
      step.read_names = step_def.reads;
      step.write_names = step_def.writes;
      bool wanted = false;
      for (const auto& name : step_def.writes) {
        if (!is_gradient(
                name)) {  // a result that the step can write again; the planner decides whether it shall
          step.writes.push_back(names.find(name));
          continue;
        }
        const Value of = names.find(operand_of(name));
        step.writes.push_back(needs_grad(of) ? gradient_value(of) : Value::none);
        names.bind(name, step.writes.back());
        wanted |= exists(step.writes.back());
      }
      if (!wanted) continue;
      for (const auto& name : step_def.reads) {
        Value value = names.find(name);
        if (is_gradient(name))
          value = given.count(operand_of(name)) != 0 ? given[operand_of(name)] : Value::none;
        step.reads.push_back(exists(value)
                                 ? operand(index, name, program_.backward, backward_codes_, value)
                                 : Value::none);
      }
      for (size_t w = 0; w < step.writes.size(); ++w)
        if (is_gradient(step_def.writes[w]) && exists(step.writes[w]))
          pending_.emplace_back(names.find(operand_of(step_def.writes[w])), step.writes[w]);
      program_.backward.push_back(std::move(step));
      for (const auto& [to, gradient] : pending_) contribute(to, gradient);
      pending_.clear();
    }
  }

  const Description& description_;
  const PlanKey& key_;
  const PlanKey::Call call_;
  Lowered program_;
  std::vector<Event> events_;
  std::map<std::string, Value> channels_;
  std::map<std::pair<Value, at::ScalarType>, Value> casts_;
  std::map<std::pair<Value, Format>, Value> forward_codes_, backward_codes_;
  std::map<Value, Value> uncast_;
  std::map<Value, Values> workspaces_;
  std::map<Value, Values> contributions_;
  std::vector<std::pair<Value, Value>> pending_;
  size_t next_extra_ = 0;
};

}  // namespace

Lowered lower(const Description& description, const PlanKey& key) {
  return Lowering(description, key).run();
}

}  // namespace tandem
