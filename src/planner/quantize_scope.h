// What the passes of quantize points know of a call under a recipe: where it keeps its state, what
// quantizers are given, how an op's operands are quantized.
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
  /// Where a recipe with a state keeps that of a tensor: two that quantize one tensor have a
  /// history each.
  struct Slot {
    /// npos: the recipe has no state.
    size_t op = npos;
    /// Among those of its direction; of an op with groups, those of the group.
    size_t role = 0, group = 0;
    bool is_backward = false;
    auto operator<=>(const Slot&) const = default;
  };

  /// Adds the tensors of the recipe's state to the draft.
  QuantizeScope(const Description& description, Draft& draft);

  /// Whether the recipe keeps amaxes.
  bool is_stateful() const { return is_stateful_; }
  bool is_calibrating() const { return is_calibrating_; }
  /// Each quantization tells of itself, those of weights in each call.
  bool is_watched() const { return description.watched != 0 && !is_calibrating_; }

  Slot slot_of(size_t op, Role role, size_t group = 0) const;
  /// `groups`: of how many the slots are, from that of `slot` on; 0: of none.
  ///
  /// Throws: c10::ValueError where the op does not say where its amaxes go.
  StateSlot state_of(const Slot& slot, size_t groups = 0);
  /// What a quantizer that rounds by chance is given. Seeds of gradients are drawn in forward too,
  /// in the order of the ops: a graph that is retained has the same gradients twice.
  Value seed_of(Value plain, const Quantizer& quantizer, Steps& steps);
  /// A weight is quantized as it is: a copy in autocast's dtype would round twice.
  Value uncast(Value weight) const;
  /// Of the step of an op.
  const std::vector<OpStep::ContractOf>& contracts_of(const Step& step) const;
  /// Throws: c10::NotImplementedError where no format takes the dtype.
  void check_dtype(Value plain, size_t op) const;

  const Description& description;
  Draft& draft;
  /// Whether the steps of backward are the ones that are rewritten.
  bool is_backward = false;

 private:
  void add_state();

  std::map<Value, Value> uncast_;
  bool is_stateful_, is_calibrating_;
};

}  // namespace tandem
