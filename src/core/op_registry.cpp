#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>

#include "core/op_def.h"

namespace tandem {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, const OpDef*, std::less<>> definitions;
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

/// Every name that a definition uses must be one it declares.
void check_names(const OpDef& def) {
  Names operands = def.inputs;
  operands.insert(operands.end(), def.params.begin(), def.params.end());
  Names known = operands;
  for (const ResultDef& result : def.results) known.push_back(result.name);
  const auto check = [&](std::string_view name, std::string_view where, const Names& allowed) {
    TORCH_CHECK_VALUE(position(allowed, name) != npos, "op ", def.name, ": expected ", where,
                      " to name one of its operands or results, got \"", name,
                      "\". Declare it in inputs, params or results.");
  };
  for (const Same& same : def.same) {
    check(same.name, "same", known);
    check(same.operand, "same", operands);
  }
  for (const auto& name : def.reemits) check(name, "reemits", known);
  for (const auto& name : def.extra_outputs) check(name, "extra_outputs", known);
  for (const BackwardStepDef& step : def.backward) {
    for (const auto& name : step.reads)
      check(name.starts_with("grad_") ? name.substr(5) : name, "the reads of a backward step",
            known);
    for (const auto& name : step.writes)
      name.starts_with("grad_") ? check(name.substr(5), "the writes of a backward step", operands)
                                : check(name, "a write that is no gradient", def.reemits);
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
  TORCH_CHECK_VALUE(false, "op: expected one of ", joined(op_names()), ", got \"", name,
                    "\". Register the op before the pipeline that uses it.");
}

void register_op(const OpDef& definition) {
  check_names(definition);
  TORCH_CHECK_VALUE(definition.parse != nullptr, "op ", definition.name,
                    ": expected a function that parses its options, got none. ",
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
