#include "files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "errors.h"
#include "strings.h"

namespace tandem::cli {

namespace fs = std::filesystem;

namespace {

constexpr const char* kFreeSpace = "Free some space or choose another folder.";

/// A name such as ".tandem.1f0c3a9e.tandem-tmp": different from another process' temporary files,
/// and short enough beside every file.
std::string temporary_name() {
  std::random_device random;
  return format(".tandem.%08x.tandem-tmp", random());
}

struct Descriptor {
  explicit Descriptor(int opened) : number(opened) {}
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  const int number;
};

[[noreturn]] void refuse_writing(const char* doing, const fs::path& path, const std::string& reason,
                                 const char* remedy = kFreeSpace) {
  throw UserError("expected a file that can be " + std::string(doing) + ", got " + path.string() +
                  " (" + reason + "). " + remedy);
}

/// Whether `link` is one of the kernel's, such as /proc/self/fd/1. It leads to an open file, and
/// the name that it shows is only where that file was found.
bool is_of_the_kernel(const fs::path& link) {
  struct statfs system {};
  return ::statfs(link.has_parent_path() ? link.parent_path().c_str() : ".", &system) == 0 &&
         system.f_type == PROC_SUPER_MAGIC;
}

/// The path that `path` leads to through symbolic links, whether it exists or not.
fs::path behind_links(const fs::path& path) {
  constexpr int kMost = 40;  // the limit of Linux
  std::error_code error;
  fs::path target = path;
  for (int links = 0; fs::is_symlink(fs::symlink_status(target, error)); ++links) {
    if (links == kMost) refuse_writing("written", path, "too many levels of symbolic links");
    if (is_of_the_kernel(target)) break;
    const fs::path next = fs::read_symlink(target, error);
    if (error) refuse_writing("written", path, error.message());
    target = target.parent_path() / next;  // `next` alone if it is absolute
  }
  return target;
}

/// Opens an existing file for appending. If this process has it open already, returns a copy of
/// that descriptor, which shares its position with other writers.
int open_to_append(const fs::path& target) {
  std::error_code error;
  const std::string name = target.filename().string();
  if (name.find_first_not_of("0123456789") == name.npos && name.size() < 10 &&
      fs::canonical(target.parent_path(), error) == fs::canonical("/proc/self/fd", error) && !error)
    return ::fcntl(std::stoi(name), F_DUPFD_CLOEXEC, 0);
  return ::open(target.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
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

namespace {

/// Replaces `path` so that a crash leaves either the old or the new content: a temporary file
/// beside it with a unique name, fsync, rename, fsync of the folder. The new file keeps the
/// permissions of the replaced one; other hard links to that keep the old content. It is by hand,
/// because C++ streams know no fsync.
void replace_file(const fs::path& path, std::string_view content) {
  struct stat replaced {};
  const bool replaces = ::lstat(path.c_str(), &replaced) == 0 && S_ISREG(replaced.st_mode);
  const mode_t mode = replaces ? replaced.st_mode & 0777 : 0644;
  fs::path temporary;
  int made = -1;
  do {
    temporary = path.parent_path() / temporary_name();
    made = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  } while (made < 0 && errno == EEXIST);
  if (made < 0) refuse_writing("created", path, std::strerror(errno));
  const auto fail = [&](const char* doing) {
    const int reason = errno;
    ::unlink(temporary.c_str());
    refuse_writing(doing, path, std::strerror(reason));
  };
  {
    const Descriptor file(made);
    if (replaces && ::fchmod(file.number, mode) != 0) fail("created");
    if (!write_all(file.number, content)) fail("written");
    if (::fsync(file.number) != 0) fail("flushed to disk");
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) fail("replaced");
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // fsync makes the rename durable. On a file system without it, that is no error.
  if (opened.number >= 0) ::fsync(opened.number);
}

}  // namespace

void write_file(const fs::path& path, std::string_view content) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) refuse_writing("written", path, "a folder");
  const fs::path target = behind_links(path);
  if (fs::exists(status) &&
      (!fs::is_regular_file(status) || fs::is_symlink(fs::symlink_status(target, error)))) {
    const Descriptor opened(open_to_append(target));
    if (opened.number < 0 || !write_all(opened.number, content))
      refuse_writing("written", path, std::strerror(errno));
    return;
  }
  constexpr fs::perms kWritable =
      fs::perms::owner_write | fs::perms::group_write | fs::perms::others_write;
  if (fs::exists(status) && ((status.permissions() & kWritable) == fs::perms::none ||
                             ::euidaccess(target.c_str(), W_OK) != 0))
    refuse_writing("written", path, "it is write-protected",
                   "Permit writing with chmod u+w, or name another file.");
  replace_file(target, content);
}

fs::path program_folder() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path();
}

}  // namespace tandem::cli
