#pragma once

#include <filesystem>
#include <string_view>

namespace tandem::cli {

/// Writes all of `bytes` to an open file, even if write(2) writes a part, is interrupted, or finds
/// a full pipe that its reader made non-blocking. Returns false and sets errno if it fails.
bool write_all(int descriptor, std::string_view bytes);

/// Writes a file that the user names. A regular file is replaced atomically; a device or a pipe is
/// written to. A symbolic link stays: the file that it leads to is written, and created if it does
/// not exist. If the name refers to an open file, such as /dev/stdout or /dev/fd/3, the content is
/// appended to it.
///
/// Throws: UserError if it cannot be written (tests test_explain_output,
///         test_explain_output_through_links_to_nothing, test_explain_output_to_a_protected_file).
void write_file(const std::filesystem::path& path, std::string_view content);

/// The folder of the running program.
std::filesystem::path program_folder();

}  // namespace tandem::cli
