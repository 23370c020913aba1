// Lowers forward: dtypes, casts, channels, results, and the steps of each op.
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <span>

#include "kernel_ops/elementwise/join.h"
#include "kernel_ops/framework/checks.h"
#include "ops/structure.h"
#include "planner/glue.h"
#include "planner/lower.h"
#include "tandem/op_options.h"

namespace tandem {

namespace {

class ForwardLowering {
 public:
  ForwardLowering(const Description& description, const PlanKey& key, Draft& draft)
      : description_(description), key_(key), call_(key.call()), draft_(draft) {}

  ForwardFlow run() {
    bind_arguments();
    Flow x = bound_inputs_[0];
    for (size_t i = 0; i < description_.ops.size(); ++i) x = lower(i, x);
    add_output(x);
    for (size_t i = 0; i < description_.ops.size(); ++i) collect_outputs(i);
    return std::move(flow_);
  }

 private:
  using Event = ForwardFlow::Event;

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
      const Value value = draft_.add({traits.dtype, Format::plain,
                                      is_input ? Origin::input : Origin::param, Value::none, name},
                                     traits.requires_grad);
      (is_input ? draft_.inputs : draft_.params).push_back(value);
      (is_input ? flow_.inputs : flow_.params).push_back(new_flow(value));
    }
    bound_inputs_ = flow_.inputs;
    bound_params_ = flow_.params;
    for (size_t i = 0; i < description_.buffer_count(); ++i)
      draft_.buffers.push_back(draft_.add(
          {at::kFloat, Format::plain, Origin::buffer, Value::none, "buffer " + std::to_string(i)}));
    for (const OpNode& op : description_.ops) {
      draft_.operands.emplace_back(op);
      name_operands(op, draft_.operands.back(), op.kind->first_param, op.params, draft_.params);
      name_operands(op, draft_.operands.back(), op.kind->first_buffer, op.buffers, draft_.buffers);
    }
    for (size_t i = 0; i < key_.codes_count(); ++i) bind_codes(key_.codes(i));
  }

  /// Binds an argument that comes in codes. Its dequantized values are a value of their own,
  /// computed if a step reads it, and their gradient is the argument's.
  void bind_codes(const PlanKey::CodesTraits& traits) {
    const size_t inputs = draft_.inputs.size();
    const bool is_input = traits.tensor < inputs;
    const size_t place = is_input ? traits.tensor : traits.tensor - inputs;
    const Flow from = (is_input ? flow_.inputs : flow_.params)[place];
    const std::string name = draft_.name(from.value);
    ArgumentCodes codes{traits.quantizer};
    const auto add = [&](Direction direction) {
      return draft_.add_codes(from.value, *traits.quantizer, direction,
                              is_input ? Origin::input : Origin::param);
    };
    if (traits.row) codes.codes[0] = add(Direction::row);
    if (serves_both_directions(*traits.quantizer)) {
      codes.codes[1] = codes.codes[0];
    } else if (traits.column) {
      codes.codes[1] = add(Direction::column);
    }
    draft_.argument_codes.push_back(codes.codes[0]);
    draft_.argument_codes.push_back(codes.codes[1] == codes.codes[0] ? Value::none
                                                                     : codes.codes[1]);
    const Flow plain = new_flow(draft_.add_result(draft_.dtype(from.value), name + " decoded",
                                                  draft_.needs_grad(from.value)));
    TORCH_CHECK_VALUE(traits.row || !traits.quantizer->hadamard, name,
                      ": expected a parameter with codes of rows, got rotated codes of columns ",
                      "alone, which do not tell its numbers. Quantize it with rowwise=True.");
    draft_.forward.push_back(dequantize_step(codes.codes[traits.row ? 0 : 1], plain.value));
    flow_.events.push_back({Event::cast, npos, from, plain});
    (is_input ? bound_inputs_ : bound_params_)[place] = plain;
    draft_.codes_of_arguments[plain.value] = codes;
  }

