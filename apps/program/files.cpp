#include "files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <utility>

#include "errors.h"
#include "strings.h"

namespace tandem::apps {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kTemporarySuffix = ".tandem-tmp";
constexpr size_t kTemporaryDigits = 8;
constexpr const char* kFreeSpace = "Free some space or choose another folder.";

/// A name such as ".tandem.1f0c3a9e.tandem-tmp": different from another process' temporary files,
/// and short enough beside every file.
std::string temporary_name(const std::string& owner) {
  std::random_device random;
  return "." + owner + format(".%08x", random()) + std::string(kTemporarySuffix);
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

void Checksum::add(std::string_view bytes) {
  uint64_t state = state_;
  for (const char byte : bytes)
    state = (state ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
  state_ = state;
}

std::string Checksum::hex() const {
  return format("%016llx", static_cast<unsigned long long>(state_));
}

std::optional<Checksum> Checksum::of_hex(std::string_view text) {
  if (text.size() != kDigits || text.find_first_not_of("0123456789abcdef") != text.npos)
    return std::nullopt;
  Checksum checksum;
  checksum.state_ = std::stoull(std::string(text), nullptr, 16);
  return checksum;
}

void FileDigest::add(std::string_view more) {
  bytes += static_cast<int64_t>(more.size());
  checksum.add(more);
}

void to_json(nlohmann::json& to, const FileDigest& from) {
  to = {{"bytes", from.bytes}, {"fnv1a64", from.checksum.hex()}};
}

std::optional<FileDigest> digest_of_json(const nlohmann::json& from) {
  if (!from.is_object()) return std::nullopt;
  const nlohmann::json bytes = from.value("bytes", nlohmann::json());
  const nlohmann::json digits = from.value("fnv1a64", nlohmann::json());
  if (!bytes.is_number_unsigned() || !digits.is_string()) return std::nullopt;
  const auto checksum = Checksum::of_hex(digits.get<std::string>());
  if (!checksum) return std::nullopt;
  return FileDigest{bytes.get<int64_t>(), *checksum};
}

std::optional<FileDigest> digest_of_file(const fs::path& path) {
  const Descriptor opened(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  FileDigest digest;
  std::string part(1 << 20, '\0');
  while (true) {
    const ssize_t got = ::read(opened.number, part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) return digest;
    digest.add(std::string_view(part).substr(0, static_cast<size_t>(got)));
  }
}

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

AtomicFile::AtomicFile(fs::path path, const std::string& owner) : path_(std::move(path)) {
  struct stat replaced {};
  const bool replaces = ::lstat(path_.c_str(), &replaced) == 0 && S_ISREG(replaced.st_mode);
  const mode_t mode = replaces ? replaced.st_mode & 0777 : 0644;
  do {
    temporary_ = path_.parent_path() / temporary_name(owner);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) fail("created");
  if (replaces && ::fchmod(descriptor_, mode) != 0) {
    const int reason = errno;
    ::close(descriptor_);
    ::unlink(temporary_.c_str());
    refuse_writing("created", path_, std::strerror(reason));
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* doing) const {
  refuse_writing(doing, path_, std::strerror(errno));
}

void AtomicFile::write(std::string_view bytes) {
  if (!write_all(descriptor_, bytes)) fail("written");
  digest_.add(bytes);
}

void AtomicFile::flush() {
  if (descriptor_ < 0) return;
  if (::fsync(descriptor_) != 0) fail("flushed to disk");
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("flushed to disk");
}

void AtomicFile::commit() {
  flush();
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("replaced");
  temporary_.clear();
  const fs::path folder = path_.has_parent_path() ? path_.parent_path() : ".";
  const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // fsync makes the rename durable. On a file system without it, that is no error.
  if (opened.number >= 0) ::fsync(opened.number);
}

bool is_temporary_of(const std::string& owner, std::string_view name) {
  const std::string head = "." + owner + ".";
  return name.size() == head.size() + kTemporaryDigits + kTemporarySuffix.size() &&
         name.starts_with(head) && name.ends_with(kTemporarySuffix);
}

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
  AtomicFile file(target);
  file.write(content);
  file.commit();
}

std::string read_file(const fs::path& path, std::string_view expected, std::string_view remedy,
                      Source source) {
  const auto refuse = [&](const std::string& reason) {
    throw UserError("expected " + std::string(expected) + ", got " + path.string() + " (" + reason +
                    "). " + std::string(remedy));
  };
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  const int waiting = source == Source::file ? O_NONBLOCK : 0;
  const Descriptor opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC | waiting));
  struct stat status {};
  if (opened.number < 0 || ::fstat(opened.number, &status) != 0) refuse(std::strerror(errno));
  if (S_ISDIR(status.st_mode)) refuse("a folder");
  if (S_ISCHR(status.st_mode)) refuse("a device, which need not have an end");
  if (source == Source::file && !S_ISREG(status.st_mode)) refuse("not a regular file");
  const size_t known = S_ISREG(status.st_mode) ? static_cast<size_t>(status.st_size) : 0;
  constexpr size_t kLeast = 1 << 16;
  std::string content;
  size_t filled = 0;
  try {
    content.resize(std::max(known + 1, kLeast));  // one more byte, to detect the end at once
    while (true) {
      if (filled == content.size()) content.resize(2 * content.size());
      const ssize_t got = ::read(opened.number, content.data() + filled, content.size() - filled);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) refuse(std::strerror(errno));
      if (got == 0) break;
      filled += static_cast<size_t>(got);
    }
    content.resize(filled);
  } catch (const std::bad_alloc&) {
    refuse(bytes_text(static_cast<double>(std::max(known, filled))) +
           ", more than the memory that this process may use");
  } catch (const std::length_error&) {
    refuse("more than the memory that any process may use");
  }
  if (filled < known) {
    refuse("cannot be read to its end: " + std::to_string(filled) + " of " + std::to_string(known) +
           " bytes");
  }
  return content;
}

fs::path program_folder() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path();
}

fs::path default_text() {
  constexpr int kFoldersUp = 5;  // from <tree>/build/<preset>/bin to <tree>
  std::error_code error;
  fs::path folder = program_folder();
  for (int up = 0; up < kFoldersUp && folder.has_relative_path(); ++up) {
    for (const char* data : {"share/tandem", "data"}) {
      if (const fs::path text = folder / data / "kjv.txt"; fs::exists(text, error)) return text;
    }
    folder = folder.parent_path();
  }
  return fs::path("data") / "kjv.txt";
}

nlohmann::json parse_document(std::string_view text) {
  constexpr int kDeepest = 16;
  const auto is_within = [](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
    return depth <= kDeepest;
  };
  return nlohmann::json::parse(text, is_within, /*allow_exceptions=*/false);
}

}  // namespace tandem::apps
