#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>

#include "core/json_fields.h"
#include "core/op_source.h"

namespace tandem {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, const OpDef*, std::less<>> definitions;
  OpSource source;
};
Registry& registry() {
  static Registry registry;
  return registry;
}

std::string joined(const std::vector<std::string>& names) {
  std::ostringstream text;
  for (const auto& name : names) text << (text.tellp() > 0 ? ", " : "") << name;
  return text.str();
}

Names operands_of(const OpDef& def) {
  Names operands = def.inputs;
  operands.insert(operands.end(), def.params.begin(), def.params.end());
  return operands;
}

bool is_operand(const OpDef& def, std::string_view name) {
  return position(def.inputs, name) != npos || position(def.params, name) != npos;
}
bool is_result(const OpDef& def, std::string_view name) {
  return std::any_of(def.results.begin(), def.results.end(),
                     [&](const ResultDef& result) { return result.name == name; });
}

/// The name behind "grad_", or nothing.
std::string_view behind_grad(std::string_view name) {
  constexpr std::string_view kGradient = "grad_";
  return name.starts_with(kGradient) ? name.substr(kGradient.size()) : std::string_view();
}

/// Every name that a definition uses must be one it declares, and mean one thing.
void check_names(const OpDef& def) {
  const Names operands = operands_of(def);
  Names results, known = operands;
  for (const ResultDef& result : def.results) results.push_back(result.name);
  known.insert(known.end(), results.begin(), results.end());
  for (size_t i = 0; i < known.size(); ++i)
    TORCH_CHECK_VALUE(position(known, known[i]) == i, "op ", def.name,
                      ": expected operands and results of different names, got \"", known[i],
                      "\" twice. Rename one of them.");
  const auto check = [&](std::string_view name, std::string_view where, const Names& allowed) {
    TORCH_CHECK_VALUE(position(allowed, name) != npos, "op ", def.name, ": expected ", where,
                      " to name one of its operands or results, got \"", name,
                      "\". Declare it in inputs, params or results.");
  };
  for (const Same& same : def.same) {
    check(same.name, "same", known);
    check(same.operand, "same", operands);
  }
  for (const Same& same : def.same_gradients) {
    check(behind_grad(same.name), "same_gradients", operands);
    check(behind_grad(same.operand), "same_gradients", results);
  }
  for (const auto& name : def.reemits) check(name, "reemits", known);
  for (const auto& name : def.extra_outputs) check(name, "extra_outputs", known);
  for (const BackwardStepDef& step : def.backward) {
    const auto check_one_meaning = [&](std::string_view name, bool is_declared, bool is_gradient) {
      TORCH_CHECK_VALUE(!is_declared || !is_gradient, "op ", def.name, ": expected \"", name,
                        "\" in backward to mean one thing, got an operand or result of that name ",
                        "and the gradient of another. Rename the operand or result.");
    };
    for (const auto& name : step.reads) {
      if (!backward_read(def, name))
        check(behind_grad(name).empty() ? name : behind_grad(name), "the reads of a backward step",
              known);
      TORCH_CHECK_VALUE(backward_read(def, name), "op ", def.name, ": expected ",
                        "the reads of a backward step to name gradients of its results, got \"",
                        name, "\". Only these are given to backward.");
      check_one_meaning(name, position(known, name) != npos, is_result(def, behind_grad(name)));
    }
    for (const auto& name : step.writes) {
      if (!backward_write(def, name))
        behind_grad(name).empty()
            ? check(name, "a write that is no gradient", def.reemits)
            : check(behind_grad(name), "the writes of a backward step", operands);
      check_one_meaning(name, position(def.reemits, name) != npos,
                        is_operand(def, behind_grad(name)));
    }
  }
}

}  // namespace

const OpDef& op_def(std::string_view name) {
  Registry& all = registry();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (const auto found = all.definitions.find(name); found != all.definitions.end())
      return *found->second;
  }
  TORCH_CHECK_VALUE(false, "op: expected one of ", joined(op_names()), ", got \"", shown(name),
                    "\". Register the op before the pipeline that uses it.");
}

void set_op_source(OpSource source) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.source = std::move(source);
}

std::shared_ptr<const OpDef> find_op(std::string_view name) {
  OpSource source;
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    source = all.source;
  }
  if (auto made = source ? source(name) : nullptr) return made;
  return {std::shared_ptr<const OpDef>(), &op_def(name)};
}

std::optional<OperandRef> backward_read(const OpDef& definition, std::string_view name) {
  if (is_operand(definition, name) || is_result(definition, name)) return OperandRef{name};
  const std::string_view result = behind_grad(name);
  if (is_result(definition, result)) return OperandRef{result, /*is_gradient=*/true};
  return std::nullopt;
}

std::optional<OperandRef> backward_write(const OpDef& definition, std::string_view name) {
  if (position(definition.reemits, name) != npos) return OperandRef{name};
  const std::string_view operand = behind_grad(name);
  if (is_operand(definition, operand)) return OperandRef{operand, /*is_gradient=*/true};
  return std::nullopt;
}

void register_op(const OpDef& definition) {
  check_names(definition);
  TORCH_CHECK_VALUE(definition.parse != nullptr || definition.parse_for != nullptr, "op ",
                    definition.name, ": expected a function that parses its options, got none. ",
                    "Use one that accepts only {}.");
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const bool is_new = all.definitions.emplace(definition.name, &definition).second;
  TORCH_CHECK_VALUE(is_new, "op: expected a new name, got \"", definition.name,
                    "\", which is taken. Rename the op.");
}

std::vector<std::string> op_names() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::string> names;
  for (const auto& [name, definition] : all.definitions) names.push_back(name);
  return names;
}

}  // namespace tandem
