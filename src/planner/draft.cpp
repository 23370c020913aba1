#include "planner/draft.h"

namespace tandem {

std::string step_name(std::string_view op, const StepDef& step) {
  return std::string(op) + (step.name == "forward" ? "" : "." + std::string(step.name));
}

OperandTable::OperandTable(const OpNode& node) : kind_(node.kind) {
  first_.push_back(0);
  for (const std::string_view name : kind_->operands) {
    const size_t count = is_list(name) ? kind_->def.list_length(node.options.get(), name) : 1;
    first_.push_back(first_.back() + static_cast<uint32_t>(count));
  }
  entries_.resize(first_.back());
}

Values OperandTable::values(std::optional<OperandRef> ref) const {
  Values values;
  for (size_t element = 0; ref && element < count(ref->operand); ++element)
    values.push_back(value(*ref, element));
  return values;
}

Values OperandTable::read(std::string_view name, bool backward) const {
  return values(kind_->read(name, backward));
}
Values OperandTable::written(std::string_view name, bool backward) const {
  return values(kind_->write(name, backward));
}

Value Draft::add_codes(Value of, const Quantizer& quantizer, Direction direction, Origin origin,
                       const char* which) {
  Type type{dtype(of), Format::codes, origin, Value::none,
            name(of) + " in " + std::string(format_name(quantizer)) + which};
  type.quantizer = &quantizer;
  type.direction = direction;
  return add(std::move(type));
}

Step step_of_op(const OpNode& node, const OpStep& resolved, Part part,
                const OperandTable& operands) {
  const OpDef& def = node.kind->def;
  const StepDef& step_def = *resolved.def;
  Step step;
  step.name = step_name(def.name, step_def);
  if (!def.family.empty()) step.family = step_name(def.family, step_def);
  step.run = step_def.run;
  step.phase = step_def.phase;
  step.covers = {part};
  step.options = {node.options};
  step.runs_user_code = def.runs_user_code;
  step.main_read = resolved.main_read;
  step.main_write = resolved.main_write;
  for_each_read(resolved, operands, [&](size_t, OperandRef ref, size_t element) {
    step.reads.push_back(operands.value(ref, element));
  });
  const auto expand = [&](const Names& names, const std::vector<OperandRef>& refs, Names& expanded,
                          std::vector<ListRange>& lists) {
    for (size_t i = 0; i < names.size(); ++i) {
      const size_t count = operands.count(refs[i].operand);
      if (is_list(names[i]))
        lists.push_back({static_cast<uint32_t>(expanded.size()), static_cast<uint32_t>(count)});
      expanded.insert(expanded.end(), count, names[i]);
    }
  };
  expand(step_def.reads, resolved.reads, step.read_names, step.read_lists);
  expand(step_def.writes, resolved.writes, step.write_names, step.write_lists);
  for (const OperandRef& ref : resolved.mutates)
    for (size_t element = 0; element < operands.count(ref.operand); ++element)
      step.mutates.push_back(operands.value(ref, element));
  return step;
}

}  // namespace tandem
