// Resolves the names of definitions: every name must be declared, and have one meaning.
#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/json_fields.h"
#include "core/op_def.h"

namespace tandem {

namespace {

/// Returns the name after "grad_", or an empty text.
std::string_view behind_grad(std::string_view name) {
  constexpr std::string_view kGradient = "grad_";
  return name.starts_with(kGradient) ? name.substr(kGradient.size()) : std::string_view();
}

bool is_name(std::string_view name) {
  if (is_list(name)) name.remove_suffix(2);
  return !name.empty() && std::ranges::all_of(name, [](char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  });
}

size_t place(const OpKind& op, std::string_view name, std::string_view where, size_t first,
             size_t last) {
  const size_t found = position(op.operands, name);
  TORCH_CHECK_VALUE(found != npos && found >= first && found < last, "op ", op.def.name,
                    ": expected ", where, " to name one of its operands or results, got \"", name,
                    "\". Declare it in inputs, params or results.");
  return found;
}

void check_lists_last(const OpKind& op, const Names& names, std::string_view step) {
  TORCH_CHECK_VALUE(std::ranges::is_sorted(names, {}, is_list), "op ", op.def.name, ": expected ",
                    "lists behind all other operands of step \"", step,
                    "\", got one before. Name them last.");
}

/// Throws where a name that a backward step reads or writes could be an operand and the gradient of
/// another one.
void check_one_meaning(const OpKind& op, std::string_view name, bool is_declared,
                       bool is_gradient) {
  TORCH_CHECK_VALUE(!is_declared || !is_gradient, "op ", op.def.name, ": expected \"", name,
                    "\" in backward to mean one thing, got an operand or result of that name ",
                    "and the gradient of another. Rename the operand or result.");
}

/// Resolves the operands of a step's products, with the roles that the op declares.
void resolve_contracts(const OpKind& op, const StepDef& def, OpStep& step) {
  for (const Contract& contract : def.contracts) {
    const size_t read = position(def.reads, contract.operand);
    const auto role = std::ranges::find(op.def.roles, contract.operand, &RoleOf::operand);
    TORCH_CHECK_VALUE(read != npos && role != op.def.roles.end(), "op ", op.def.name,
                      ": expected contracts of step \"", def.name, "\" to name reads that have a ",
                      "role, got \"", contract.operand,
                      "\". Declare it in its reads and in roles.");
    step.contracts.push_back(
        {step.reads[read], contract.along, role->role, contract.by_group, contract.keeps_numbers});
  }
}

/// Throws for a role of an operand that no step multiplies.
void check_roles(const OpKind& op) {
  for (const RoleOf& role : op.def.roles) {
    if (!op.read(role.operand, /*backward=*/true))
      place(op, role.operand, "roles", 0, op.operands.size());
    const auto multiplies = [&](const StepDef& step) {
      return std::ranges::find(step.contracts, role.operand, &Contract::operand) !=
             step.contracts.end();
    };
    TORCH_CHECK_VALUE(std::ranges::any_of(op.def.forward, multiplies) ||
                          std::ranges::any_of(op.def.backward, multiplies),
                      "op ", op.def.name, ": expected a step whose contracts name \"", role.operand,
                      "\", which has a role, got none. Say along which dimension it is summed.");
  }
}

OpStep resolve_forward(const OpKind& op, const StepDef& def) {
  OpStep step;
  step.def = &def;
  check_lists_last(op, def.reads, def.name);
  check_lists_last(op, def.writes, def.name);
  for (const auto& name : def.reads)
    step.reads.push_back({place(op, name, "the reads of a step", 0, op.first_temporary)});
  for (const auto& name : def.writes)
    step.writes.push_back(
        {place(op, name, "the writes of a step", op.first_result, op.first_temporary)});
  for (const auto& name : def.mutates)
    step.mutates.push_back({place(op, name, "what a step mutates", 0, op.first_result)});
  resolve_contracts(op, def, step);
  step.main_read = position(def.reads, op.operands[0]);
  step.main_write = position(def.writes, op.operands[op.first_result]);
  return step;
}

OpStep resolve_backward(const OpKind& op, const StepDef& def) {
  OpStep step;
  step.def = &def;
  check_lists_last(op, def.reads, def.name);
  check_lists_last(op, def.writes, def.name);
  for (const auto& name : def.reads) {
    const auto ref = op.read(name, /*backward=*/true);
    if (!ref)
      place(op, behind_grad(name).empty() ? name : behind_grad(name),
            "the reads of a backward step", 0, op.operands.size());
    TORCH_CHECK_VALUE(ref, "op ", op.def.name, ": expected ",
                      "the reads of a backward step to name gradients of its results, got \"", name,
                      "\". Only these are given to backward.");
    const size_t result = position(op.operands, behind_grad(name));
    check_one_meaning(op, name, position(op.operands, name) != npos,
                      result != npos && op.is_result(result));
    if (*ref == OperandRef{op.first_result, /*is_gradient=*/true})
      step.main_read = step.reads.size();
    step.reads.push_back(*ref);
  }
  for (const auto& name : def.writes) {
    const auto ref = op.write(name, /*backward=*/true);
    if (!ref && behind_grad(name).empty()) {
      TORCH_CHECK_VALUE(false, "op ", op.def.name, ": expected a write that is no gradient to ",
                        "name one of its operands or results, got \"", name,
                        "\". Declare it in inputs, params or results, and in reemits.");
    }
    if (!ref) place(op, behind_grad(name), "the writes of a backward step", 0, op.first_buffer);
    const size_t operand = position(op.operands, behind_grad(name));
    check_one_meaning(op, name, !ref->is_gradient, operand != npos && !op.is_result(operand));
    if (*ref == OperandRef{0, /*is_gradient=*/true}) step.main_write = step.writes.size();
    step.writes.push_back(*ref);
  }
  for (const auto& name : def.mutates)
    step.mutates.push_back(
        {place(op, name, "what a step mutates", op.first_buffer, op.first_result)});
  for (const auto& name : def.absorbs)
    step.absorbs.push_back(
        {place(op, behind_grad(name), "what a step absorbs", op.first_param, op.first_buffer),
         /*is_gradient=*/true});
  resolve_contracts(op, def, step);
  return step;
}

/// Checks that options and shapes fit together.
void check_signature(const OpDef& def) {
  const auto options = def.signature.options();
  for (const OptionDef& option : options)
    TORCH_CHECK_VALUE(option.check.is_required || allows(option, option.otherwise), "op ", def.name,
                      ": expected the default of option ", option.name, " to be ", expected(option),
                      ", got ", shown_json(json_of(option.otherwise)),
                      ". Change it, or its check.");
  for (const ParamDef& param : def.params) {
    for (const auto& size : param.shape)
      TORCH_CHECK_VALUE(std::ranges::find(def.sizes, size, &SizeDef::name) != def.sizes.end(),
                        "op ", def.name, ": expected the shape of ", param.name,
                        " to consist of its sizes, got \"", size, "\". Declare it in sizes.");
    const auto flag = std::ranges::find(options, param.zeros_if, &OptionDef::name);
    TORCH_CHECK_VALUE(param.zeros_if.empty() ||
                          (flag != options.end() && std::holds_alternative<bool>(flag->otherwise)),
                      "op ", def.name, ": expected zeros_if of ", param.name,
                      " to name an option that is true or false, got \"", param.zeros_if,
                      "\". Declare it in signature.");
  }
}

/// Checks that each result is written by a step, drawn as a seed, or an operand.
void check_results(const OpKind& op) {
  if (op.forward.empty() && !op.in_place && op.same.size() == op.def.results.size()) return;
  for (size_t result = op.first_result; result < op.first_temporary; ++result) {
    const bool is_written = std::ranges::any_of(op.forward, [&](const OpStep& step) {
      return std::ranges::find(step.writes, OperandRef{result}) != step.writes.end();
    });
    TORCH_CHECK_VALUE(is_written || op.is_same(result) || op.result(result).kind == ResultDef::seed,
                      "op ", op.def.name, ": expected a step of forward that writes result \"",
                      op.operands[result], "\", got none. Name it in a step's writes.");
  }
}

}  // namespace

OpKind::OpKind(const OpDef& definition) : def(definition), operands(definition.inputs) {
  first_param = operands.size();
  for (const ParamDef& param : def.params) operands.push_back(param.name);
  first_buffer = operands.size();
  operands.insert(operands.end(), def.buffers.begin(), def.buffers.end());
  first_result = operands.size();
  for (const ResultDef& result : def.results) operands.push_back(result.name);
  first_temporary = operands.size();
  operands.insert(operands.end(), def.temporaries.begin(), def.temporaries.end());
  for (size_t i = 0; i < operands.size(); ++i)
    TORCH_CHECK_VALUE(position(operands, operands[i]) == i, "op ", def.name,
                      ": expected operands and results of different names, got \"", operands[i],
                      "\" twice. Rename one of them.");
  for (const auto& name : operands)
    TORCH_CHECK_VALUE(is_name(name), "op ", def.name, ": expected operands and results named by ",
                      "letters, digits and _, with [] behind a list, got \"", name,
                      "\". Rename it.");
  for (const ResultDef& result : def.results)
    TORCH_CHECK_VALUE(!is_list(result.name), "op ", def.name, ": expected results that are one ",
                      "value each, got list \"", result.name, "\". Declare one tensor.");
  TORCH_CHECK_VALUE(def.list_length != nullptr || std::ranges::none_of(operands, is_list), "op ",
                    def.name, ": expected list_length, which tells how long its lists are, ",
                    "got none. Define it.");
  for (const Same& each : def.same)
    same.push_back({place(*this, each.name, "same", 0, operands.size()),
                    place(*this, each.operand, "same", 0, first_buffer)});
  for (const Same& each : def.same_gradients)
    same_gradients.push_back(
        {place(*this, behind_grad(each.name), "same_gradients", 0, first_buffer),
         place(*this, behind_grad(each.operand), "same_gradients", first_result, first_temporary)});
  for (const auto& name : def.reemits)
    reemits.push_back(place(*this, name, "reemits", 0, operands.size()));
  for (const auto& name : def.reemit_reads)
    reemit_reads.push_back(place(*this, name, "reemit_reads", 0, operands.size()));
  for (const auto& name : def.indices)
    indices.push_back(place(*this, name, "indices", 1, first_param));
  for (const auto& name : def.extra_outputs)
    extra_outputs.push_back(place(*this, name, "extra_outputs", first_result, operands.size()));
  for (const StepDef& step : def.forward) forward.push_back(resolve_forward(*this, step));
  if (def.in_place) in_place = resolve_forward(*this, *def.in_place);
  for (const StepDef& step : def.backward) backward.push_back(resolve_backward(*this, step));
  check_signature(def);
  check_roles(*this);
  check_results(*this);
}

bool OpKind::is_same(size_t result) const {
  return std::ranges::any_of(same, [&](const SameOperand& each) { return each.name == result; });
}

std::optional<OperandRef> OpKind::read(std::string_view name, bool backward) const {
  if (const size_t operand = position(operands, name); operand != npos) return OperandRef{operand};
  if (!backward) return std::nullopt;
  const size_t result = position(operands, behind_grad(name));
  if (result == npos || !is_result(result)) return std::nullopt;
  return OperandRef{result, /*is_gradient=*/true};
}

std::optional<OperandRef> OpKind::write(std::string_view name, bool backward) const {
  const size_t written = position(operands, name);
  if (!backward && written != npos) return OperandRef{written};
  if (backward &&
      (position(def.reemits, name) != npos || (written != npos && written >= first_temporary)))
    return OperandRef{written};
  const size_t operand = position(operands, behind_grad(name));
  if (!backward || operand == npos || operand >= first_buffer) return std::nullopt;
  return OperandRef{operand, /*is_gradient=*/true};
}

size_t extra_input_count(const OpDef& definition, const void* options) {
  const size_t absent = definition.absent_inputs == nullptr ? 0 : definition.absent_inputs(options);
  return definition.inputs.size() - 1 - absent;
}

SlotCount quantize_slots(const OpDef& definition, const void* options) {
  if (definition.is_quantize_point) return {1, 1};
  const auto groups =
      definition.groups == nullptr ? 1 : static_cast<int64_t>(definition.groups(options));
  SlotCount count;
  for (const RoleOf& each : definition.roles)
    (each.role == Role::grad_output ? count.backward : count.forward) += groups;
  return count;
}

SlotCount quantize_slots(const OpDef& definition, const OptionValues& options) {
  if (definition.groups == nullptr) return quantize_slots(definition, nullptr);
  return quantize_slots(definition, definition.signature.parse(definition.name, options).get());
}

}  // namespace tandem
