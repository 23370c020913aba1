#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tandem::cli {

/// A whole number. `minus_one` allows -1 too, which stands for "what is left".
struct Whole {
  int64_t least, most;
  bool minus_one = false;
};

/// A number, never NaN or infinite.
struct Real {
  double least, most;
};

/// One of a few words.
struct Choice {
  std::vector<std::string> words;
};

/// Any text. `what` names it in help: FILE, FOLDER, LIST, CHANNEL.
struct Text {
  const char* what;
  bool may_be_empty = true;
};

/// The values that an option of the command line, or an argument of an op there, may have.
using Bounds = std::variant<Whole, Real, Choice, Text>;

/// The bounds in words that continue "to be": "a whole number from 1 to 1000".
std::string expected(const Bounds& bounds);

/// Whether all of `text` is an allowed value.
bool allows(const Bounds& bounds, std::string_view text);

}  // namespace tandem::cli
