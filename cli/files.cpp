#include "files.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "errors.h"

namespace tandem::cli {

namespace {

struct stat status_of(int descriptor) {
  struct stat status {};
  ::fstat(descriptor, &status);
  return status;
}

bool is_same_file(int a, int b) {
  const struct stat one = status_of(a), other = status_of(b);
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

/// Writes `content` in place of what an open file has. Returns false and sets errno if it fails.
bool replace_content(int file, std::string_view content) {
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO})  // whose position others share
    if (is_same_file(file, stream)) return write_all(stream, content);
  const bool is_regular = S_ISREG(status_of(file).st_mode);
  return (!is_regular || ::ftruncate(file, 0) == 0) && write_all(file, content);
}

}  // namespace

bool write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) {
      pollfd ready{descriptor, POLLOUT, 0};
      ::poll(&ready, 1, -1);
      continue;
    }
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

void write_file(const std::string& path, std::string_view content) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  const bool is_written = file >= 0 && replace_content(file, content);
  const int reason = errno;
  if (file >= 0) ::close(file);
  if (!is_written)
    throw UserError("expected a file that can be written, got " + path + " (" +
                    std::strerror(reason) + "). Free some space or choose another folder.");
}

std::filesystem::path program_folder() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
}

}  // namespace tandem::cli
