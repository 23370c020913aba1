// Operands that a step quantizes by itself, because each group (its rows or its weight) has scales
// of its own. These functions tell the step which quantizer to use and pass it scales or a seed.
#pragma once

#include <map>
#include <utility>

#include "planner/quantize_scope.h"

namespace tandem {

class QuantizeGroups {
 public:
  explicit QuantizeGroups(QuantizeScope& scope) : scope_(scope) {}

  /// `read`: the operand's index among the step's reads; `contract`: one of the step's contracts.
  ///
  /// Throws: what QuantizeScope::check_dtype and QuantizeScope::state_of throw.
  void quantize(Step& step, size_t read, const OpStep::ContractOf& contract,
                const Quantizer& quantizer, Steps& steps);

  /// The steps that record amaxes of the operands so far. They belong at the end: a fusion of
  /// several such steps reads all scales before it writes any amax.
  Steps take_records() { return std::exchange(records_, {}); }

 private:
  using Operand = std::pair<size_t, Role>;  // index of the op

  /// The result of a step that measures the operand's groups and returns it unchanged. All steps of
  /// the op share it and read it instead of the operand.
  Value watched(const Step& step, size_t read, Role role, const Quantizer& quantizer, Steps& steps);
  /// The scales or the seed that the quantizer needs for an operand; all steps of the op share
  /// them.
  Value given(size_t op, Role role, Value plain, const Quantizer& quantizer, Steps& steps);
  /// The operand that gives a step the number of rows of each group.
  Value index_read_by(const Step& step) const;
  size_t groups_of(size_t op) const;

  QuantizeScope& scope_;
  std::map<Operand, Value> given_ = {}, watched_ = {};
  Steps records_ = {};
};

}  // namespace tandem
