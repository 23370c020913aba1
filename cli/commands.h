#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tandem::cli {

/// What to run once the command line is parsed; returns the exit status.
using Action = std::function<int()>;

/// Each adds one command with its options to `app`; parsing it sets `action`.
void add_train(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);

}  // namespace tandem::cli
