#include <c10/util/Exception.h>
#include <tandem/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

#include "commands.h"
#include "errors.h"
#include "output.h"
#include "strings.h"

namespace tandem::cli {

namespace {

constexpr const char* kDescription =
    "Tandem fuses the operations of a network for training with PyTorch: you list them, it plans "
    "how forward and backward\n"
    "run, fuses what it may, quantizes what the recipe asks for, and tells why.";

constexpr const char* kFooter =
    "Examples:\n"
    "  tandem doctor                                        is everything there that Tandem can "
    "use?\n"
    "  tandem train                                         train a small GPT with and without "
    "Tandem, compare\n"
    "  tandem explain rms_norm:256 linear:256:1408 swiglu   what runs, what is kept, what fused "
    "and what did not\n"
    "  tandem verify rms_norm:256 linear:256:1408 swiglu    prove that fused equals unfused\n"
    "  tandem bench swiglu --width 1408 --rows 4096         time it against libtorch's own "
    "functions\n\n"
    "Each command has its own help: tandem train --help";

/// The name of the command: "tandem train" once it is known, else "tandem".
std::string speaker(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  return chosen.empty() ? "tandem" : "tandem " + chosen.front()->get_name();
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
  if (argc < 2 || argv[1][0] == '-') return;
  const std::vector<std::string> names = command_names(app);
  if (std::find(names.begin(), names.end(), argv[1]) != names.end()) return;
  const std::string near = closest(argv[1], names);
  throw UserError("expected a command (" + join(names) + "), got \"" + argv[1] + "\". " +
                  (near.empty() ? "See tandem --help." : "Did you mean tandem " + near + "?"));
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

int run(int argc, char** argv) {
  guard_standard_streams();
  CLI::App app(kDescription, "tandem");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("tandem ") + version(), "the version");
  app.set_help_flag("-h,--help", "this text");
  Action action;
  add_train(app, action);
  add_explain(app, action);
  add_verify(app, action);
  add_bench(app, action);
  add_doctor(app, action);
  try {
    check_command(app, argc, argv);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() != 0) throw;
      return print_help(app, error);
    }
    if (!action) {
      print(app.help());
      return kExitOk;
    }
    return action();
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "%s: %s\n", speaker(app).c_str(), rephrase(app, error).c_str());
    return kExitUserError;
  } catch (const UserError& error) {
    std::fprintf(stderr, "%s: %s\n", speaker(app).c_str(), error.what());
    return kExitUserError;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", speaker(app).c_str(), error.what_without_backtrace());
    return is_user_mistake(error) ? kExitUserError : kExitFailure;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", speaker(app).c_str(), error.what());
    return kExitFailure;
  }
}

}  // namespace

}  // namespace tandem::cli

int main(int argc, char** argv) { return tandem::cli::run(argc, argv); }
