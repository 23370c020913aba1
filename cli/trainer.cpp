#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "commands.h"
#include "errors.h"
#include "files.h"

namespace tandem::cli {

int train(char** arguments) {
  const std::string trainer = program_folder() / "tandem-train";
  ::execv(trainer.c_str(), arguments);
  std::fprintf(stderr,
               "tandem train: expected the program tandem-train in the folder of tandem, got %s "
               "(%s). Install the Python package, of which it is a part.\n",
               trainer.c_str(), std::strerror(errno));
  return kExitUserError;
}

void add_train(CLI::App& tandem, Action& action) {
  add_command(tandem, "train",
              "Train a byte-level GPT on a text with torch's own modules, with Tandem pipelines "
              "and in emulated FP8, and compare.",
              "", action, {});
}

}  // namespace tandem::cli
