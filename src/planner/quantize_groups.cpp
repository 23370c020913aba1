#include "planner/quantize_groups.h"

#include <algorithm>

#include "kernel_ops/framework/kernel_op.h"
#include "ops/glue.h"

namespace tandem {

void QuantizeGroups::quantize(Step& step, size_t read, const OpStep::ContractOf& contract,
                              const Quantizer& quantizer, Steps& steps) {
  const auto& contracts = scope_.contracts_of(step);
  step.quantizers.resize(contracts.size());
  const size_t op = step.covers[0].op;
  const Value itself = step.reads[read], plain = scope_.uncast(itself);
  if (scope_.is_calibrating() && !kernel_ops::kArithmetic.has(scope_.draft.dtype(itself))) return;
  scope_.check_dtype(itself, op);
  const bool is_weight = contract.role == Role::weight;
  if (is_weight && !scope_.is_calibrating()) step.reads[read] = plain;
  ByGroup& own = step.quantizers[static_cast<size_t>(&contract - contracts.data())];
  own = {&quantizer, /*is_multiplied=*/!scope_.is_calibrating()};
  if (const Value value = given(op, contract.role, plain, quantizer, steps); exists(value)) {
    own.given = step.reads.size();
    step.read_names.push_back("given");
    step.reads.push_back(value);
  }
  const bool is_of_direction = scope_.is_backward == (contract.role == Role::grad_output);
  if (scope_.is_watched() && is_of_direction)
    step.reads[read] = watched(step, read, contract.role, quantizer, steps);
  if (!scope_.is_stateful() || !is_of_direction) return;
  const std::string name = scope_.draft.name(plain) + ".amaxes";
  const Origin origin = scope_.is_backward ? Origin::intermediate : Origin::result;
  const Value amaxes = scope_.draft.add({at::kFloat, Format::plain, origin, Value::none, name});
  if (is_weight) {
    steps.push_back(matrix_amaxes_step(plain, amaxes));
  } else {
    own.amaxes = step.writes.size();
    step.write_names.push_back("amaxes");
    step.writes.push_back(amaxes);
  }
  records_.push_back(
      record_amax_step(scope_.state_of(scope_.slot_of(op, contract.role), groups_of(op)), amaxes,
                       scope_.draft.grad_mode));
}

Value QuantizeGroups::watched(const Step& step, size_t read, Role role, const Quantizer& quantizer,
                              Steps& steps) {
  const size_t op = step.covers[0].op;
  const auto [known, is_new] = watched_.try_emplace({op, role}, Value::none);
  if (!is_new) return known->second;
  const Value x = step.reads[read];
  known->second = scope_.draft.add(scope_.draft.types[index_of(x)]);
  Type& type = scope_.draft.types[index_of(known->second)];
  type.origin = scope_.is_backward ? Origin::gradient : Origin::result;
  const auto known_given = given_.find({op, role});
  const bool is_of_rows = role != Role::weight;
  steps.push_back(watched_groups_step(
      x, is_of_rows ? index_read_by(step) : Value::none,
      known_given == given_.end() ? Value::none : known_given->second, known->second, quantizer,
      {scope_.description.watched, op, role, static_cast<int64_t>(groups_of(op))}));
  return known->second;
}

Value QuantizeGroups::index_read_by(const Step& step) const {
  const Part part = step.covers[0];
  const OperandTable& operands = scope_.draft.operands[part.op];
  const OpKind& op = operands.kind();
  Value found = Value::none;
  for_each_read(
      (part.is_backward ? op.backward : op.forward)[part.nth], operands,
      [&](size_t read, OperandRef ref, size_t) {
        if (!ref.is_gradient && std::ranges::find(op.indices, ref.operand) != op.indices.end())
          found = step.reads[read];
      });
  return found;
}

size_t QuantizeGroups::groups_of(size_t op) const {
  const OpNode& node = scope_.description.ops[op];
  return node.kind->def.groups(node.options.get());
}

Value QuantizeGroups::given(size_t op, Role role, Value plain, const Quantizer& quantizer,
                            Steps& steps) {
  const auto [known, is_new] = given_.try_emplace({op, role}, Value::none);
  if (!is_new) return known->second;
  if (given_to(quantizer) == Given::scale) {
    known->second = scope_.draft.add_result(at::kFloat, scope_.draft.name(plain) + ".scales");
    steps.push_back(
        take_scale_step(scope_.state_of(scope_.slot_of(op, role), groups_of(op)), known->second));
  } else {
    known->second = scope_.seed_of(plain, quantizer, steps);
  }
  return known->second;
}

}  // namespace tandem
