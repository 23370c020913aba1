// Lowers backward, from the last op to the first, and sums what several readers of a value
// contribute to its gradient.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "planner/glue.h"
#include "planner/lower.h"

namespace tandem {

namespace {

class BackwardLowering {
 public:
  BackwardLowering(const Description& description, const ForwardFlow& flow,
                   const std::vector<OpGroup>& joint, Draft& draft)
      : description_(description),
        flow_(flow),
        draft_(draft),
        is_joint_(description.ops.size()),
        contributions_(flow.edges) {
    for (const OpGroup& group : joint)
      std::fill(is_joint_.begin() + static_cast<std::ptrdiff_t>(group.first),
                is_joint_.begin() + static_cast<std::ptrdiff_t>(group.last) + 1, true);
  }

  void run() {
    for (const Flow& output : flow_.outputs) {
      Value gradient = Value::none;
      if (draft_.needs_grad(output.value)) {
        gradient = draft_.add_gradient(output.value);
        contribute(output, gradient);
      }
      draft_.output_gradients.push_back(gradient);
    }
    for (auto event = flow_.events.rbegin(); event != flow_.events.rend(); ++event)
      event->kind == Event::op ? lower(event->index) : lower(*event);
    join_again();
    note_sums();
    for (const auto* arguments : {&flow_.inputs, &flow_.params})
      for (const Flow& argument : *arguments)
        draft_.gradients.push_back(draft_.needs_grad(argument.value) ? gradient_of(argument)
                                                                     : Value::none);
  }

 private:
  using Event = ForwardFlow::Event;

  /// A gradient that an op writes for an element of an operand.
  struct Written {
    size_t operand, element;
    Value gradient;
  };

  static Values values_of(const std::vector<Flow>& flows) {
    Values values;
    for (const Flow& flow : flows) values.push_back(flow.value);
    return values;
  }

  /// Joins the parts of a parameter in backward too: the parts are there anyway, while the joined
  /// value may be a copy that would have to be kept.
  void join_again() {
    if (draft_.backward.empty()) return;
    Steps again;
    std::set<Value> decoded;
    for (const Step& step : draft_.forward)
      if (step.kind == StepKind::join) {
        for (const Value part : step.reads)
          if (const auto known = draft_.codes_of_arguments.find(part);
              known != draft_.codes_of_arguments.end() && decoded.insert(part).second)
            again.push_back(decoded_again(part, known->second));
        again.push_back(step);
      }
    draft_.backward.insert(draft_.backward.begin(), again.begin(), again.end());
  }
  static Step decoded_again(Value numbers, const ArgumentCodes& codes) {
    return dequantize_step(codes.codes[exists(codes.codes[0]) ? 0 : 1], numbers);
  }

  /// Marks steps whose x is the caller's and has no other gradient: autograd itself sums it to x's
  /// sizes.
  void note_sums() {
    for (Step& step : draft_.forward) {
      if (step.kind != StepKind::op) continue;
      const OperandTable& operands = draft_.operands[step.covers[0].op];
      if (!operands.kind().def.broadcasts_input) continue;
      const Flow x = operands.flow(0);
      step.broadcasts_input = !draft_.needs_grad(x.value) ||
                              (x.edge == flow_.inputs[0].edge && contributions_[x.edge].size() < 2);
    }
  }

  /// A value with as many rows as the part. A part in codes is represented by the codes, so that it
  /// need not be dequantized for its sizes.
  Value with_rows_of(Value part) const {
    const auto known = draft_.codes_of_arguments.find(part);
    if (known == draft_.codes_of_arguments.end()) return part;
    const Value codes = known->second.codes[0];
    return exists(codes) ? codes : part;
  }

  void split(const Event& event, Value gradient) {
    Values gradients;
    for (const Flow& part : event.parts)
      gradients.push_back(draft_.needs_grad(part.value) ? draft_.add_gradient(part.value)
                                                        : Value::none);
    Values parts = values_of(event.parts);
    for (Value& part : parts) part = with_rows_of(part);
    // Counted in forward: backward, which reads the parts for nothing else, must not keep them.
    const Value rows =
        draft_.add({.format = Format::shape,
                    .name = "rows of " + draft_.types[index_of(event.to.value)].name});
    draft_.forward.push_back(count_rows_step(parts, rows));
    draft_.backward.push_back(split_step(gradient, rows, gradients));
    for (size_t i = 0; i < gradients.size(); ++i)
      if (exists(gradients[i])) contribute(event.parts[i], gradients[i]);
  }

