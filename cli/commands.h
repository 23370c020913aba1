#pragma once

#include "options.h"

namespace tandem::cli {

/// Each function adds one command with its options to `app`; parsing the command sets `action`.
void add_train(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);

}  // namespace tandem::cli
