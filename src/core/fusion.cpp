#include "core/fusion.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tandem {

namespace {

/// Returns the member, or the last present member before it. The first member is never absent.
const Step& last_of(const Match& match, uint32_t member) {
  while (!match.has(member)) --member;
  return *match.steps[member];
}

}  // namespace

Value Match::operator[](const MemberOperand& operand) const {
  if (operand.name == kMainResult) return written(operand);
  if (!has(operand.member)) return Value::none;
  const Step& step = *steps[operand.member];
  if (operand.name == kOtherRead) {
    Value other = Value::none;
    for (const Value value : step.reads) {
      if (!exists(value) || std::any_of(steps.begin(), steps.end(), [&](const Step* member) {
            return member != nullptr && writes(*member, value);
          }))
        continue;
      if (exists(other)) return Value::none;  // two of them, so none is the other read
      other = value;
    }
    return other;
  }
  if (const size_t read = position(step.read_names, operand.name); read != npos)
    return step.reads[read];
  return written(operand);
}

Value Match::written(const MemberOperand& operand) const {
  if (operand.name == kMainResult) {
    const Step& step = last_of(*this, operand.member);
    return step.main_write == npos ? Value::none : step.writes[step.main_write];
  }
  if (!has(operand.member)) return Value::none;
  const Step& step = *steps[operand.member];
  const size_t write = position(step.write_names, operand.name);
  return write == npos ? Value::none : step.writes[write];
}

Values Match::all(const MemberOperand& operand) const {
  if (!is_list(operand.name)) return {(*this)[operand]};
  if (!has(operand.member)) return {Value::none};
  const Step& step = *steps[operand.member];
  Values values;
  for (size_t i = 0; i < step.reads.size(); ++i)
    if (step.read_names[i] == operand.name) values.push_back(step.reads[i]);
  return values.empty() ? all_written(operand) : values;
}

Values Match::all_written(const MemberOperand& operand) const {
  if (!is_list(operand.name)) return {written(operand)};
  if (!has(operand.member)) return {Value::none};
  const Step& step = *steps[operand.member];
  Values values;
  for (size_t i = 0; i < step.writes.size(); ++i)
    if (step.write_names[i] == operand.name) values.push_back(step.writes[i]);
  return values;
}

bool Match::has(const MemberOperand& operand) const {
  if (operand.name == kMainResult) return last_of(*this, operand.member).main_write != npos;
  if (!has(operand.member)) return false;
  const Step& step = *steps[operand.member];
  if (operand.name == kOtherRead) return exists((*this)[operand]);
  return position(step.read_names, operand.name) != npos ||
         position(step.write_names, operand.name) != npos;
}

const Type& Match::type(const MemberOperand& operand) const {
  const Value value = (*this)[operand];
  TORCH_CHECK_VALUE(exists(value), "fusion: expected an operand of ", steps[operand.member]->name,
                    " that is there, got \"", operand.name, "\". Ask with has() first.");
  return types[index_of(value)];
}

}  // namespace tandem
