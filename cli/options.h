#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem::cli {

/// Options whose value is checked before it is converted; a bad one throws UserError with the
/// option, what it takes, what it got and where to look (test test_option_errors).
CLI::Option* add_whole(CLI::App& app, const std::string& name, int64_t& value, int64_t least,
                       int64_t most, const std::string& help);
CLI::Option* add_real(CLI::App& app, const std::string& name, double& value, double least,
                      double most, const std::string& help);
CLI::Option* add_choice(CLI::App& app, const std::string& name, std::string& value,
                        std::vector<std::string> choices, const std::string& help);

}  // namespace tandem::cli
