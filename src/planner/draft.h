// A plan in the making: what the passes of the planner hand on to each other.
#pragma once

#include <array>
#include <map>

#include "core/plan.h"
#include "planner/description.h"

namespace tandem {

/// A value as an op meets it: from whom it comes decides where its gradient goes, and a rename has
/// a gradient of its own.
struct Flow {
  Value value = Value::none;
  /// Where the gradients of this result's readers are summed up.
  size_t edge = npos;
};

/// The values behind the operands and results of one op, and behind their gradients. A list has
/// several.
class OperandTable {
 public:
  explicit OperandTable(const OpNode& node);

  const OpKind& kind() const { return *kind_; }
  size_t count(size_t operand) const { return first_[operand + 1] - first_[operand]; }

  /// Where an element of an operand stands among all.
  size_t place(size_t operand, size_t element) const { return first_[operand] + element; }

  void bind(size_t operand, Flow flow, size_t element = 0) { at(operand, element).flow = flow; }
  /// The gradient of a result, as backward gets it, and of an operand, as the op contributes it.
  void bind_given(size_t result, Value gradient) { at(result, 0).gradient = gradient; }
  /// What a reader of a result contributes to its gradient; `op` is npos where that is the caller,
  /// or a step that no op asked for.
  struct Contribution {
    Value gradient = Value::none;
    size_t op = npos;
  };
  void bind_contributions(size_t result, std::vector<Contribution> contributions) {
    contributions_[result] = std::move(contributions);
  }
  /// In the order in which they are summed up; nothing where no gradient is needed.
  const std::vector<Contribution>* contributions(size_t result) const {
    const auto known = contributions_.find(result);
    return known == contributions_.end() ? nullptr : &known->second;
  }
  void bind_written(size_t operand, size_t element, Value gradient) {
    at(operand, element).gradient = gradient;
  }

  /// Value::none, here and below, where nothing is bound.
  Flow flow(size_t operand, size_t element = 0) const { return at(operand, element).flow; }
  Value value(size_t operand, size_t element = 0) const { return flow(operand, element).value; }
  Value given(size_t result) const { return at(result, 0).gradient; }
  Value written(size_t operand, size_t element = 0) const { return at(operand, element).gradient; }
  /// What a step means by a reference: an operand or result, or the gradient of one.
  Value value(OperandRef ref, size_t element) const {
    const Entry& entry = at(ref.operand, element);
    return ref.is_gradient ? entry.gradient : entry.flow.value;
  }

  /// What a fusion of the op means by a name that it reads or writes; none for a name that is none.
  Values read(std::string_view name, bool backward) const;
  Values written(std::string_view name, bool backward) const;

 private:
  struct Entry {
    Flow flow;
    Value gradient = Value::none;
  };
  Entry& at(size_t operand, size_t element) { return entries_[first_[operand] + element]; }
  const Entry& at(size_t operand, size_t element) const {
    return entries_[first_[operand] + element];
  }
  Values values(std::optional<OperandRef> ref) const;

  const OpKind* kind_;
  std::vector<uint32_t> first_;  // by operand, and the end
  std::vector<Entry> entries_;
  std::map<size_t, std::vector<Contribution>> contributions_;  // by result
};

/// The codes of an input or a parameter that comes in them.
struct ArgumentCodes {
  const Quantizer* quantizer = nullptr;
  /// By direction.
  std::array<Value, 2> codes = {Value::none, Value::none};
};

/// Unfused at first. Casts, sums of gradients, seeds and points of rounding are steps; renames are
/// gone.
struct Draft {
  std::vector<Type> types;
  Values inputs, params, buffers, workspaces, state, outputs;
  /// Of inputs and parameters that come in codes: those of rows and of columns, Value::none where
  /// there are none.
  Values argument_codes;
  /// By the value that holds their plain numbers.
  std::map<Value, ArgumentCodes> codes_of_arguments;
  /// What backward quantizes again though it reads the numbers for nothing else: the ops asked.
  Values quantized_again;
  /// Whose tensors `workspaces` holds.
  std::vector<CachedWeight> cached_weights;
  /// Whose tensors `state` holds.
  std::vector<StateHolder> state_holders;
  /// Of the call.
  bool grad_mode = false;
  Steps forward, backward;
  /// By value of forward.
  std::vector<bool> requires_grad;
  /// One per output: what the caller gives; Value::none where the output needs no gradient.
  Values output_gradients;
  /// Of inputs, then of params.
  Values gradients;
  /// By op.
  std::vector<OperandTable> operands;
  /// Label of an op without a composite form.
  std::string no_composite;
  bool runs_user_code = false;

  Value add(Type type) {
    types.push_back(std::move(type));
    requires_grad.push_back(false);
    return static_cast<Value>(types.size() - 1);
  }
  /// A gradient of the value `of`.
  Value add_gradient(Value of) {
    const Type& type = types[index_of(of)];
    return add({type.dtype, Format::plain, Origin::gradient, Value::none, "grad of " + type.name});
  }
  at::ScalarType dtype(Value value) const { return types[index_of(value)].dtype; }
  const std::string& name(Value value) const { return types[index_of(value)].name; }
  bool needs_grad(Value value) const { return exists(value) && requires_grad[index_of(value)]; }
};

/// What patterns call a step of an op or family: "rms_norm", "rms_norm.backward".
std::string step_name(std::string_view op, const StepDef& step);

/// The step `nth` of an op and direction, with the values that `draft` has for what it reads and
/// mutates; its writes are none yet.
Step step_of_op(const OpNode& node, const OpStep& step, Part part, const OperandTable& operands);

/// Visits the reads of an op's step in the order of Step::reads: their references, a list's one by
/// one.
template <typename Visit>
void for_each_read(const OpStep& step, const OperandTable& operands, Visit&& visit) {
  size_t read = 0;
  for (const OperandRef& ref : step.reads)
    for (size_t element = 0; element < operands.count(ref.operand); ++element)
      visit(read++, ref, element);
}

}  // namespace tandem
