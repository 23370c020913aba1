#include "planner/lower.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "kernel_ops/checks.h"
#include "kernel_ops/kernel_op.h"
#include "ops/options.h"
#include "planner/glue.h"

namespace tandem {

namespace {

class Lowering {
 public:
  Lowering(const Description& description, const PlanKey& key)
      : description_(description), key_(key), call_(key.call()) {}

  Lowered run() {
    bind_arguments();
    Flow x = inputs_[0];
    for (size_t i = 0; i < description_.ops.size(); ++i) x = lower_forward(i, x);
    add_output(x);
    for (size_t i = 0; i < description_.ops.size(); ++i) collect_outputs(i);
    lower_backward();
    return std::move(program_);
  }

 private:
  /// What backward must be derived from, in the order in which forward happened.
  struct Event {
    enum Kind { op, cast, quantize_gradient } kind;
    size_t index = 0;  ///< of the op, or npos for a cast of an operand
    Flow from = {}, to = {};
  };

  void bind_arguments() {
    const size_t inputs = 1 + description_.extra_input_count(), params = description_.param_count();
    TORCH_CHECK_VALUE(key_.input_count() == inputs && key_.tensor_count() == inputs + params,
                      "pipeline: expected ", inputs, " inputs and ", params, " parameters, got ",
                      key_.input_count(), " and ", key_.tensor_count() - key_.input_count(),
                      ". Pass the main input and one tensor per unbound extra input.");
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
      (is_input ? inputs_ : params_).push_back(new_flow(value));
    }
    for (size_t i = 0; i < description_.ops.size(); ++i)
      for (size_t p = 0; p < description_.ops[i].params.size(); ++p)
        program_.types[index_of(program_.params[description_.ops[i].params[p]])].name =
            description_.ops[i].label + "." + std::string(description_.ops[i].def->params[p]);
    for (const OpNode& op : description_.ops) program_.operands.emplace_back(op.def);
  }

  Flow new_flow(Value value) {
    contributions_.emplace_back();
    return {value, contributions_.size() - 1};
  }

  Type result_type(at::ScalarType dtype, std::string name, Format format = Format::plain) {
    return {dtype, format, Origin::result, Value::none, std::move(name)};
  }
  at::ScalarType dtype_of(Value value) const { return program_.types[index_of(value)].dtype; }
  const std::string& name_of(Value value) const { return program_.types[index_of(value)].name; }
  bool needs_grad(Value value) const {
    return exists(value) && program_.requires_grad[index_of(value)];
  }

  Flow cast(Flow from, at::ScalarType dtype, const OpNode& op) {
    const Value value = from.value;
    if (dtype_of(value) == dtype) return from;
    const auto known = casts_.find({value, dtype});
    if (known != casts_.end()) return known->second;
    TORCH_CHECK_TYPE(c10::canCast(dtype_of(value), dtype), op.label, ": expected ", name_of(value),
                     " that converts to ", dtype_name(dtype), ", in which the op computes, got ",
                     dtype_name(dtype_of(value)),
                     ". Convert it before the call, or convert the module.");
    check_differentiable(needs_grad(value), dtype, op);
    const Flow result =
        new_flow(program_.add(result_type(dtype, name_of(value) + " as " + c10::toString(dtype))));
    program_.requires_grad[index_of(result.value)] = needs_grad(value);
    program_.forward.push_back(cast_step(value, result.value));
    events_.push_back({Event::cast, npos, from, result});
    uncast_[result.value] = value;
    return casts_[{value, dtype}] = result;
  }

