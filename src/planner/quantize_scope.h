// What the passes of quantize points share: the recipe's state, seeds, and the contracts of steps.
#pragma once

#include <compare>
#include <map>
#include <vector>

#include "planner/draft.h"
#include "planner/glue.h"
#include "quantization/formats/quantizer.h"

namespace tandem {

class QuantizeScope {
 public:
  /// A slot of a stateful recipe. If two ops quantize one tensor, each op has a history of its own.
  struct Slot {
    /// The index of the op; npos if the recipe has no state.
    size_t op = npos;
    /// `role`: index among the slots of its direction, within a group if the op has groups.
    size_t role = 0, group = 0;
    bool is_backward = false;
    auto operator<=>(const Slot&) const = default;
  };

  /// Adds the tensors of the recipe's state to the draft.
  QuantizeScope(const Description& description, Draft& draft);

  /// Whether the recipe keeps amaxes.
  bool is_stateful() const { return is_stateful_; }
  bool is_calibrating() const { return is_calibrating_; }
  /// Whether each quantization reports what it loses; weights are then quantized in each call.
  bool is_watched() const { return description.watched != 0 && !is_calibrating_; }

  Slot slot_of(size_t op, Role role, size_t group = 0) const;
  /// The state of `groups` consecutive slots that begin at `slot`; of one slot if `groups` is 0.
  ///
  /// Throws: c10::ValueError if the op's entry in the description names no slots.
  StateSlot state_of(const Slot& slot, size_t groups = 0);
  /// The seed for a quantizer that rounds stochastically; Value::none for others. Forward draws the
  /// seeds of gradients too, in the order of the ops, so a retained graph has equal gradients
  /// twice.
  Value seed_of(Value plain, const Quantizer& quantizer, Steps& steps);
  /// The weight before its cast to autocast's dtype: quantizing the copy would round twice.
  Value uncast(Value weight) const;
  /// The contracts of an op's step.
  const std::vector<OpStep::ContractOf>& contracts_of(const Step& step) const;
  /// Throws: c10::NotImplementedError if no format takes the dtype of `plain`.
  void check_dtype(Value plain, size_t op) const;

  const Description& description;
  Draft& draft;
  /// Whether the pass is rewriting steps of backward.
  bool is_backward = false;

 private:
  void add_state();

  std::map<Value, Value> uncast_;
  bool is_stateful_, is_calibrating_;
};

}  // namespace tandem
