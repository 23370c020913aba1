#include "options.h"

#include <c10/util/Exception.h>
#include <tandem/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <sstream>

#include "errors.h"
#include "output.h"
#include "text.h"

namespace tandem::cli {

namespace {

/// The type of a value as help shows it.
std::string type_name(const Bounds& bounds) {
  if (const auto* choice = std::get_if<Choice>(&bounds)) return join(choice->words, "|");
  if (const auto* text = std::get_if<Text>(&bounds)) return text->what;
  return std::holds_alternative<Whole>(bounds) ? "N" : "X";
}

/// The name of a command with that of its program: "tandem bench".
std::string full_name(const CLI::App& app) {
  const CLI::App* above = app.get_parent();
  return above ? above->get_name() + " " + app.get_name() : app.get_name();
}

/// The name of the command: "tandem bench" once it is known, else "tandem".
std::string speaker(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  return full_name(chosen.empty() ? app : *chosen.front());
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  return names;
}

/// Checks the first word before the parser does: mistakes are most frequent there, and the parser
/// would only call it unexpected.
void check_command(const CLI::App& app, int argc, char** argv) {
  const std::vector<std::string> names = command_names(app);
  if (names.empty() || argc < 2 || argv[1][0] == '-') return;
  if (std::find(names.begin(), names.end(), argv[1]) != names.end()) return;
  const std::string near = closest(argv[1], names);
  throw UserError("expected a command (" + join(names) + "), got \"" + argv[1] + "\". " +
                  (near.empty() ? "See " + app.get_name() + " --help."
                                : "Did you mean " + app.get_name() + " " + near + "?"));
}

/// The parser's error in Tandem's form: "expected ..., got .... <what to do>."
std::string rephrase(const CLI::App& app, const CLI::ParseError& error) {
  const std::string help = " See " + speaker(app) + " --help.";
  if (dynamic_cast<const CLI::ExtrasError*>(&error)) {
    const auto extra = app.remaining(/*recurse=*/true);
    return "expected options and arguments that it knows, got \"" + join(extra, " ") + "\"." + help;
  }
  return "expected a complete command line, got: " + std::string(error.what()) + "." + help;
}

/// Whether an error is what a pipeline says about wrong shapes, dtypes or devices.
bool is_user_mistake(const c10::Error& error) {
  return dynamic_cast<const c10::ValueError*>(&error) ||
         dynamic_cast<const c10::TypeError*>(&error) ||
         dynamic_cast<const c10::NotImplementedError*>(&error);
}

/// Prints help or the version, which CLI11 treats as errors that exit with 0.
int print_help(const CLI::App& app, const CLI::ParseError& help) {
  std::ostringstream text, none;
  app.exit(help, text, none);
  print(text.str());
  return kExitOk;
}

}  // namespace

int run_program(const Program& program, int argc, char** argv) {
  guard_standard_streams();
  CLI::App app(program.description, program.name);
  app.footer(program.footer);
  app.set_help_flag("-h,--help", "this text");
  Action action;
  program.fill(app, action);
  const auto fail = [&app](const std::string& text, int status) {
    std::fprintf(stderr, "%s: %s\n", speaker(app).c_str(), text.c_str());
    return status;
  };
  try {
    check_command(app, argc, argv);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() != 0) throw;
      return print_help(app, error);  // whose output may fail
    }
    if (action) return action();
    print(app.help());
    return kExitOk;
  } catch (const CLI::ParseError& error) {
    return fail(rephrase(app, error), kExitUserError);
  } catch (const UserError& error) {
    return fail(error.what(), kExitUserError);
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(),
                is_user_mistake(error) ? kExitUserError : kExitFailure);
  } catch (const std::exception& error) {
    return fail(error.what(), kExitFailure);
  }
}

void add_version(CLI::App& app) {
  app.set_version_flag("--version", app.get_name() + " " + version(), "the version");
}

CLI::App& add_command(CLI::App& tandem, const std::string& name, const std::string& description,
                      const std::string& footer, Action& action, Action run) {
  CLI::App& app = *tandem.add_subcommand(name, description);
  app.footer(footer);
  app.callback([&action, run = std::move(run)] { action = run; });
  return app;
}

template <typename T>
void add_option(CLI::App& app, const std::string& name, T& value, const Bounds& bounds,
                const std::string& help) {
  const auto check = [&app, name, bounds](const std::string& text) -> std::string {
    if (!allows(bounds, text)) {
      throw UserError("expected " + name + " to be " + expected(bounds) + ", got \"" + text +
                      "\". See " + full_name(app) + " --help.");
    }
    return {};
  };
  app.add_option(name, value, help)
      ->type_name(type_name(bounds))
      ->capture_default_str()
      ->take_last()
      ->check(check, "");
}

template void add_option(CLI::App&, const std::string&, int64_t&, const Bounds&,
                         const std::string&);
template void add_option(CLI::App&, const std::string&, double&, const Bounds&, const std::string&);
template void add_option(CLI::App&, const std::string&, std::string&, const Bounds&,
                         const std::string&);

void add_flag(CLI::App& app, const std::string& name, bool& value, const std::string& help) {
  app.add_flag(name, value, help);
}

void add_words(CLI::App& app, const std::string& name, std::vector<std::string>& words,
               const std::string& help) {
  app.add_option(name, words, help)->required();
}

}  // namespace tandem::cli