  /// Names an op's operands at these positions as `explain` prints them: "1.linear.weight".
  void name_operands(const OpNode& op, const OperandTable& table, size_t first,
                     const std::vector<uint32_t>& positions, const Values& values) {
    size_t nth = 0;
    for (size_t at = 0, operand = first; at < positions.size(); ++operand)
      for (size_t element = 0; element < table.count(operand); ++element, ++nth) {
        std::string name(op.kind->operands[operand]);
        if (is_list(name)) name.insert(name.size() - 1, std::to_string(element));
        const bool is_param = first == op.kind->first_param;
        const size_t parts = is_param && !op.joins.empty() ? op.joins[nth] : 1;
        for (size_t part = 0; part < parts; ++part, ++at)
          draft_.types[index_of(values[positions[at]])].name =
              op.label + "." + name + (parts > 1 ? " part " + std::to_string(part) : "");
      }
  }

  Flow new_flow(Value value) { return {value, flow_.edges++}; }

  Type result_type(at::ScalarType dtype, std::string name) {
    return {dtype, Format::plain, Origin::result, Value::none, std::move(name)};
  }

  Flow cast(Flow from, at::ScalarType dtype, const OpNode& op) {
    const Value value = from.value;
    if (draft_.dtype(value) == dtype) return from;
    const auto known = casts_.find({value, dtype});
    if (known != casts_.end()) return known->second;
    TORCH_CHECK_TYPE(c10::canCast(draft_.dtype(value), dtype), op.label, ": expected ",
                     draft_.name(value), " that converts to ", dtype_name(dtype),
                     ", in which the op computes, got ", dtype_name(draft_.dtype(value)),
                     ". Convert it before the call, or convert the module.");
    check_differentiable(draft_.needs_grad(value), dtype, op);
    const Flow result = new_flow(draft_.add_result(
        dtype, draft_.name(value) + " as " + c10::toString(dtype), draft_.needs_grad(value)));
    draft_.forward.push_back(cast_step(value, result.value));
    flow_.events.push_back({Event::cast, npos, from, result});
    return casts_[{value, dtype}] = result;
  }

