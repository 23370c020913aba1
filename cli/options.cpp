#include "options.h"

#include <CLI/CLI.hpp>

#include "errors.h"
#include "strings.h"

namespace tandem::cli {

namespace {

/// The type of a value as help shows it.
std::string type_name(const Bounds& bounds) {
  if (const auto* choice = std::get_if<Choice>(&bounds)) return join(choice->words, "|");
  if (const auto* text = std::get_if<Text>(&bounds)) return text->what;
  return std::holds_alternative<Whole>(bounds) ? "N" : "X";
}

template <typename T>
void add(CLI::App& app, const std::string& name, T& value, const Bounds& bounds,
         const std::string& help, const std::string& group) {
  const auto check = [&app, name, bounds](const std::string& text) -> std::string {
    if (!allows(bounds, text)) {
      throw UserError("expected " + name + " to be " + expected(bounds) + ", got \"" + text +
                      "\". See tandem " + app.get_name() + " --help.");
    }
    return {};
  };
  CLI::Option* option = app.add_option(name, value, help)
                            ->type_name(type_name(bounds))
                            ->capture_default_str()
                            ->take_last()
                            ->check(check, "");
  if (!group.empty()) option->group(group);
}

}  // namespace

CLI::App& add_command(CLI::App& tandem, const std::string& name, const std::string& description,
                      const std::string& footer, Action& action, Action run) {
  CLI::App& app = *tandem.add_subcommand(name, description);
  app.footer(footer);
  app.callback([&action, run = std::move(run)] { action = run; });
  return app;
}

void add_option(CLI::App& app, const std::string& name, int64_t& value, const Bounds& bounds,
                const std::string& help, const std::string& group) {
  add(app, name, value, bounds, help, group);
}

void add_option(CLI::App& app, const std::string& name, double& value, const Bounds& bounds,
                const std::string& help, const std::string& group) {
  add(app, name, value, bounds, help, group);
}

void add_option(CLI::App& app, const std::string& name, std::string& value, const Bounds& bounds,
                const std::string& help, const std::string& group) {
  add(app, name, value, bounds, help, group);
}

void add_flag(CLI::App& app, const std::string& name, const std::function<void()>& set,
              const std::string& help, const std::string& group) {
  CLI::Option* option = app.add_flag_callback(name, set, help);
  if (!group.empty()) option->group(group);
}

void add_words(CLI::App& app, const std::string& name, std::vector<std::string>& words,
               const std::string& help) {
  app.add_option(name, words, help)->required();
}

std::vector<std::string> given_options(const CLI::App& app) {
  std::vector<std::string> given;
  for (const CLI::Option* option :
       app.get_options([](const CLI::Option* o) { return o->count() > 0; })) {
    given.push_back(option->get_single_name());
  }
  return given;
}

}  // namespace tandem::cli
