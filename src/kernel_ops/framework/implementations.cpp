#include "kernel_ops/framework/implementations.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <string>

namespace tandem::kernel_ops {

namespace {

/// Names in the order of their bits, the set of bits that are reasons, and the lists. They are
/// never removed: steps hold bits, and callers hold lists.
struct Tables {
  std::mutex mutex;
  std::vector<std::string> names{"reference", "dispatcher"};
  ImplementationNames reasons = 0;
  std::map<std::string, std::atomic<const void*>, std::less<>> lists;

  Tables() { names.reserve(kMostNames); }  // `names_in` returns views of the names
  static constexpr size_t kMostNames = 64;
};

Tables& tables() {
  static auto& tables = *new Tables;
  return tables;
}

/// The bit of a name or a reason, assigned now if it has none; 0 if none is left.
ImplementationNames bit_in(Tables& known, std::string_view name, bool is_reason) {
  const std::lock_guard<std::mutex> lock(known.mutex);
  size_t place = 0;
  while (place < known.names.size() &&
         (known.names[place] != name || (known.reasons >> place & 1) != is_reason))
    ++place;
  if (place == Tables::kMostNames) return 0;
  if (place == known.names.size()) {
    known.names.emplace_back(name);
    known.reasons |= ImplementationNames{is_reason} << place;
  }
  return ImplementationNames{1} << place;
}

std::vector<std::string_view> texts_in(Tables& known, ImplementationNames set, bool are_reasons) {
  const std::lock_guard<std::mutex> lock(known.mutex);
  set &= are_reasons ? known.reasons : ~known.reasons;
  std::vector<std::string_view> texts;
  for (size_t place = 0; place < known.names.size(); ++place)
    if ((set >> place & 1) != 0) texts.emplace_back(known.names[place]);
  return texts;
}

}  // namespace

ImplementationNames bit_of(std::string_view name) {
  const ImplementationNames bit = bit_in(tables(), name, /*is_reason=*/false);
  TORCH_CHECK_VALUE(bit != 0, "register_implementation: expected at most ", Tables::kMostNames,
                    " names of implementations, got \"", name,
                    "\" as one more. Give those of one device one name.");
  return bit;
}

ImplementationNames bit_of_reason(std::string_view reason) {
  return bit_in(tables(), reason, /*is_reason=*/true);
}

std::vector<std::string_view> names_in(ImplementationNames set) {
  return texts_in(tables(), set, /*are_reasons=*/false);
}

std::vector<std::string_view> reasons_in(ImplementationNames set) {
  return texts_in(tables(), set, /*are_reasons=*/true);
}

std::atomic<const void*>& detail::list_of(const char* name) {
  Tables& known = tables();
  const std::lock_guard<std::mutex> lock(known.mutex);
  return known.lists.try_emplace(name, nullptr).first->second;
}

}  // namespace tandem::kernel_ops
