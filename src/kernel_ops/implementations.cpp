#include "kernel_ops/implementations.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <string>

namespace tandem::kernel_ops {

namespace {

/// Names in the order of their bits, and the lists. For good, as steps hold bits and callers hold
/// lists.
struct Tables {
  std::mutex mutex;
  std::vector<std::string> names{"reference", "dispatcher"};
  std::map<std::string, std::atomic<const void*>, std::less<>> lists;

  Tables() { names.reserve(kMostNames); }  // `names_in` hands out views of them
  static constexpr size_t kMostNames = 64;
};

Tables& tables() {
  static auto& tables = *new Tables;
  return tables;
}

}  // namespace

ImplementationNames bit_of(std::string_view name) {
  Tables& known = tables();
  const std::lock_guard<std::mutex> lock(known.mutex);
  size_t place = 0;
  while (place < known.names.size() && known.names[place] != name) ++place;
  if (place == known.names.size()) {
    TORCH_CHECK_VALUE(place < Tables::kMostNames, "register_implementation: expected at most ",
                      Tables::kMostNames, " names of implementations, got \"", name,
                      "\" as one more. Give those of one device one name.");
    known.names.emplace_back(name);
  }
  return ImplementationNames{1} << place;
}

std::vector<std::string_view> names_in(ImplementationNames set) {
  Tables& known = tables();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::vector<std::string_view> names;
  for (size_t place = 0; place < known.names.size(); ++place)
    if ((set >> place & 1) != 0) names.emplace_back(known.names[place]);
  return names;
}

std::atomic<const void*>& detail::list_of(const char* name) {
  Tables& known = tables();
  const std::lock_guard<std::mutex> lock(known.mutex);
  return known.lists.try_emplace(name, nullptr).first->second;
}

}  // namespace tandem::kernel_ops