  /// Checks that the gradient exists: the formulas do not conjugate, and integers have none.
  static void check_differentiable(bool any_grad, at::ScalarType dtype, const OpNode& op) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !any_grad || c10::isFloatingType(dtype), op.label,
        ": expected floating-point operands where gradients are needed, got ", dtype_name(dtype),
        ". Convert them, call under torch.no_grad(), or use torch.nn modules.");
  }

  /// The dtype in which an op computes; its operands are cast to it, unless they promote.
  at::ScalarType compute_dtype(const OpNode& op, Value x) const {
    const DtypeRule rule = op.kind->def.dtype;
    const at::ScalarType own = draft_.dtype(x);
    if (rule == DtypeRule::promote || op.keeps_dtype) return own;
    if (rule == DtypeRule::promote_number)
      return c10::isIntegralType(own, /*includeBool=*/true) ? c10::get_default_dtype_as_scalartype()
                                                            : own;
    if (call_.autocast_dtype != at::ScalarType::Undefined && own != at::kDouble)
      return call_.autocast_dtype;
    return rule == DtypeRule::weight ? draft_.dtype(draft_.params[op.params[0]]) : own;
  }

  Flow lower(size_t index, Flow x) {
    const OpNode& node = description_.ops[index];
    const OpKind& op = *node.kind;
    const OpDef& def = op.def;
    OperandTable& operands = draft_.operands[index];
    if (is_passed_over(description_, node)) {
      const Flow y = new_flow(x.value);
      operands.bind(0, x);
      operands.bind(op.first_result, y);
      flow_.events.push_back({Event::op, index});
      return y;
    }
    const bool quantizes = description_.recipe && !is_calibrating(*description_.recipe);
    const bool has_composite = def.has_composite && !(def.groups != nullptr && quantizes);
    if (!has_composite && draft_.no_composite.empty()) draft_.no_composite = node.label;
    draft_.runs_user_code |= def.runs_user_code;
    at::ScalarType dtype = compute_dtype(node, x.value);
    TORCH_CHECK_TYPE(def.dtype != DtypeRule::weight || !c10::isFloatingType(dtype) ||
                         !c10::isIntegralType(draft_.dtype(x.value), /*includeBool=*/true),
                     node.label, ": expected x in a floating dtype, as the weight is, got ",
                     dtype_name(draft_.dtype(x.value)), ". Convert it, as in x.float().");
    const bool casts = def.dtype == DtypeRule::weight || def.dtype == DtypeRule::input;
    operands.bind(0, casts ? cast(x, dtype, node) : x);
    bool any_grad = draft_.needs_grad(x.value);
    for (size_t slot = 0; slot < node.extra_inputs.size(); ++slot) {
      const Flow extra = extra_input(node.extra_inputs[slot]);
      const bool is_index = std::ranges::find(op.indices, slot + 1) != op.indices.end();
      TORCH_CHECK_NOT_IMPLEMENTED(!is_index || !draft_.needs_grad(extra.value), node.label,
                                  ": expected ", def.inputs[slot + 1],
                                  " that need no gradient, as none is computed, got a tensor that "
                                  "requires grad. Detach it.");
      const bool stays = is_index || position(def.masks, def.inputs[slot + 1]) != npos;
      operands.bind(slot + 1, casts && !stays ? cast(extra, dtype, node) : extra);
      any_grad |= draft_.needs_grad(extra.value);
      if (!casts && !stays) dtype = c10::promoteTypes(dtype, draft_.dtype(extra.value));
    }
    any_grad |= bind_params(node, operands, dtype, casts);
    const at::ScalarType target = result_dtype(node, operands, dtype);
    const bool in_place = writes_caller(node, operands);
    if (in_place) dtype = target;
    const bool computes = !op.forward.empty();
    if (computes && !def.runs_user_code) check_differentiable(any_grad, dtype, node);
    bind_results(node, operands, dtype, any_grad);
    if (def.is_quantize_point) round(node, operands, index);
    if (in_place) {
      add_step(index, *op.in_place, {static_cast<uint32_t>(index)});
    } else {
      for (uint16_t nth = 0; nth < op.forward.size(); ++nth)
        add_step(index, op.forward[nth], {static_cast<uint32_t>(index), false, nth});
    }
    flow_.events.push_back({Event::op, index});
    const Flow y = operands.flow(op.first_result);
    for (size_t slot = 0; slot < node.extra_outputs.size(); ++slot)
      if (!node.extra_outputs[slot].channel.empty())
        channels_[node.extra_outputs[slot].channel] = operands.flow(op.extra_outputs[slot]);
    return target == dtype ? y : cast(y, target, node);
  }

  /// Returns whether any parameter requires a gradient. If operands promote, sets `dtype` to the
  /// dtype of the results.
  bool bind_params(const OpNode& node, OperandTable& operands, at::ScalarType& dtype, bool casts) {
    const OpKind& op = *node.kind;
    bool any_grad = false;
    size_t at = 0, nth = 0;
    for (size_t operand = op.first_param; operand < op.first_buffer; ++operand)
      for (size_t element = 0; element < operands.count(operand); ++element) {
        const size_t parts = node.joins.empty() ? 1 : node.joins[nth++];
        Flow param = joined(node, std::span(node.params).subspan(at, parts));
        at += parts;
        // Under autocast a bias takes the dtype of the product, as torch.nn.Linear's does.
        // Elsewhere it promotes.
        const bool follows =
            call_.autocast_dtype != at::ScalarType::Undefined && c10::isFloatingType(dtype);
        const bool is_fixed = operand + op.def.fixed_params >= op.first_buffer;
        if ((casts || follows) && !is_fixed) param = cast(param, dtype, node);
        operands.bind(operand, param, element);
        any_grad |= draft_.needs_grad(param.value);
        if (!casts && !is_fixed) dtype = c10::promoteTypes(dtype, draft_.dtype(param.value));
      }
    at = 0;
    for (size_t operand = op.first_buffer; operand < op.first_result; ++operand)
      for (size_t element = 0; element < operands.count(operand); ++element)
        operands.bind(operand, {draft_.buffers[node.buffers[at++]]}, element);
    return any_grad;
  }

  /// A parameter of an op: one tensor, or several that are joined.
  Flow joined(const OpNode& node, std::span<const uint32_t> positions) {
    if (positions.size() == 1) return bound_params_[positions[0]];
    std::vector<Flow> parts;
    Values values;
    bool any_grad = false;
    for (const uint32_t position : positions) {
      parts.push_back(bound_params_[position]);
      values.push_back(parts.back().value);
      any_grad |= draft_.needs_grad(values.back());
      TORCH_CHECK_TYPE(draft_.dtype(values.back()) == draft_.dtype(values[0]), node.label,
                       ": expected the parts of a parameter in one dtype, got ",
                       dtype_name(draft_.dtype(values[0])), " and ",
                       dtype_name(draft_.dtype(values.back())),
                       ". Convert the module: it has .to(dtype).");
    }
    const auto known = joined_.find(values);
    if (known != joined_.end()) return known->second;
    const std::string name = draft_.name(values[0]);
    const Flow result = new_flow(
        draft_.add_result(draft_.dtype(values[0]), name.substr(0, name.rfind(" part ")), any_grad));
    draft_.forward.push_back(join_step(values, result.value));
    flow_.events.push_back({Event::join, npos, {}, result, std::move(parts)});
    join_codes(values, result.value);
    return joined_[values] = result;
  }

  /// If all parts are in codes of one quantizer and these can be joined (codes_join), the joined
  /// value is in codes too. Otherwise it has only dequantized values, which are not quantized a
  /// second time.
  void join_codes(const Values& parts, Value whole) {
    const auto& known = draft_.codes_of_arguments;
    const auto first = known.find(parts[0]);
    if (first == known.end()) return;
    ArgumentCodes result{first->second.quantizer};
    for (const Value part : parts)
      if (const auto own = known.find(part);
          own == known.end() || own->second.quantizer != result.quantizer)
        return;
    for (size_t direction = 0; kernel_ops::codes_join(*result.quantizer) && direction < 2;
         ++direction) {
      Values codes;
      for (const Value part : parts) codes.push_back(known.at(part).codes[direction]);
      if (!std::ranges::all_of(codes, exists)) continue;
      if (serves_both_directions(*result.quantizer) && exists(result.codes[0])) {
        result.codes[direction] = result.codes[0];
        continue;
      }
      result.codes[direction] =
          draft_.add_codes(whole, *result.quantizer, static_cast<Direction>(direction));
      draft_.forward.push_back(join_codes_step(codes, result.codes[direction]));
    }
    draft_.codes_of_arguments[whole] = result;
  }

  Flow extra_input(const Binding& binding) {
    if (!binding.channel.empty()) return channels_.at(binding.channel);
    return bound_inputs_[++next_extra_];
  }

  /// The dtype of y. If the op adds into the caller's tensor, it is that tensor's dtype, traced or
  /// not, as for torch's add_.
  at::ScalarType result_dtype(const OpNode& node, const OperandTable& operands,
                              at::ScalarType dtype) const {
    if (!holds_sum(node, operands)) return dtype;
    const at::ScalarType target = draft_.dtype(operands.value(1));
    TORCH_CHECK_TYPE(
        c10::canCast(dtype, target), node.label, ": expected an extra input that holds ", dtype,
        ", as in_place=True asks, got ", target, ". Use in_place=False, or convert it.");
    return target;
  }

  void bind_results(const OpNode& node, OperandTable& operands, at::ScalarType dtype,
                    bool any_grad) {
    const OpKind& op = *node.kind;
    for (size_t operand = op.first_result; operand < op.first_temporary; ++operand) {
      const auto same = std::ranges::find(op.same, operand, &OpKind::SameOperand::name);
      if (same != op.same.end()) {
        operands.bind(operand, new_flow(operands.value(same->operand)));
        continue;
      }
      const ResultDef& result = op.result(operand);
      Type type = result_type(dtype, node.label + "." + std::string(result.name));
      switch (result.kind) {
        case ResultDef::computed:
          if (result.dtype != at::ScalarType::Undefined) type.dtype = result.dtype;
          break;
        case ResultDef::statistic:
          type.dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
          break;
        case ResultDef::large:
          type.dtype = dtype == at::kHalf ? at::kFloat : dtype;
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
      if (operand == op.first_result) {
        if (op.def.views_input) type.view_of = operands.value(0);
        if (writes_caller(node, operands)) type.view_of = operands.value(1);
      }
      // A statistic is differentiable only as the main output, such as a loss.
      const bool is_differentiable =
          (c10::isFloatingType(type.dtype) || c10::isComplexType(type.dtype)) &&
          (result.kind == ResultDef::computed || operand == op.first_result);
      const Value value = draft_.add(std::move(type), any_grad && is_differentiable);
      operands.bind(operand, new_flow(value));
      if (result.kind == ResultDef::seed)
        draft_.forward.push_back(seed_step(draft_.inputs[0], value));
    }
  }

  /// Whether y is stored in the caller's tensor. A tensor in codes cannot hold the sum, so y is a
  /// new tensor.
  bool holds_sum(const OpNode& node, const OperandTable& operands) const {
    return node.writes_caller() && !draft_.codes_of_arguments.contains(operands.value(1));
  }

  /// A traced call writes into no argument.
  bool writes_caller(const OpNode& node, const OperandTable& operands) const {
    return holds_sum(node, operands) && !call_.traced;
  }

  void add_step(size_t index, const OpStep& resolved, Part part) {
    const OpNode& node = description_.ops[index];
    if (resolved.def->applies != nullptr && !resolved.def->applies(node.options.get())) return;
    const OperandTable& operands = draft_.operands[index];
    Step step = step_of_op(node, resolved, part, operands);
    if (call_.traced && holds_sum(node, operands)) step.options = {ops::caller_holds_sum()};
    for (const OperandRef& ref : resolved.writes)
      for (size_t element = 0; element < operands.count(ref.operand); ++element)
        step.writes.push_back(operands.value(ref, element));
    draft_.forward.push_back(std::move(step));
  }

  /// Lowers the op `quantize`: by its options, y is x rounded to the recipe's format, and the
  /// gradient of x is that of y, rounded.
  void round(const OpNode& node, OperandTable& operands, size_t index) {
    const auto& options = *static_cast<const ops::QuantizeOptions*>(node.options.get());
    Flow y = operands.flow(0);
    if (!description_.recipe || !c10::isFloatingType(draft_.dtype(y.value))) return;
    if (!options.forward && !options.backward) return;  // y stays a rename
    const auto behind = [&](Flow x, bool is_view) {
      Type type = result_type(draft_.dtype(x.value), node.label + ".y");
      if (is_view) type.view_of = x.value;
      return new_flow(draft_.add(std::move(type), draft_.needs_grad(x.value)));
    };
    if (options.forward) {
      const Flow x = y;
      y = behind(x, false);
      draft_.forward.push_back(round_step(x.value, y.value, index));
      flow_.events.push_back({Event::cast, index, x, y});
    }
    if (options.backward) {
      const Flow x = y;
      y = behind(x, true);
      draft_.forward.push_back(rename_step(x.value, y.value));
      flow_.events.push_back({Event::round_gradient, index, x, y});
    }
    operands.bind(node.kind->first_result, y);
  }

  void add_output(Flow output) {
    if (const auto known = draft_.codes_of_arguments.find(output.value);
        known != draft_.codes_of_arguments.end()) {  // an input that no op has changed
      const auto [row, column] = known->second.codes;
      const Flow plain = output;
      output =
          new_flow(add_handed_over(draft_, row, column == row ? Value::none : column, plain.value));
      flow_.events.push_back({Event::cast, npos, plain, output});
    }
    draft_.outputs.push_back(output.value);
    flow_.outputs.push_back(output);
  }

  void collect_outputs(size_t index) {
    const OpNode& node = description_.ops[index];
    for (size_t slot = 0; slot < node.extra_outputs.size(); ++slot)
      if (node.extra_outputs[slot].channel.empty() || node.extra_outputs[slot].to_caller)
        add_output(draft_.operands[index].flow(node.kind->extra_outputs[slot]));
  }

  const Description& description_;
  const PlanKey& key_;
  const PlanKey::Call call_;
  Draft& draft_;
  ForwardFlow flow_;
  /// What ops read in place of each input and parameter.
  std::vector<Flow> bound_inputs_, bound_params_;
  std::map<std::string, Flow> channels_;
  std::map<std::pair<Value, at::ScalarType>, Flow> casts_;
  /// Keyed by their parts.
  std::map<Values, Flow> joined_;
  size_t next_extra_ = 0;
};

}  // namespace

ForwardFlow lower_forward(const Description& description, const PlanKey& key, Draft& draft) {
  return ForwardLowering(description, key, draft).run();
}

}  // namespace tandem
