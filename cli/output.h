#pragma once

#include <string_view>

namespace tandem::cli {

/// Prepares the process for outputs that fail. Writing to a closed pipe, or to a file at the limit
/// of `ulimit -f`, becomes an error of the write instead of ending the process. No file that is
/// opened later gets the number of a standard stream that the caller closed.
void guard_standard_streams();

/// Writes all of `text` to standard output at once.
///
/// Throws: UserError if it cannot be written (test test_output_that_cannot_be_written).
void print(std::string_view text);

}  // namespace tandem::cli