  /// A gradient that is asked for must be one that we have: no formula here conjugates, and numbers that are not real have none.
  static void check_differentiable(bool any_grad, at::ScalarType dtype, const OpNode& op) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !any_grad || c10::isFloatingType(dtype), op.label,
        ": expected floating-point operands where gradients are needed, got ", dtype_name(dtype),
        ". Convert them, call under torch.no_grad(), or use torch.nn modules.");
  }

  /// The dtype in which an op computes; its operands are cast to it, unless they promote.
  at::ScalarType compute_dtype(const OpNode& op, Value x) const {
    if (op.def->dtype == DtypeRule::promote) return dtype_of(x);
    if (op.def->dtype == DtypeRule::promote_number)
      return c10::isIntegralType(dtype_of(x), /*includeBool=*/true)
                 ? c10::get_default_dtype_as_scalartype()
                 : dtype_of(x);
    if (call_.autocast_dtype != at::ScalarType::Undefined && dtype_of(x) != at::kDouble)
      return call_.autocast_dtype;
    return op.def->dtype == DtypeRule::weight ? dtype_of(program_.params[op.params[0]])
                                              : dtype_of(x);
  }

  Flow lower_forward(size_t index, Flow x) {
    const OpNode& op = description_.ops[index];
    const OpDef& def = *op.def;
    OperandTable& names = program_.operands[index];
    if (is_skipped(op)) {
      const Flow y = new_flow(x.value);
      names.bind(def.inputs[0], x);
      names.bind(def.results[0].name, y);
      events_.push_back({Event::op, index});
      return y;
    }
    if (!def.has_composite && program_.no_composite.empty()) program_.no_composite = op.label;
    program_.runs_user_code |= def.runs_user_code;
    at::ScalarType dtype = compute_dtype(op, x.value);
    const bool casts = def.dtype == DtypeRule::weight || def.dtype == DtypeRule::input;
    names.bind(def.inputs[0], casts ? cast(x, dtype, op) : x);
    bool any_grad = needs_grad(x.value);
    for (size_t slot = 0; slot < op.extra_inputs.size(); ++slot) {
      const Flow extra = extra_input(op.extra_inputs[slot]);
      names.bind(def.inputs[slot + 1], casts ? cast(extra, dtype, op) : extra);
      any_grad |= needs_grad(extra.value);
      if (!casts) dtype = c10::promoteTypes(dtype, dtype_of(extra.value));
    }
    for (size_t p = 0; p < op.params.size(); ++p) {
      Flow param = params_[op.params[p]];
      // Under autocast a bias follows the sum it is added to, as torch.nn.Linear's does; elsewhere it promotes.
      const bool follows =
          call_.autocast_dtype != at::ScalarType::Undefined && c10::isFloatingType(dtype);
      const bool is_buffer = p + def.buffers >= op.params.size();
      if ((casts || follows) && !is_buffer) param = cast(param, dtype, op);
      names.bind(def.params[p], param);
      any_grad |= needs_grad(param.value);
      if (!casts && !is_buffer) dtype = c10::promoteTypes(dtype, dtype_of(param.value));
    }
    const at::ScalarType target = result_dtype(op, names, dtype);
    if (writes_caller(op)) dtype = target;
    if (def.forward != nullptr && !def.runs_user_code) check_differentiable(any_grad, dtype, op);
    bind_results(op, names, dtype, any_grad);
    if (def.is_quantize_point) quantize_op(op, names, index);
    if (def.forward != nullptr) program_.forward.push_back(forward_step(index));
    events_.push_back({Event::op, index});
    const Flow y = names.flow(def.results[0].name);
    for (size_t slot = 0; slot < op.extra_outputs.size(); ++slot)
      if (!op.extra_outputs[slot].channel.empty())
        channels_[op.extra_outputs[slot].channel] = names.flow(def.extra_outputs[slot]);
    return target == dtype ? y : cast(y, target, op);
  }

  /// In evaluation y is x.
  bool is_skipped(const OpNode& op) const {
    return op.def->training_only && !description_.training;
  }

  Flow extra_input(const Binding& binding) {
    if (!binding.channel.empty()) return channels_.at(binding.channel);
    return inputs_[++next_extra_];
  }

  /// The dtype of y: where the user asked for a sum in the caller's tensor it is that tensor's, traced or not, as for torch's add_.
  at::ScalarType result_dtype(const OpNode& op, const OperandTable& names,
                              at::ScalarType dtype) const {
    if (!op.writes_caller()) return dtype;
    const at::ScalarType target = dtype_of(names.value(op.def->inputs[1]));
    TORCH_CHECK_TYPE(c10::canCast(dtype, target), op.label, ": expected an extra input that holds ",
                     dtype, ", as in_place=True asks, got ", target,
                     ". Use in_place=False, or convert it.");
    return target;
  }

  void bind_results(const OpNode& op, OperandTable& names, at::ScalarType dtype, bool any_grad) {
    for (const ResultDef& result : op.def->results) {
      const auto same = std::find_if(op.def->same.begin(), op.def->same.end(),
                                     [&](const Same& s) { return s.name == result.name; });
      if (same != op.def->same.end()) {
        names.bind(result.name, new_flow(names.value(same->operand)));
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
        if (op.def->views_input) type.view_of = names.value(op.def->inputs[0]);
        if (writes_caller(op)) type.view_of = names.value(op.def->inputs[1]);
      }
      const Value value = program_.add(std::move(type));
      program_.requires_grad[index_of(value)] =
          any_grad && result.kind == ResultDef::computed &&
          (c10::isFloatingType(dtype) || c10::isComplexType(dtype));
      names.bind(result.name, new_flow(value));
      if (result.kind == ResultDef::seed)
        program_.forward.push_back(seed_step(program_.inputs[0], value));
    }
  }

  /// What is traced writes nothing.
  bool writes_caller(const OpNode& op) const { return op.writes_caller() && !call_.traced; }

  Step forward_step(size_t index) {
    const OpNode& op = description_.ops[index];
    const OpDef& def = *op.def;
    const OperandTable& names = program_.operands[index];
    Step step;
    step.name = def.name;
    step.family = def.family;
    step.run = def.forward;
    step.covers = {{static_cast<uint32_t>(index), 0}};
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
    for (const auto& name : step.write_names) step.writes.push_back(names.value(name));
    step.main_write = position(step.write_names, def.results[0].name);
    if (writes_caller(op)) {
      step.name = std::string(def.name) + ".in_place";
      step.run = def.forward_in_place;
      step.mutates = {names.value(def.inputs[1])};
    }
    return step;
  }

  /// The value an op reads under a name: quantized where the recipe has a point there, written by a step put into `steps`.
  Value operand(size_t index, std::string_view name, Steps& steps,
                std::map<std::pair<Value, Format>, Value>& codes, Value plain = Value::none) {
    const OpNode& op = description_.ops[index];
    if (!exists(plain)) plain = program_.operands[index].value(name);
    const auto role = std::find_if(op.def->roles.begin(), op.def->roles.end(),
                                   [&](const RoleOf& r) { return r.operand == name; });
    if (!description_.recipe || role == op.def->roles.end() || !exists(plain)) return plain;
    TORCH_CHECK_NOT_IMPLEMENTED(kernel_ops::kArithmetic.has(dtype_of(plain)), op.label,
                                ": expected float32, bfloat16 or float16 under a recipe, got ",
                                dtype_name(dtype_of(plain)),
                                ". Leave the autocast region or convert the module.");
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
    Flow y = names.flow(op.def->inputs[0]);
    if (!description_.recipe || !c10::isFloatingType(dtype_of(y.value))) return;
    if (!options.forward && !options.backward) return;  // y stays the rename that it is
    if (options.forward) {
      const Value codes = quantized(y.value, Role::input, program_.forward, forward_codes_);
      const Flow x = y;
      y = new_flow(program_.add(result_type(dtype_of(x.value), op.label + ".y")));
      program_.requires_grad[index_of(y.value)] = needs_grad(x.value);
      program_.forward.push_back(dequantize_step(codes, y.value));
      forward_codes_[{y.value, program_.types[index_of(codes)].format}] = codes;
      events_.push_back({Event::cast, index, x, y});
    }
    if (options.backward) {
      const Flow x = y;
      Type type = result_type(dtype_of(x.value), op.label + ".y");
      type.view_of = x.value;
      y = new_flow(program_.add(std::move(type)));
      program_.requires_grad[index_of(y.value)] = needs_grad(x.value);
      program_.forward.push_back(rename_step(x.value, y.value));
      for (const Format format : {Format::fp8_e4m3, Format::fp8_e5m2})
        if (const auto codes = forward_codes_.find({x.value, format});
            codes != forward_codes_.end())
          forward_codes_[{y.value, format}] = codes->second;
      events_.push_back({Event::quantize_gradient, index, x, y});
    }
    names.bind(op.def->results[0].name, y);
  }

  void add_output(Flow output) {
    program_.outputs.push_back(output.value);
    outputs_.push_back(output);
  }

  void collect_outputs(size_t index) {
    const OpNode& op = description_.ops[index];
    for (size_t slot = 0; slot < op.extra_outputs.size(); ++slot)
      if (op.extra_outputs[slot].channel.empty() || op.extra_outputs[slot].to_caller)
        add_output(program_.operands[index].flow(op.def->extra_outputs[slot]));
  }

  // ---- backward ----

  void lower_backward() {
    for (const Flow& output : outputs_) {
      Value gradient = Value::none;
      if (needs_grad(output.value)) {
        gradient = gradient_value(output.value);
        contribute(output, gradient);
      }
      program_.output_gradients.push_back(gradient);
    }
    for (auto event = events_.rbegin(); event != events_.rend(); ++event)
      event->kind == Event::op ? lower_backward_of(event->index) : lower_backward_of(*event);
    for (const Flow& input : inputs_)
      program_.gradients.push_back(needs_grad(input.value) ? gradient_of(input) : Value::none);
    for (const Flow& param : params_)
      program_.gradients.push_back(needs_grad(param.value) ? gradient_of(param) : Value::none);
  }

  /// Of a cast, and of a point that quantizes gradients.
  void lower_backward_of(const Event& event) {
    Value gradient = gradient_of(event.to);
    if (!exists(gradient) || !needs_grad(event.from.value)) return;
    if (event.kind == Event::quantize_gradient) {
      const Value codes =
          quantized(gradient, Role::grad_output, program_.backward, backward_codes_);
      gradient = gradient_value(event.from.value);
      program_.backward.push_back(dequantize_step(codes, gradient));
      backward_codes_[{gradient, program_.types[index_of(codes)].format}] = codes;
    }
    contribute(event.from, gradient);
    if (event.index != npos)  // of the points of one op, the first comes last
      program_.operands[event.index].bind_written(description_.ops[event.index].def->inputs[0],
                                                  gradient);
  }

  Value gradient_value(Value of) {
    return program_.add(
        {dtype_of(of), Format::plain, Origin::gradient, Value::none, "grad of " + name_of(of)});
  }

  void contribute(Flow to, Value gradient) {
    if (dtype_of(to.value) != dtype_of(gradient)) {
      const Value converted = gradient_value(to.value);
      program_.backward.push_back(cast_step(gradient, converted));
      gradient = converted;
    }
    contributions_[to.edge].push_back(gradient);
  }

  /// The sum of gradients of `of`; `add` steps where there are several.
  Value sum_of(Values& gradients, Value of) {
    while (gradients.size() > 1) {
      const Value b = gradients.back();
      gradients.pop_back();
      const Value a = gradients.back();
      gradients.back() = gradient_value(of);
      program_.backward.push_back(add_step(a, b, gradients.back()));
    }
    return gradients.empty() ? Value::none : gradients[0];
  }
  Value gradient_of(Flow flow) {
    return exists(flow.value) ? sum_of(contributions_[flow.edge], flow.value) : Value::none;
  }

  /// Results of an op that are an operand.
  std::vector<Same> renames_of(size_t index) const {
    const OpNode& op = description_.ops[index];
    if (is_skipped(op)) return {{op.def->results[0].name, op.def->inputs[0]}};
    std::vector<Same> renames;
    for (const Same& same : op.def->same)  // a quantize point may have made a value of its own
      if (program_.operands[index].value(same.name) == program_.operands[index].value(same.operand))
        renames.push_back(same);
    return renames;
  }

  void lower_backward_of(size_t index) {
    const OpNode& op = description_.ops[index];
    const OpDef& def = *op.def;
    OperandTable& names = program_.operands[index];
    bool any = false;
    for (const ResultDef& result : def.results) {
      if (result.kind != ResultDef::computed) continue;
      const Flow flow = names.flow(result.name);
      const Value gradient = needs_grad(flow.value) ? gradient_of(flow) : Value::none;
      names.bind_given(result.name, gradient);
      any |= exists(gradient);
    }
    if (!any) return;
    std::vector<std::pair<std::string_view, Value>> written;  // by operand
    const auto renames = renames_of(index);
    const auto is_same = [&](std::string_view result) {
      return std::any_of(def.same.begin(), def.same.end(),
                         [&](const Same& same) { return same.name == result; });
    };
    for (const Same& rename : renames)
      written.emplace_back(rename.operand, names.given(rename.name));
    if (!is_skipped(op)) {
      for (const Same& same : def.same_gradients) {
        const auto operand = backward_write(def, same.name),
                   result = backward_read(def, same.operand);
        if (!is_same(result->name)) written.emplace_back(operand->name, names.given(result->name));
      }
      for (size_t nth = 0; nth < def.backward.size(); ++nth) lower_step(index, nth, written);
    }
    std::map<std::string_view, Values> sums;
    for (const auto& [operand, gradient] : written)
      if (exists(gradient) && needs_grad(names.value(operand))) sums[operand].push_back(gradient);
    for (const auto& [operand, gradient] : written) {  // in this order, each operand once
      const auto found = sums.find(operand);
      if (found == sums.end()) continue;
      const Flow to = names.flow(operand);
      names.bind_written(operand, sum_of(found->second, to.value));
      contribute(to, names.written(operand));
      sums.erase(found);
    }
  }

  /// One step of an op's backward, unless it writes no gradient that is needed.
  void lower_step(size_t index, size_t nth,
                  std::vector<std::pair<std::string_view, Value>>& written) {
    const OpNode& op = description_.ops[index];
    const OpDef& def = *op.def;
    const OperandTable& names = program_.operands[index];
    const BackwardStepDef& step_def = def.backward[nth];
    Step step;
    step.main_read = step.main_write = npos;
    bool wanted = false;
    for (const auto& name : step_def.writes) {
      const auto ref = backward_write(def, name);
      const Value of = names.value(ref->name);
      if (!ref->is_gradient) {  // a result written again; the planner decides whether it shall be
        step.writes.push_back(of);
        continue;
      }
      if (ref->name == def.inputs[0]) step.main_write = step.writes.size();
      step.writes.push_back(needs_grad(of) ? gradient_value(of) : Value::none);
      if (exists(step.writes.back())) written.emplace_back(ref->name, step.writes.back());
      wanted |= exists(step.writes.back());
    }
    if (!wanted) return;
    step.name = std::string(def.name) + "." + std::string(step_def.name);
    if (!def.family.empty())
      step.family = std::string(def.family) + "." + std::string(step_def.name);
    step.run = step_def.run;
    step.covers = {{static_cast<uint32_t>(index), static_cast<uint32_t>(nth + 1)}};
    step.options = {op.options};
    step.runs_user_code = def.runs_user_code;
    step.read_names = step_def.reads;
    step.write_names = step_def.writes;
    for (const auto& name : step_def.reads) {
      const auto ref = backward_read(def, name);
      if (ref->is_gradient && ref->name == def.results[0].name) step.main_read = step.reads.size();
      const Value value = ref->is_gradient ? names.given(ref->name) : names.value(ref->name);
      step.reads.push_back(exists(value)
                               ? operand(index, name, program_.backward, backward_codes_, value)
                               : Value::none);
    }
    program_.backward.push_back(std::move(step));
  }

  const Description& description_;
  const PlanKey& key_;
  const PlanKey::Call call_;
  Lowered program_;
  std::vector<Event> events_;
  std::vector<Flow> inputs_, params_, outputs_;
  std::map<std::string, Flow> channels_;
  std::map<std::pair<Value, at::ScalarType>, Flow> casts_;
  std::map<std::pair<Value, Format>, Value> forward_codes_, backward_codes_;
  std::map<Value, Value> uncast_;
  std::map<Value, Values> workspaces_;
  std::vector<Values> contributions_;  // by edge
  size_t next_extra_ = 0;
};

}  // namespace

Lowered lower(const Description& description, const PlanKey& key) {
  return Lowering(description, key).run();
}

}  // namespace tandem
