// Lists of implementations, of each kernel op and of products: read without a lock, and they only
// grow.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tandem/export.h"

namespace tandem::kernel_ops {

/// Names of implementations as a set, a bit for each: what a step has taken. Reasons have bits too:
/// why codes were decoded for a product.
using ImplementationNames = uint64_t;

/// Of every kernel op and of products: torch's own differentiable operations, always the last
/// resort.
inline constexpr ImplementationNames kReference = 1;
/// A call that torch's dispatcher sees: it finds the implementation, and a compiler may do so
/// later.
inline constexpr ImplementationNames kDispatcher = 2;

/// The bit of a name. Throws c10::ValueError where 64 other names have one.
TANDEM_API ImplementationNames bit_of(std::string_view name);
/// The names in a set, those of the library first.
TANDEM_API std::vector<std::string_view> names_in(ImplementationNames set);

/// The bit of a reason, by its text. 0 where 64 names and reasons have bits: `explain` says less
/// then, and nothing else changes.
TANDEM_API ImplementationNames bit_of_reason(std::string_view reason);
/// The reasons in a set.
TANDEM_API std::vector<std::string_view> reasons_in(ImplementationNames set);

namespace detail {

/// A row of a list and what stands behind it. Never removed.
template <typename Row>
struct Listed {
  Row row;
  ImplementationNames bit;
  const Listed* next;
};

/// The head of the list that belongs to `name`. In the library, so that whoever is linked to it
/// means the same list.
TANDEM_API std::atomic<const void*>& list_of(const char* name);

/// Puts a row before those there are.
template <typename Row>
void prepend(std::atomic<const void*>& list, const Row& row) {
  auto* added = new Listed<Row>{row, bit_of(row.name), nullptr};
  const void* next = list.load(std::memory_order_relaxed);
  do {
    added->next = static_cast<const Listed<Row>*>(next);
  } while (!list.compare_exchange_weak(next, added, std::memory_order_release,
                                       std::memory_order_relaxed));
}

}  // namespace detail
}  // namespace tandem::kernel_ops
