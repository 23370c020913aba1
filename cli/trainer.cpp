#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "commands.h"
#include "program/errors.h"
#include "program/files.h"

namespace tandem::apps {

int train(char** arguments) {
  const std::string trainer = program_folder() / "tandem-train";
  ::execv(trainer.c_str(), arguments);
  std::fprintf(stderr,
               "tandem train: expected the program tandem-train in the folder of tandem, got %s "
               "(%s). Install the package again, or build the target programs.\n",
               trainer.c_str(), std::strerror(errno));
  return kExitUserError;
}

void add_train(CLI::App& tandem, Action& action) {
  add_command(tandem, "train",
              "Train a byte-level GPT on a text with libtorch's own modules, with Tandem pipelines "
              "and in emulated FP8, and compare.",
              "", action, {});
}

}  // namespace tandem::apps
