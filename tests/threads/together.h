// Functions that run on several threads at once.
#pragma once

#include <exception>
#include <latch>
#include <thread>
#include <vector>

namespace tandem::testing {

/// Calls `body(t)` for t in [0, threads), each on a thread of its own; all begin together. What one
/// throws is thrown again.
template <typename Body>
void together(size_t threads, Body&& body) {
  std::latch begin(static_cast<std::ptrdiff_t>(threads));
  std::vector<std::exception_ptr> errors(threads);
  {
    std::vector<std::jthread> running;
    for (size_t t = 0; t < threads; ++t)
      running.emplace_back([&, t] {
        begin.arrive_and_wait();
        try {
          body(t);
        } catch (...) {
          errors[t] = std::current_exception();
        }
      });
  }
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace tandem::testing
