#include "options.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "errors.h"
#include "strings.h"

namespace tandem::cli {

namespace {

[[noreturn]] void refuse(const CLI::App& app, const std::string& name, const std::string& expected,
                         const std::string& got) {
  throw UserError("expected " + name + " to be " + expected + ", got \"" + got + "\". See tandem " +
                  app.get_name() + " --help.");
}

/// Whether all of `text` is one number in [least, most].
template <typename T>
bool is_number_within(const std::string& text, T least, T most) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= least &&
         value <= most;
}

}  // namespace

CLI::Option* add_whole(CLI::App& app, const std::string& name, int64_t& value, int64_t least,
                       int64_t most, const std::string& help) {
  const auto check = [&app, name, least, most](const std::string& text) -> std::string {
    if (!is_number_within<int64_t>(text, least, most)) {
      refuse(app, name,
             format("a whole number from %lld to %lld", static_cast<long long>(least),
                    static_cast<long long>(most)),
             text);
    }
    return {};
  };
  return app.add_option(name, value, help)
      ->type_name("N")
      ->capture_default_str()
      ->take_last()
      ->check(check, "");
}

CLI::Option* add_real(CLI::App& app, const std::string& name, double& value, double least,
                      double most, const std::string& help) {
  const auto check = [&app, name, least, most](const std::string& text) -> std::string {
    if (!is_number_within<double>(text, least, most))
      refuse(app, name, format("a number from %g to %g", least, most), text);
    return {};
  };
  return app.add_option(name, value, help)
      ->type_name("X")
      ->capture_default_str()
      ->take_last()
      ->check(check, "");
}

CLI::Option* add_choice(CLI::App& app, const std::string& name, std::string& value,
                        std::vector<std::string> choices, const std::string& help) {
  const std::string listed = join(choices, "|");
  const auto check = [&app, name,
                      choices = std::move(choices)](const std::string& text) -> std::string {
    if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
      refuse(app, name, "one of " + join(choices), text);
    }
    return {};
  };
  return app.add_option(name, value, help)
      ->type_name(listed)
      ->capture_default_str()
      ->take_last()
      ->check(check, "");
}

}  // namespace tandem::cli
