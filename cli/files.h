#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tandem::cli {

/// Writes all of `bytes` to an open file, even if write(2) writes a part, is interrupted, or finds
/// a full pipe that its reader made non-blocking. Returns false and sets errno if it fails.
bool write_all(int descriptor, std::string_view bytes);

/// Writes a file, device or pipe that the user names, as `>` of a shell does. If the name is one of
/// standard output or standard error, such as /dev/stdout, the content follows what was written
/// there before.
///
/// Throws: UserError if it cannot be written (test test_explain_output).
void write_file(const std::string& path, std::string_view content);

/// The folder of the running program.
std::filesystem::path program_folder();

}  // namespace tandem::cli
