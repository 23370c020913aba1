// Lowering: from a list of ops to steps over values, with nothing implicit left.
#pragma once

#include "core/step.h"
#include "planner/description.h"
#include "planner/key.h"

namespace tandem {

/// A value as an op meets it: from whom it comes decides where its gradient goes, and a rename has a gradient of its own.
struct Flow {
  Value value = Value::none;
  size_t edge =
      static_cast<size_t>(-1);  ///< where the gradients of this result's readers are summed up
};

/// What the steps of one op call its operands and results, and the values behind the names.
class OperandTable {
 public:
  explicit OperandTable(const OpDef* definition = nullptr) : definition_(definition) {}

  const OpDef& definition() const { return *definition_; }

  void bind(std::string_view name, Flow flow) { set(operands_, name, flow); }
  /// The gradient of a result, as backward gets it, and of an operand, as the op contributes it.
  void bind_given(std::string_view result, Value gradient) { set(given_, result, {gradient, 0}); }
  void bind_written(std::string_view operand, Value gradient) {
    set(written_, operand, {gradient, 0});
  }

  /// Value::none, here and below, where nothing is bound.
  Flow flow(std::string_view name) const { return find(operands_, name); }
  Value value(std::string_view name) const { return flow(name).value; }
  Value given(std::string_view result) const { return find(given_, result).value; }
  Value written(std::string_view operand) const { return find(written_, operand).value; }

  /// What a step of the op's backward, or a fusion of it, means by a name that it reads or writes.
  Value backward_read(std::string_view name) const {
    const auto ref = tandem::backward_read(*definition_, name);
    return !ref ? Value::none : ref->is_gradient ? given(ref->name) : value(ref->name);
  }
  Value backward_write(std::string_view name) const {
    const auto ref = tandem::backward_write(*definition_, name);
    return !ref ? Value::none : ref->is_gradient ? written(ref->name) : value(ref->name);
  }

 private:
  using Entries = std::vector<std::pair<std::string_view, Flow>>;
  static void set(Entries& entries, std::string_view name, Flow flow) {
    for (auto& [known, bound] : entries)
      if (known == name) {
        bound = flow;
        return;
      }
    entries.emplace_back(name, flow);
  }
  static Flow find(const Entries& entries, std::string_view name) {
    for (const auto& [known, bound] : entries)
      if (known == name) return bound;
    return {};
  }

  const OpDef* definition_;
  Entries operands_, given_, written_;
};

/// An unfused program. Casts, sums of gradients, seeds and quantize points are steps; renames are gone.
struct Lowered {
  std::vector<Type> types;
  Values inputs, params, workspaces, outputs;
  Values workspace_weights;  ///< one parameter per four workspaces
  Steps forward, backward;
  std::vector<bool> requires_grad;  ///< by value of forward
  Values
      output_gradients;  ///< one per output: what the caller gives; Value::none where the output needs no gradient
  Values gradients;                    ///< of inputs, then of params
  std::vector<OperandTable> operands;  ///< by op
  std::string no_composite;            ///< label of an op without a composite form
  bool runs_user_code = false;

  Value add(Type type) {
    types.push_back(std::move(type));
    requires_grad.push_back(false);
    return static_cast<Value>(types.size() - 1);
  }
};

/// Lowers the ops of `description` for tensors as `key` has them: inputs first, then parameters. Throws c10::ValueError where the
/// number of tensors does not fit.
Lowered lower(const Description& description, const PlanKey& key);

}  // namespace tandem
