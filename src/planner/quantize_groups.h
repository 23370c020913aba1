// Operands that a step quantizes by itself, the rows or the weight of each group as a tensor of
// their own: the step is told how, and given what that takes.
#pragma once

#include <map>
#include <utility>

#include "planner/quantize_scope.h"

namespace tandem {

class QuantizeGroups {
 public:
  explicit QuantizeGroups(QuantizeScope& scope) : scope_(scope) {}

  /// `read` and `place`: of the operand among the step's reads, and of `contract` among its
  /// contracts.
  ///
  /// Throws: as QuantizeScope::check_dtype and state_of.
  void quantize(Step& step, size_t read, const OpStep::ContractOf& contract, size_t place,
                const Quantizer& quantizer, Steps& steps);

  /// What keeps the amaxes that the steps so far write: at the end, as a fusion of several such
  /// steps takes all their scales before it writes any amax.
  Steps take_records() { return std::exchange(records_, {}); }

 private:
  using Operand = std::pair<size_t, Role>;  // of which op

  /// What the step reads instead of an operand: the same, behind a step that measures each group,
  /// once for all steps of the op.
  Value watched(const Step& step, size_t read, Role role, const Quantizer& quantizer, Steps& steps);
  /// What the quantizer of an operand takes: the same in all steps of the op.
  Value given(size_t op, Role role, Value plain, const Quantizer& quantizer, Steps& steps);
  /// What a step counts the rows of groups by.
  Value index_read_by(const Step& step) const;
  size_t groups_of(size_t op) const;

  QuantizeScope& scope_;
  std::map<Operand, Value> given_ = {}, watched_ = {};
  Steps records_ = {};
};

}  // namespace tandem
