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

/// Adds a command. Parsing it makes `run` the action.
CLI::App& add_command(CLI::App& tandem, const std::string& name, const std::string& description,
                      const std::string& footer, Action& action, Action run);

/// Adds an option whose value is checked against its bounds before it is converted. A bad value
/// throws UserError with the option, what it takes, what it got and where to look (test
/// test_option_errors). Only options.cpp and main.cpp include CLI11, which takes seconds to parse.
void add_option(CLI::App& app, const std::string& name, int64_t& value, const Bounds& bounds,
                const std::string& help, const std::string& group = {});
void add_option(CLI::App& app, const std::string& name, double& value, const Bounds& bounds,
                const std::string& help, const std::string& group = {});
void add_option(CLI::App& app, const std::string& name, std::string& value, const Bounds& bounds,
                const std::string& help, const std::string& group = {});
void add_flag(CLI::App& app, const std::string& name, const std::function<void()>& set,
              const std::string& help, const std::string& group = {});
/// Takes all words that are no options, at least one.
void add_words(CLI::App& app, const std::string& name, std::vector<std::string>& words,
               const std::string& help);

/// The long names, without dashes, of the options on the command line.
std::vector<std::string> given_options(const CLI::App& app);

}  // namespace tandem::cli
