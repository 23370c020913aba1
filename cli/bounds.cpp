#include "bounds.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "text.h"

namespace tandem::cli {

namespace {

/// Whether all of `text` is one number in [least, most]. A number that overflows T is not.
template <typename T>
bool is_number_within(std::string_view text, T least, T most) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= least &&
         value <= most;
}

struct Words {
  std::string operator()(const Whole& whole) const {
    return format("%sa whole number from %lld to %lld", whole.minus_one ? "-1 or " : "",
                  static_cast<long long>(whole.least), static_cast<long long>(whole.most));
  }
  std::string operator()(const Real& real) const {
    if (real.most == std::numeric_limits<double>::max()) {
      return real.least == -real.most ? "a finite number"
                                      : format("a finite number that is at least %g", real.least);
    }
    return format("a number from %g to %g", real.least, real.most);
  }
  std::string operator()(const Choice& choice) const {
    return choice.words.size() == 1 ? choice.words.front() : "one of " + join(choice.words);
  }
  std::string operator()(const Text& text) const {
    return text.may_be_empty ? "a text" : "a text that is not empty";
  }
};

struct Allows {
  std::string_view text;

  bool operator()(const Whole& whole) const {
    return is_number_within<int64_t>(text, whole.least, whole.most) ||
           (whole.minus_one && text == "-1");
  }
  bool operator()(const Real& real) const {
    return is_number_within<double>(text, real.least, real.most);
  }
  bool operator()(const Choice& choice) const {
    return std::find(choice.words.begin(), choice.words.end(), text) != choice.words.end();
  }
  bool operator()(const Text& any) const { return any.may_be_empty || !text.empty(); }
};

}  // namespace

std::string expected(const Bounds& bounds) { return std::visit(Words{}, bounds); }

bool allows(const Bounds& bounds, std::string_view text) {
  return std::visit(Allows{text}, bounds);
}

}  // namespace tandem::cli
