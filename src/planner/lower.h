// Lowering: from a list of ops to steps over values, with nothing implicit left.
#pragma once

#include "core/step.h"
#include "planner/description.h"
#include "planner/key.h"

namespace tandem {

/// The names that the steps of one op use (its operands, results and gradients), and the values behind them.
class OperandTable {
 public:
  void bind(std::string_view name, Value value) { entries_.emplace_back(name, value); }
  /// The value bound last under this name; Value::none if there is none.
  Value find(std::string_view name) const {
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry)
      if (entry->first == name) return entry->second;
    return Value::none;
  }

 private:
  std::vector<std::pair<std::string_view, Value>> entries_;
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
