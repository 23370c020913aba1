#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::cli {

/// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

/// "a, b, c"
std::string join(const std::vector<std::string>& parts, std::string_view separator = ", ");

/// Parts between separators; empty parts are kept.
std::vector<std::string> split(std::string_view text, char separator);

/// "512 B", "1.20 MB": decimal bytes, in three digits.
std::string bytes_text(double bytes);

/// A whole HTML document around `body`.
std::string html_page(std::string_view title, std::string_view body);

/// The name in `names` with the fewest edits from `word`, or "" if none is close.
std::string closest(std::string_view word, const std::vector<std::string>& names);

}  // namespace tandem::cli
