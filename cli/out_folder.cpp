#include "out_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "errors.h"
#include "files.h"

namespace tandem::cli {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kLock = "tandem.lock";
constexpr const char* kList = "tandem-files.json";
constexpr const char* kFormat = "tandem train files 1";

[[noreturn]] void refuse_folder(const std::string& expected, const fs::path& folder,
                                const std::string& reason) {
  throw UserError("expected a folder that " + expected + ", got " + folder.string() + " (" +
                  reason + "). Pass another folder with --out.");
}

[[noreturn]] void refuse_file(const fs::path& path, const std::string& reason) {
  throw UserError(
      "expected a folder without files of others under the names that tandem train "
      "writes, got " +
      path.string() + " (" + reason + "). Move it away, or pass another folder with --out.");
}

/// What stands at `path` if it is not a regular file; links are not followed.
std::optional<std::string> oddity(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::exists(status) || fs::is_regular_file(status)) return std::nullopt;
  if (fs::is_directory(status)) return "a folder";
  return fs::is_symlink(status) ? "a symbolic link" : "not a regular file";
}

/// The content of a lock file: the number of its process and a newline, or nothing yet. Anything
/// else is not ours.
std::optional<std::string> process_of(int lock) {
  std::array<char, 32> text{};
  const ssize_t size = ::pread(lock, text.data(), text.size(), 0);
  if (size <= 0) return size == 0 ? std::optional<std::string>("") : std::nullopt;
  const std::string_view read(text.data(), static_cast<size_t>(size));
  const bool ours = read.find_first_not_of("0123456789") == read.size() - 1 && read.back() == '\n';
  return ours ? std::optional<std::string>(read.substr(0, read.size() - 1)) : std::nullopt;
}

/// Whether `path` still names the file that is open as `opened`.
bool is_same_file(int opened, const fs::path& path) {
  struct stat by_number {
  }, by_name{};
  return ::fstat(opened, &by_number) == 0 && ::lstat(path.c_str(), &by_name) == 0 &&
         by_number.st_ino == by_name.st_ino && by_number.st_dev == by_name.st_dev;
}

}  // namespace

OutFolder::OutFolder(fs::path folder, Missing missing) : folder_(std::move(folder)) {
  constexpr const char* kWritable = "can be written";
  std::error_code error;
  if (missing == Missing::create) fs::create_directories(folder_, error);
  if (error) refuse_folder(kWritable, folder_, error.message());
  if (!fs::is_directory(folder_, error))
    refuse_folder(kWritable, folder_, error ? error.message() : "not a folder");
  lock();
  try {
    read_list();
    remove_temporaries();
  } catch (...) {
    unlock();
    throw;
  }
}

OutFolder::~OutFolder() {
  try {
    if (list_is_old_) write_list();
  } catch (const std::exception&) {  // the list then names files that are gone: no harm
  }
  unlock();
}

void OutFolder::lock() {
  const fs::path path = folder_ / kLock;
  while (true) {
    if (const auto odd = oddity(path)) refuse_file(path, *odd);
    lock_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (lock_ < 0) refuse_folder("can be written", folder_, std::strerror(errno));
    const bool locked = ::flock(lock_, LOCK_EX | LOCK_NB) == 0;
    const int reason = errno;
    const std::optional<std::string> process = process_of(lock_);
    if (locked && process && is_same_file(lock_, path)) break;
    ::close(std::exchange(lock_, -1));
    if (!process) refuse_file(path, "not a lock of tandem train");
    if (!locked && reason == EWOULDBLOCK) {
      throw UserError("expected a folder that no other training writes to, got " +
                      folder_.string() + " (process " + (process->empty() ? "unknown" : *process) +
                      " trains there). Wait for its end, or pass another folder with --out.");
    }
    if (!locked) refuse_folder("can be locked", folder_, std::strerror(reason));
    // locked what its owner removed at the same time: once more, with the file of that name
  }
  const std::string text = std::to_string(::getpid()) + "\n";
  if (::ftruncate(lock_, 0) != 0 || ::pwrite(lock_, text.data(), text.size(), 0) < 0) {
    const int reason = errno;
    unlock();
    refuse_folder("can be written", folder_, std::strerror(reason));
  }
}

void OutFolder::unlock() {
  if (lock_ < 0) return;
  ::unlink((folder_ / kLock).c_str());  // while it is locked, so it is ours
  ::close(std::exchange(lock_, -1));
}

void OutFolder::read_list() {
  const fs::path path = folder_ / kList;
  if (const auto odd = oddity(path)) refuse_file(path, *odd);
  std::error_code error;
  if (!fs::exists(path, error)) return;
  const json list = parse_document(read_file(path, "Tandem's list of the files that it wrote",
                                             "Pass another folder with --out."));
  if (!list.is_object() || list.value("format", json()) != kFormat || !list.contains("files") ||
      !list["files"].is_array())
    refuse_file(path, "not the list of tandem train");
  for (const json& name : list["files"]) {
    if (!name.is_string()) refuse_file(path, "not the list of tandem train");
    files_.insert(fs::path(name.get<std::string>()).filename().string());  // of this folder only
  }
}

void OutFolder::write_list() {
  AtomicFile file(folder_ / kList);
  file.write(json{{"format", kFormat}, {"files", files_}}.dump(1) + "\n");
  file.commit();
  list_is_old_ = false;
}

void OutFolder::remove_temporaries() const {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    const std::string whose = name_of_temporary(entry.path().filename().string());
    if ((whose == kList || files_.contains(whose)) && entry.is_regular_file(error))
      fs::remove(entry.path(), error);
  }
}

void OutFolder::require_free(const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    const fs::path path = folder_ / name;
    std::error_code error;
    if (const auto odd = oddity(path)) refuse_file(path, *odd);
    if (!files_.contains(name) && fs::exists(path, error))
      refuse_file(path, "tandem train did not write it");
  }
}

fs::path OutFolder::claim(const std::string& name) {
  require_free({name});
  if (files_.insert(name).second) write_list();
  return folder_ / name;
}

void OutFolder::remove_others(std::string_view prefix, const std::string& current) {
  for (auto file = files_.begin(); file != files_.end();) {
    const bool old = file->starts_with(prefix) && *file != current;
    std::error_code error;
    if (!old || oddity(folder_ / *file)) {
      ++file;
      continue;
    }
    fs::remove(folder_ / *file, error);
    file = files_.erase(file);
    list_is_old_ = true;
  }
}

}  // namespace tandem::cli