  /// Lowers a cast, a point that rounds gradients, or a join.
  void lower(const Event& event) {
    Value gradient = gradient_of(event.to);
    if (event.kind == Event::join) {
      if (exists(gradient)) split(event, gradient);
      return;
    }
    if (!exists(gradient) || !draft_.needs_grad(event.from.value)) return;
    if (event.kind == Event::round_gradient) {
      const Value rounded = draft_.add_gradient(event.from.value);
      draft_.backward.push_back(round_step(gradient, rounded, event.index));
      gradient = rounded;
    }
    contribute(event.from, gradient);
    if (event.index != npos)  // the first of an op's points comes last and wins
      draft_.operands[event.index].bind_written(0, 0, gradient);
  }

  void contribute(Flow to, Value gradient, size_t op = npos) {
    if (draft_.dtype(to.value) != draft_.dtype(gradient)) {
      const Value converted = draft_.add_gradient(to.value);
      draft_.backward.push_back(cast_step(gradient, converted));
      gradient = converted;
    }
    contributions_[to.edge].push_back({gradient, op});
  }

  /// The sum of the gradients of `of`; several are summed by `add` steps.
  Value sum_of(Values& gradients, Value of) {
    while (gradients.size() > 1) {
      const Value b = gradients.back();
      gradients.pop_back();
      const Value a = gradients.back();
      gradients.back() = draft_.add_gradient(of);
      draft_.backward.push_back(add_step(a, b, gradients.back()));
    }
    return gradients.empty() ? Value::none : gradients[0];
  }
  Value gradient_of(Flow flow) {
    if (!exists(flow.value)) return Value::none;
    Values gradients;
    for (const OperandTable::Contribution& each : contributions_[flow.edge])
      gradients.push_back(each.gradient);
    return sum_of(gradients, flow.value);
  }

  /// The results of an op that are renames of an operand.
  std::vector<OpKind::SameOperand> renames_of(size_t index) const {
    const OpNode& node = description_.ops[index];
    const OperandTable& operands = draft_.operands[index];
    if (is_passed_over(description_, node)) return {{node.kind->first_result, 0}};
    std::vector<OpKind::SameOperand> renames;
    for (const auto& same :
         node.kind->same)  // a point of rounding may have made a value of its own
      if (operands.value(same.name) == operands.value(same.operand)) renames.push_back(same);
    return renames;
  }

  void lower(size_t index) {
    const OpNode& node = description_.ops[index];
    const OpKind& op = *node.kind;
    OperandTable& operands = draft_.operands[index];
    bool any = false;
    for (size_t result = op.first_result; result < op.first_temporary; ++result) {
      const Flow flow = operands.flow(result);
      const Value gradient = draft_.needs_grad(flow.value) ? gradient_of(flow) : Value::none;
      operands.bind_given(result, gradient);
      if (exists(gradient)) operands.bind_contributions(result, contributions_[flow.edge]);
      any |= exists(gradient);
    }
    if (!any) return;
    std::vector<Written> written;
    for (const auto& rename : renames_of(index)) pass(index, rename.operand, rename.name, written);
    if (!is_passed_over(description_, node)) {
      for (const auto& same : op.same_gradients)
        if (!op.is_same(same.operand)) pass(index, same.name, same.operand, written);
      for (uint16_t nth = 0; nth < op.backward.size(); ++nth) lower_step(index, nth, written);
    }
    contribute_all(index, written);
  }

  /// Passes the gradient of a result on as the gradient of an operand.
  void pass(size_t index, size_t operand, size_t result, std::vector<Written>& written) {
    const OperandTable& operands = draft_.operands[index];
    Value gradient = operands.given(result);
    if (exists(gradient) && is_joint_[index] && draft_.needs_grad(operands.value(operand))) {
      const Type given = draft_.types[index_of(gradient)];
      gradient = draft_.add({given.dtype, Format::plain, Origin::gradient, Value::none,
                             "grad of " + draft_.name(operands.value(operand))});
      draft_.backward.push_back(rename_step(operands.given(result), gradient));
    }
    written.push_back({operand, 0, gradient});
  }

