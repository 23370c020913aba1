#include "output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>

#include "errors.h"
#include "files.h"

namespace tandem::cli {

void guard_standard_streams() {
  for (const int ending : {SIGPIPE, SIGXFSZ}) std::signal(ending, SIG_IGN);  // write(2) fails then
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // open() uses the lowest free number. Read-only, so that writes to the stream fail.
    if (::fcntl(stream, F_GETFD) < 0 && errno == EBADF) (void)::open("/dev/null", O_RDONLY);
  }
}

void print(std::string_view text) {
  if (!write_all(STDOUT_FILENO, text)) {
    throw UserError("expected a standard output that can be written, got an error (" +
                    std::string(std::strerror(errno)) +
                    "). Free some space, or send the output elsewhere.");
  }
}

}  // namespace tandem::cli
