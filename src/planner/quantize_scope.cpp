#include "planner/quantize_scope.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/kernel_op.h"

namespace tandem {

QuantizeScope::QuantizeScope(const Description& described, Draft& drafted)
    : description(described),
      draft(drafted),
      is_stateful_(history_length(*described.recipe) != 0),
      is_calibrating_(tandem::is_calibrating(*described.recipe)) {
  if (is_stateful_) add_state();
  for (const Step& step : draft.forward)
    if (step.kind == StepKind::cast) uncast_[step.writes[0]] = step.reads[0];
}

/// Adds the tensors of all holders, used or not: the caller passes them without knowledge of plans.
void QuantizeScope::add_state() {
  const auto add = [&](at::ScalarType dtype, std::string name) {
    draft.state.push_back(
        draft.add({dtype, Format::plain, Origin::state, Value::none, std::move(name)}));
  };
  add(at::kLong, "region");
  for (const OpNode& op : description.ops)
    if (op.state && op.state->holder >= draft.state_holders.size())
      draft.state_holders.resize(op.state->holder + 1);
  for (size_t holder = 0; holder < draft.state_holders.size(); ++holder)
    for (const char* direction : {"forward", "backward"})
      for (const ScalingStateTensor& each : kScalingState)
        add(each.dtype, "state " + std::to_string(holder) + "." + direction + "." + each.name);
}

QuantizeScope::Slot QuantizeScope::slot_of(size_t op, Role role, size_t group) const {
  if (!is_stateful_) return {};
  const bool of_backward = role == Role::grad_output;
  size_t before = 0;
  for (const RoleOf& each : description.ops[op].kind->def.roles) {
    if (each.role == role) break;
    before += (each.role == Role::grad_output) == of_backward;
  }
  return {op, before, group, of_backward};
}

StateSlot QuantizeScope::state_of(const Slot& slot, size_t groups) {
  const OpNode& op = description.ops[slot.op];
  TORCH_CHECK_VALUE(op.state, op.label, ": expected \"state\", which says where its amaxes go, ",
                    "under a recipe that keeps them, got none. Number the modules that hold it.");
  StateHolder& holder = draft.state_holders[op.state->holder];
  StateHolder::Direction& direction = slot.is_backward ? holder.backward : holder.forward;
  const auto stride = std::ranges::count_if(op.kind->def.roles, [&](const RoleOf& each) {
    return (each.role == Role::grad_output) == slot.is_backward;
  });
  const kernel_ops::SlotRange slots{
      static_cast<int64_t>(slot.role +
                           (slot.is_backward ? op.state->backward : op.state->forward)) +
          static_cast<int64_t>(slot.group) * stride,
      std::max<int64_t>(stride, 1), static_cast<int64_t>(groups)};
  const int64_t last = slots.first + slots.stride * std::max<int64_t>(slots.count - 1, 0);
  direction.slots = std::max(direction.slots, last + 1);
  direction.is_used = true;
  direction.update = &update_of(*description.recipe, slot.is_backward);
  StateSlot found{{}, draft.state[0], slots, direction.update};
  const size_t first = scaling_state_place(op.state->holder, slot.is_backward);
  std::copy_n(draft.state.begin() + static_cast<std::ptrdiff_t>(first), found.state.size(),
              found.state.begin());
  return found;
}

Value QuantizeScope::seed_of(Value plain, const Quantizer& quantizer, Steps& steps) {
  if (given_to(quantizer) != Given::seed) return Value::none;
  const Value seed = draft.add_result(at::kLong, draft.name(plain) + ".seed");
  const Step draw = seed_step(draft.inputs[0], seed);
  if (is_backward) {
    draft.forward.insert(draft.forward.begin(), draw);
  } else {
    steps.push_back(draw);
  }
  return seed;
}

Value QuantizeScope::uncast(Value weight) const {
  const auto original = uncast_.find(weight);
  return original == uncast_.end() ? weight : original->second;
}

const std::vector<OpStep::ContractOf>& QuantizeScope::contracts_of(const Step& step) const {
  const Part part = step.covers[0];
  const OpKind& op = *description.ops[part.op].kind;
  return (part.is_backward ? op.backward : op.forward)[part.nth].contracts;
}

void QuantizeScope::check_dtype(Value plain, size_t op) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      kernel_ops::kArithmetic.has(draft.dtype(plain)), description.ops[op].label,
      ": expected float32, bfloat16 or float16 under a recipe, got ",
      dtype_name(draft.dtype(plain)), ". Leave the autocast region or convert the module.");
}

}  // namespace tandem
