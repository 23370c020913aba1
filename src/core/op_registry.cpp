#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <mutex>
#include <sstream>

#include "core/json_fields.h"
#include "core/op_def.h"
#include "core/op_source.h"

namespace tandem {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<const OpKind>, std::less<>> ops;
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

}  // namespace

const OpKind& op_kind(std::string_view name) {
  Registry& all = registry();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (const auto found = all.ops.find(name); found != all.ops.end()) return *found->second;
  }
  TORCH_CHECK_VALUE(false, "op: expected one of ", joined(op_names()), ", got \"", shown(name),
                    "\". Register the op before the pipeline that uses it.");
}

void set_op_source(OpSource source) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.source = std::move(source);
}

std::shared_ptr<const OpKind> find_op(std::string_view name) {
  OpSource source;
  {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    source = all.source;
  }
  if (auto made = source ? source(name) : nullptr) return made;
  return {std::shared_ptr<const OpKind>(), &op_kind(name)};
}

void register_op(const OpDef& definition) {
  auto op = std::make_unique<const OpKind>(definition);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const bool is_new = all.ops.emplace(definition.name, std::move(op)).second;
  TORCH_CHECK_VALUE(is_new, "op: expected a new name, got \"", definition.name,
                    "\", which is taken. Rename the op.");
}

std::vector<std::string> op_names() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::string> names;
  for (const auto& [name, op] : all.ops) names.push_back(name);
  return names;
}

}  // namespace tandem
