#include "text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <numeric>

namespace tandem::cli {

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(arguments);
  va_end(again);
  return text;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string joined;
  for (const std::string& part : parts) {
    if (&part != &parts.front()) joined += separator;
    joined += part;
  }
  return joined;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0;;) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == text.size()) return parts;
    begin = end + 1;
  }
}

std::string bytes_text(double bytes) {
  constexpr std::array kUnits{"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (std::abs(bytes) >= 1000 && unit + 1 < kUnits.size()) bytes /= 1000, ++unit;
  const bool is_whole = unit == 0 && bytes == std::floor(bytes);
  const int decimals = is_whole || std::abs(bytes) >= 100 ? 0 : std::abs(bytes) >= 10 ? 1 : 2;
  return format("%.*f %s", decimals, bytes, kUnits[unit]);
}

std::string html_page(std::string_view title, std::string_view body) {
  std::string page =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>";
  for (const char c : title) page += c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
  return page.append("</title>\n</head>\n<body>\n").append(body).append("</body>\n</html>\n");
}

namespace {

/// Levenshtein distance: insertions, deletions and substitutions.
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

}  // namespace

std::string closest(std::string_view word, const std::vector<std::string>& names) {
  std::string best;
  size_t fewest = word.size() / 3 + 2;  // a third of the letters and one more may be wrong
  for (const std::string& name : names) {
    if (const size_t distance = edits(word, name); distance < fewest) {
      fewest = distance;
      best = name;
    }
  }
  return best;
}

}  // namespace tandem::cli
