#pragma once

#include <string_view>

namespace tandem::cli {

/// Prepares the process for outputs that end: a closed pipe, or a file at the limit of `ulimit -f`,
/// is an error of the write rather than the end of the process, and no file that is opened later
/// takes the number of a standard stream that the caller closed.
void guard_standard_streams();

/// Writes `text` to standard output, all of it, at once.
///
/// Throws: UserError when it cannot be written (test test_output_that_cannot_be_written).
void print(std::string_view text);

}  // namespace tandem::cli
