#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <typeinfo>

#include "core/json_fields.h"
#include "core/op_def.h"
#include "core/op_source.h"

namespace tandem {

namespace {

struct OpRegistry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<const OpKind>, std::less<>> ops;
  OpSource source;
};
OpRegistry& op_registry() {
  static OpRegistry registry;
  return registry;
}

/// A pattern joins the names of an op and its step by '.', and alternatives by '|'. With these
/// characters in names, steps of two ops could have one name.
void check_names(const OpDef& definition) {
  const auto check = [&](std::string_view name, const char* what) {
    TORCH_CHECK_VALUE(!name.empty() && name.find_first_of(".|") == std::string_view::npos,
                      "op: expected the name of ", what, " without '.' and '|', got \"",
                      shown(name), "\" in op \"", shown(definition.name), "\". Rename it.");
  };
  check(definition.name, "an op");
  for (const StepDef& step : definition.forward) check(step.name, "a step");
  for (const StepDef& step : definition.backward) {
    check(step.name, "a step");
    TORCH_CHECK_VALUE(step.name != "forward", "op ", definition.name, ": expected a step of ",
                      "backward by a name of its own, got \"forward\". Call it \"backward\".");
  }
}

/// A fusion of a family reads the options and operands of all members in the same way. Equal parse
/// functions prove equal structs of options.
void check_family(const OpDef& definition, const OpDef& other) {
  const auto are_same = [](const std::vector<StepDef>& a, const std::vector<StepDef>& b) {
    return std::ranges::equal(a, b, [](const StepDef& x, const StepDef& y) {
      return x.name == y.name && x.reads == y.reads && x.writes == y.writes;
    });
  };
  const std::type_info *type = definition.signature.type(), *others = other.signature.type();
  const bool is_parsed = definition.parse != nullptr;
  TORCH_CHECK_VALUE(
      definition.parse == other.parse &&
          (is_parsed ||
           ((type == nullptr) == (others == nullptr) && (type == nullptr || *type == *others))) &&
          are_same(definition.forward, other.forward) &&
          are_same(definition.backward, other.backward),
      "op ", definition.name, ": expected the struct of options and the steps of ", "its family ",
      definition.family, ", as ", other.name, " has them, got ", "others. Leave the family out.");
}

}  // namespace

const OpKind& op_kind(std::string_view name) {
  OpRegistry& all = op_registry();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (const auto found = all.ops.find(name); found != all.ops.end()) return *found->second;
  }
  TORCH_CHECK_VALUE(false, "op: expected one of ", c10::Join(", ", op_names()), ", got \"",
                    shown(name), "\". Register the op before the pipeline that uses it.");
}

void set_op_source(OpSource source) {
  OpRegistry& all = op_registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.source = std::move(source);
}

std::shared_ptr<const OpKind> find_op(std::string_view name) {
  OpSource source;
  {
    OpRegistry& all = op_registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    source = all.source;
  }
  if (auto made = source ? source(name) : nullptr) return made;
  return {std::shared_ptr<const OpKind>(), &op_kind(name)};
}

void register_op(const OpDef& definition) {
  check_names(definition);
  auto op = std::make_unique<const OpKind>(definition);
  OpRegistry& all = op_registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& [name, other] : all.ops)
    if (!definition.family.empty() && other->def.family == definition.family)
      check_family(definition, other->def);
  const bool is_new = all.ops.emplace(definition.name, std::move(op)).second;
  TORCH_CHECK_VALUE(is_new, "op: expected a new name, got \"", definition.name,
                    "\", which is taken. Rename the op.");
}

std::vector<std::string> op_names() {
  OpRegistry& all = op_registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::string> names;
  for (const auto& [name, op] : all.ops) names.push_back(name);
  return names;
}

}  // namespace tandem