  void contribute_all(size_t index, const std::vector<Written>& written) {
    OperandTable& operands = draft_.operands[index];
    std::map<std::pair<size_t, size_t>, Values> sums;
    for (const auto& [operand, element, gradient] : written)
      if (exists(gradient) && draft_.needs_grad(operands.value(operand, element)))
        sums[{operand, element}].push_back(gradient);
    for (const auto& [operand, element, gradient] : written) {  // in the order of writes, each once
      const auto found = sums.find({operand, element});
      if (found == sums.end()) continue;
      const Flow to = operands.flow(operand, element);
      const Value sum = sum_of(found->second, to.value);
      operands.bind_written(operand, element, sum);
      contribute(to, sum, index);
      sums.erase(found);
    }
  }

  /// Lowers one backward step of an op, unless it writes no needed gradient and mutates nothing.
  void lower_step(size_t index, uint16_t nth, std::vector<Written>& all_written) {
    const OpNode& node = description_.ops[index];
    const OpStep& resolved = node.kind->backward[nth];
    if (resolved.def->applies != nullptr && !resolved.def->applies(node.options.get())) return;
    OperandTable& operands = draft_.operands[index];
    Values writes;
    std::vector<Written> written;
    bool is_for_others = resolved.def->writes_again;  // liveness decides whether the step runs
    for (const OperandRef& ref : resolved.writes)
      for (size_t element = 0; element < operands.count(ref.operand); ++element) {
        const Value of = operands.value(ref.operand, element);
        if (ref.operand >= node.kind->first_temporary) {
          writes.push_back(add_temporary(index, ref.operand));
          operands.bind(ref.operand, {writes.back()});
          is_for_others = true;
          continue;
        }
        if (!ref.is_gradient) {  // a re-emit; a later pass decides whether it happens
          writes.push_back(of);
          if (exists(of)) draft_.types[index_of(of)].may_come_late = true;
          continue;
        }
        writes.push_back(draft_.needs_grad(of) ? draft_.add_gradient(of) : Value::none);
        if (exists(writes.back())) written.push_back({ref.operand, element, writes.back()});
      }
    const auto absorbed = absorbed_by(node, resolved, operands);
    if (written.empty() && absorbed.empty() && !is_for_others) return;
    all_written.insert(all_written.end(), written.begin(), written.end());
    Step step = step_of_op(node, resolved, {static_cast<uint32_t>(index), true, nth}, operands);
    step.writes = std::move(writes);
    step.absorbs = absorbed;
    draft_.backward.push_back(std::move(step));
  }

  /// Adds a value in the dtype of the op's result.
  Value add_temporary(size_t index, size_t operand) {
    const OpNode& node = description_.ops[index];
    const Value y = draft_.operands[index].value(node.kind->first_result);
    return draft_.add({draft_.dtype(y), Format::plain, Origin::intermediate, Value::none,
                       node.label + "." + std::string(node.kind->operands[operand])});
  }

  /// Indices, among the plan's gradients, of the parameters whose gradients the step absorbs.
  std::vector<uint32_t> absorbed_by(const OpNode& node, const OpStep& step,
                                    const OperandTable& operands) const {
    std::vector<uint32_t> absorbed;
    for (const OperandRef& ref : step.absorbs)
      for (size_t element = 0; element < operands.count(ref.operand); ++element)
        if (draft_.needs_grad(operands.value(ref.operand, element)))
          add_absorbed(
              node,
              operands.place(ref.operand, element) - operands.place(node.kind->first_param, 0),
              absorbed);
    return absorbed;
  }

  /// Adds the indices of the `nth` parameter of an op, which may be several tensors.
  void add_absorbed(const OpNode& node, size_t nth, std::vector<uint32_t>& absorbed) const {
    const auto inputs = static_cast<uint32_t>(draft_.inputs.size());
    if (node.joins.empty()) return absorbed.push_back(inputs + node.params[nth]);
    const auto first = std::accumulate(node.joins.begin(),
                                       node.joins.begin() + static_cast<std::ptrdiff_t>(nth), 0U);
    for (uint32_t part = first; part < first + node.joins[nth]; ++part)
      if (draft_.needs_grad(draft_.params[node.params[part]]))
        absorbed.push_back(inputs + node.params[part]);
  }

  const Description& description_;
  const ForwardFlow& flow_;
  Draft& draft_;
  std::vector<bool> is_joint_;                                          // by op
  std::vector<std::vector<OperandTable::Contribution>> contributions_;  // by edge
};

}  // namespace

void lower_backward(const Description& description, const ForwardFlow& flow,
                    const std::vector<OpGroup>& joint, Draft& draft) {
  BackwardLowering(description, flow, joint, draft).run();
}

}  // namespace tandem
