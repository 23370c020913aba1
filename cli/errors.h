#pragma once

#include <stdexcept>

namespace tandem::cli {

inline constexpr int kExitOk = 0;
/// `tandem verify` found a difference, or an internal error occurred.
inline constexpr int kExitFailure = 1;
/// A UserError was printed.
inline constexpr int kExitUserError = 2;

/// A mistake of the user, as one line: "expected <what>, got <value>. <what to do>."
struct UserError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace tandem::cli
