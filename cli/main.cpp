#include <string_view>

#include "commands.h"

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

}  // namespace

}  // namespace tandem::cli

int main(int argc, char** argv) {
  using namespace tandem::cli;
  if (argc > 1 && std::string_view(argv[1]) == "train") return train(argv + 1);
  const auto fill = [](CLI::App& app, Action& action) {
    add_version(app);
    add_train(app, action);
    add_explain(app, action);
    add_verify(app, action);
    add_bench(app, action);
    add_doctor(app, action);
  };
  return run_program({"tandem", kDescription, kFooter, fill}, argc, argv);
}
