// A plan that is being built: the passes of the planner change it in turn.
#pragma once

#include <array>
#include <map>

#include "core/plan.h"
#include "planner/description.h"

namespace tandem {

/// A value together with the edge that its gradient takes. A rename has the value of its source and
/// an edge of its own.
struct Flow {
  Value value = Value::none;
  /// Where the gradients that the value's readers contribute are summed; npos: nowhere.
  size_t edge = npos;
};

/// The values behind the operands and results of one op, and behind their gradients. A list operand
/// has several elements.
class OperandTable {
 public:
  explicit OperandTable(const OpNode& node);

  const OpKind& kind() const { return *kind_; }
  size_t count(size_t operand) const { return first_[operand + 1] - first_[operand]; }

  /// The index of an operand's element among the elements of all operands.
  size_t place(size_t operand, size_t element) const { return first_[operand] + element; }

  void bind(size_t operand, Flow flow, size_t element = 0) { at(operand, element).flow = flow; }
  /// Binds the gradient that backward is given for a result.
  void bind_given(size_t result, Value gradient) { at(result, 0).gradient = gradient; }
  /// What one reader of a result contributes to its gradient. `op` is npos if the reader is the
  /// caller or a step of the planner.
  struct Contribution {
    Value gradient = Value::none;
    size_t op = npos;
  };
  void bind_contributions(size_t result, std::vector<Contribution> contributions) {
    contributions_[result] = std::move(contributions);
  }
  /// The contributions in the order in which they are summed; nullptr if no gradient is needed.
  const std::vector<Contribution>* contributions(size_t result) const {
    const auto known = contributions_.find(result);
    return known == contributions_.end() ? nullptr : &known->second;
  }
  void bind_written(size_t operand, size_t element, Value gradient) {
    at(operand, element).gradient = gradient;
  }

  /// The functions below return Value::none if nothing is bound.
  Flow flow(size_t operand, size_t element = 0) const { return at(operand, element).flow; }
  Value value(size_t operand, size_t element = 0) const { return flow(operand, element).value; }
  Value given(size_t result) const { return at(result, 0).gradient; }
  Value written(size_t operand, size_t element = 0) const { return at(operand, element).gradient; }
  /// The value of a reference: an operand or result, or the gradient of one.
  Value value(OperandRef ref, size_t element) const {
    const Entry& entry = at(ref.operand, element);
    return ref.is_gradient ? entry.gradient : entry.flow.value;
  }

  /// The values that a name in a fusion of the op refers to, among what the op reads or writes;
  /// Value::none for an unknown name.
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
  std::vector<uint32_t> first_;  // by operand; one entry more for the end
  std::vector<Entry> entries_;
  std::map<size_t, std::vector<Contribution>> contributions_;  // by result
};

/// The codes of an input or a parameter that the caller passes in codes.
struct ArgumentCodes {
  const Quantizer* quantizer = nullptr;
  /// The value of each direction; Value::none if there is none.
  std::array<Value, 2> codes = {Value::none, Value::none};
};

/// A plan before it is finished, unfused at first. Casts, sums of gradients, seeds and points of
/// rounding are steps; renames have no step of their own.
struct Draft : PlanParts {
  /// Keyed by the value that stands for the dequantized numbers.
  std::map<Value, ArgumentCodes> codes_of_arguments;
  /// Values that forward keeps so that backward can quantize them: the op demands that.
  Values quantized_again;
  /// Whether the call records gradients.
  bool grad_mode = false;
  /// By value of forward: whether it requires a gradient.
  std::vector<bool> requires_grad;
  /// By op of the description.
  std::vector<OperandTable> operands;

  Value add(Type type, bool needs_grad = false) {
    types.push_back(std::move(type));
    requires_grad.push_back(needs_grad);
    return static_cast<Value>(types.size() - 1);
  }
  /// Adds one tensor that a step of forward writes.
  Value add_result(at::ScalarType dtype, std::string name, bool needs_grad = false) {
    return add({dtype, Format::plain, Origin::result, Value::none, std::move(name)}, needs_grad);
  }
  /// Adds the codes of the value `of` in one direction. `which` ends their name.
  Value add_codes(Value of, const Quantizer& quantizer, Direction direction,
                  Origin origin = Origin::result, const char* which = "");
  /// Adds the gradient of the value `of`.
  Value add_gradient(Value of) {
    const Type& type = types[index_of(of)];
    return add({type.dtype, Format::plain, Origin::gradient, Value::none, "grad of " + type.name});
  }
  at::ScalarType dtype(Value value) const { return types[index_of(value)].dtype; }
  const std::string& name(Value value) const { return types[index_of(value)].name; }
  bool needs_grad(Value value) const { return exists(value) && requires_grad[index_of(value)]; }
};

/// The name that patterns use for a step of an op or family: "rms_norm", "rms_norm.backward".
std::string step_name(std::string_view op, const StepDef& step);

/// The step `part` of an op, with the values that `operands` has for its reads and mutations. Its
/// writes are empty.
Step step_of_op(const OpNode& node, const OpStep& step, Part part, const OperandTable& operands);

/// Visits the reads of an op's step in the order of Step::reads: index of the read, reference, and
/// index of the element in a list operand.
template <typename Visit>
void for_each_read(const OpStep& step, const OperandTable& operands, Visit&& visit) {
  size_t read = 0;
  for (const OperandRef& ref : step.reads)
    for (size_t element = 0; element < operands.count(ref.operand); ++element)
      visit(read++, ref, element);
}

}  // namespace tandem
