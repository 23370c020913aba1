#pragma once

#include "options.h"

namespace tandem::cli {

/// Each function adds one command with its options to `app`; parsing the command sets `action`.
void add_explain(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);
/// Adds `train` to the help. Its arguments are not parsed here: `train` passes them on.
void add_train(CLI::App& app, Action& action);

/// Becomes the program tandem-train, which lies beside this one, as git becomes git-foo.
/// `arguments` begins with the word "train" and ends with a null pointer. Returns only if the
/// program cannot be run: prints why, and returns the exit status (test
/// test_train_without_its_program).
int train(char** arguments);

}  // namespace tandem::cli
