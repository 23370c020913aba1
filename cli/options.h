#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bounds.h"

namespace CLI {
class App;
}

namespace tandem::cli {

/// What to run after the command line is parsed; returns the exit status.
using Action = std::function<int()>;

/// A program of the command line. `name` is what help and errors call it.
struct Program {
  std::string name, description, footer;
  /// Adds options, or commands with theirs; `action` is what to run.
  std::function<void(CLI::App& app, Action& action)> fill;
};

/// Parses the command line and runs the action. Prints the error if one is thrown. Returns the exit
/// status: kExitUserError for a UserError and for what a pipeline says of wrong shapes, dtypes or
/// devices (tests test_unknown_option, test_shapes_that_do_not_fit).
int run_program(const Program& program, int argc, char** argv);

/// Adds the option --version.
void add_version(CLI::App& app);

/// Adds a command. Parsing it makes `run` the action.
CLI::App& add_command(CLI::App& tandem, const std::string& name, const std::string& description,
                      const std::string& footer, Action& action, Action run);

/// Adds an option whose value (int64_t, double or std::string) is checked against its bounds before
/// it is converted. A bad value throws UserError with the option, what it takes, what it got and
/// where to look (test test_option_errors). Only options.cpp includes CLI11, which takes seconds.
template <typename T>
void add_option(CLI::App& app, const std::string& name, T& value, const Bounds& bounds,
                const std::string& help);
void add_flag(CLI::App& app, const std::string& name, bool& value, const std::string& help);
/// Takes all words that are no options, at least one.
void add_words(CLI::App& app, const std::string& name, std::vector<std::string>& words,
               const std::string& help);

}  // namespace tandem::cli
