// Lists of implementations: one for each kernel op and one for products. They are read without a
// lock and only grow.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tandem/export.h"

namespace tandem::kernel_ops {

/// A set of names of implementations, one bit per name: those that a step has taken. Reasons why
/// codes were dequantized for a product have bits too.
using ImplementationNames = uint64_t;

/// The bit of "reference": torch's differentiable operations, the last resort of every kernel op
/// and of products.
inline constexpr ImplementationNames kReference = 1;
/// The bit of "dispatcher": a dispatched call, which finds the implementation itself, perhaps later
/// in compiled code.
inline constexpr ImplementationNames kDispatcher = 2;

/// The bit of a name. Throws c10::ValueError if 64 other names and reasons have bits.
TANDEM_API ImplementationNames bit_of(std::string_view name);
/// The names in a set, in the order of their bits: the library's first.
TANDEM_API std::vector<std::string_view> names_in(ImplementationNames set);

/// The bit of a reason, by its text; 0 if 64 names and reasons have bits. Then `explain` omits the
/// reason.
TANDEM_API ImplementationNames bit_of_reason(std::string_view reason);
/// The reasons in a set.
TANDEM_API std::vector<std::string_view> reasons_in(ImplementationNames set);

namespace detail {

/// An element of a list of implementations. It is never removed.
template <typename Row>
struct Listed {
  Row row;
  ImplementationNames bit;
  const Listed* next;
};

/// The head of the list that belongs to `name`. It is a variable of the library, so that everything
/// linked to the library uses one list.
TANDEM_API std::atomic<const void*>& list_of(const char* name);

/// Adds a row at the front of a list.
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
