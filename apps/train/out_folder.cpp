#include "out_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "program/errors.h"
#include "program/strings.h"

namespace tandem::apps {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kLock = "tandem.lock";
constexpr const char* kList = "tandem-files.json";
constexpr const char* kFilesFormat = "tandem train files 2";
constexpr size_t kOwnerDigits = 16;
constexpr std::string_view kLockMark = "lock of tandem train\n";
/// The lock's size: it is written at once and never gets shorter.
constexpr size_t kLockBytes = 512;

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

/// What is at `path` if it is not a regular file; links are not followed.
std::optional<std::string> oddity(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::exists(status) || fs::is_regular_file(status)) return std::nullopt;
  if (fs::is_directory(status)) return "a folder";
  return fs::is_symlink(status) ? "a symbolic link" : "not a regular file";
}

/// The digests of a list in JSON; nullopt if `list` is none.
std::optional<std::vector<FileDigest>> contents_of(const json& list) {
  std::vector<FileDigest> contents;
  if (!list.is_array()) return std::nullopt;
  for (const json& content : list) {
    const auto digest = digest_of_json(content);
    if (!digest) return std::nullopt;
    contents.push_back(*digest);
  }
  return contents;
}

/// The content of a lock file: the mark, a line with the process number, a line with the owner of
/// temporary files, a line with the file that grows, if any, as in the list, then empty lines. A
/// file with another content is not Tandem's.
struct LockText {
  std::string process, owner, growth;
};

/// Removes the first line from `text` and returns it. It must exist and consist of `digits`.
std::string take_line(std::string_view& text, const char* digits) {
  const size_t end = text.find_first_not_of(digits);
  if (end == text.npos || text[end] != '\n') return {};
  const std::string line(text.substr(0, end));
  text.remove_prefix(end + 1);
  return line;
}

std::optional<LockText> lock_text_of(int lock) {
  std::array<char, 2 * kLockBytes> bytes{};
  const ssize_t size = ::pread(lock, bytes.data(), bytes.size(), 0);
  std::string_view text(bytes.data(), static_cast<size_t>(std::max<ssize_t>(size, 0)));
  struct stat status {};
  if (!text.starts_with(kLockMark) || ::fstat(lock, &status) != 0 || status.st_nlink > 1)
    return std::nullopt;
  text.remove_prefix(kLockMark.size());
  LockText read;
  read.process = take_line(text, "0123456789");
  read.owner = take_line(text, "0123456789abcdef");
  if (read.process.empty() || read.owner.size() != kOwnerDigits) return std::nullopt;
  const size_t last = text.find_last_not_of('\n');
  if (last == text.npos) return read;
  read.growth = text.substr(0, last + 1);
  const json growth = parse_document(read.growth);
  if (!growth.is_object() || read.growth.find('\n') != read.growth.npos) return std::nullopt;
  for (const json& contents : growth)
    if (!contents_of(contents)) return std::nullopt;
  return read;
}

/// A new owner for the temporary files of a folder; no other file's name contains it.
std::string new_owner() {
  std::random_device random;
  return format("%08x%08x", random(), random());
}

bool is_empty(int opened) {
  struct stat status {};
  return ::fstat(opened, &status) == 0 && status.st_size == 0;
}

/// Whether `path` still names the open file `opened`.
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
  } catch (const std::exception&) {  // what the list lacks stays in the lock
  }
  unlock();
}

void OutFolder::lock() {
  const fs::path path = folder_ / kLock;
  constexpr int kMostWaits = 50;
  for (int waits = 0;;) {
    if (const auto odd = oddity(path)) refuse_file(path, *odd);
    lock_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    const bool is_new = lock_ >= 0;
    if (!is_new && errno == EEXIST) {
      lock_ = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
      if (lock_ < 0 && errno == ENOENT) continue;  // its owner removed it meanwhile
    }
    if (lock_ < 0) refuse_folder("can be written", folder_, std::strerror(errno));
    // A new lock file belongs to this process: another process that locks it leaves it alone.
    const bool locked = ::flock(lock_, is_new ? LOCK_EX : LOCK_EX | LOCK_NB) == 0;
    const int reason = errno;
    const std::optional<LockText> text =
        is_new ? LockText{{}, new_owner(), {}} : lock_text_of(lock_);
    const bool is_unwritten = !text && is_empty(lock_);
    if (locked && text && is_same_file(lock_, path)) {
      owner_ = text->owner;
      growth_ = text->growth;
      break;
    }
    ::close(std::exchange(lock_, -1));
    if (is_unwritten && locked && ++waits < kMostWaits) {  // another training may be about to write
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      continue;
    }
    if (!locked && reason == EWOULDBLOCK && (text || is_unwritten)) {
      throw UserError("expected a folder that no other training writes to, got " +
                      folder_.string() + " (process " + (text ? text->process : "unknown") +
                      " trains there). Wait for its end, or pass another folder with --out.");
    }
    if (!text) refuse_file(path, "not a lock of tandem train");
    if (!locked) refuse_folder("can be locked", folder_, std::strerror(reason));
    // This lock file was removed by its owner meanwhile: retry with the present file of that name.
  }
  try {
    write_lock();
    ::fsync(lock_);  // a crash of the machine could leave it empty, and so not Tandem's
  } catch (...) {
    unlock();
    throw;
  }
}

/// Writes the lock in one write, which a crash can only precede or follow: the next process that
/// locks the folder finds one growth or the other.
void OutFolder::write_lock() const {
  std::string text =
      std::string(kLockMark) + std::to_string(::getpid()) + "\n" + owner_ + "\n" + growth_;
  text.resize(std::max(kLockBytes, text.size() + 1), '\n');
  if (::pwrite(lock_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    refuse_folder("can be written", folder_, std::strerror(errno));
}

void OutFolder::unlock() {
  if (lock_ < 0) return;
  // It is removed while it is locked, so it is Tandem's. It is kept if the list lacks what it says.
  if (growth_.empty()) ::unlink((folder_ / kLock).c_str());
  ::close(std::exchange(lock_, -1));
}

void OutFolder::read_list() {
  const fs::path path = folder_ / kList;
  if (const auto odd = oddity(path)) refuse_file(path, *odd);
  std::error_code error;
  if (!fs::exists(path, error)) {
    growth_.clear();  // the lock belongs to no listed file
    return;
  }
  const json list = parse_document(read_file(path, "Tandem's list of the files that it wrote",
                                             "Pass another folder with --out."));
  if (!list.is_object() || list.value("format", json()) != kFilesFormat ||
      !list.contains("files") || !list["files"].is_object())
    refuse_file(path, "not the list of tandem train");
  for (const auto& [name, listed] : list["files"].items()) {
    const auto contents = contents_of(listed);
    if (!contents) refuse_file(path, "not the list of tandem train");
    files_[fs::path(name).filename().string()].contents = *contents;  // names of this folder only
  }
  if (growth_.empty()) return;
  const json growth = parse_document(growth_);
  for (const auto& [name, grown] : growth.items()) {
    const auto contents = contents_of(grown);
    const auto file = files_.find(name);
    if (file == files_.end() || !contents) continue;
    std::vector<FileDigest>& known = file->second.contents;
    known.insert(known.end(), contents->begin(), contents->end());
  }
  list_is_old_ = true;
}

void OutFolder::write_list() {
  json files = json::object();
  for (const auto& [name, entry] : files_) files[name] = entry.contents;
  AtomicFile file(folder_ / kList, owner_);
  file.write(json{{"format", kFilesFormat}, {"files", files}}.dump(1) + "\n");
  file.commit();
  list_is_old_ = false;
  growth_.clear();
}

void OutFolder::remove_temporaries() const {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    const std::string name = entry.path().filename().string();
    if (is_temporary_of(owner_, name) && fs::is_regular_file(entry.symlink_status(error)))
      fs::remove(entry.path(), error);
  }
}

std::optional<OutFolder::Stamp> OutFolder::stamp_of(const fs::path& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return std::nullopt;
  return Stamp{status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec,
               status.st_mtim.tv_nsec};
}

/// Whether the existing file `name` has a content that Tandem wrote.
bool OutFolder::is_ours(const std::string& name) {
  const auto file = files_.find(name);
  const std::optional<Stamp> stamp = stamp_of(folder_ / name);
  if (file == files_.end() || !stamp) return false;
  Entry& entry = file->second;
  if (entry.checked == stamp) return true;
  const auto has_its_size = [&](const FileDigest& d) { return d.bytes == stamp->bytes; };
  if (std::none_of(entry.contents.begin(), entry.contents.end(), has_its_size)) return false;
  const std::optional<FileDigest> found = digest_of_file(folder_ / name);
  const auto same = std::find(entry.contents.begin(), entry.contents.end(), found);
  if (same == entry.contents.end()) return false;
  entry = {{FileDigest(*same)}, stamp};
  return true;
}

/// Notes that the file `name` has `content` and no other content is expected there.
void OutFolder::settle(const std::string& name, const FileDigest& content) {
  files_[name] = {{content}, stamp_of(folder_ / name)};
  list_is_old_ = true;
}

void OutFolder::require_free(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const fs::path path = folder_ / name;
    std::error_code error;
    if (const auto odd = oddity(path)) refuse_file(path, *odd);
    if (!fs::exists(path, error) || is_ours(name)) continue;
    const auto file = files_.find(name);
    const bool written = file != files_.end() && !file->second.contents.empty();
    refuse_file(path, written ? "changed since Tandem wrote it" : "tandem train did not write it");
  }
}

AtomicFile OutFolder::begin(const std::string& name) {
  require_free({name});
  return AtomicFile(folder_ / name, owner_);
}

void OutFolder::commit(AtomicFile& file) {
  const std::string name = file.path().filename().string();
  file.flush();  // the disk must have a content before the list knows it
  files_[name].contents.push_back(file.digest());
  write_list();
  require_free({name});  // a file may have appeared meanwhile
  file.commit();
  settle(name, file.digest());
}

void OutFolder::append(const std::string& name, std::string_view text) {
  require_free({name});
  if (files_.try_emplace(name).second) write_list();
  const fs::path path = folder_ / name;
  const bool is_new = !stamp_of(path);
  const FileDigest before = is_new ? FileDigest() : files_[name].contents.back();
  FileDigest after = before;
  after.add(text);
  growth_ = json{{name, json({before, after})}}.dump();
  list_is_old_ = true;
  write_lock();
  const int file = ::open(
      path.c_str(), O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC | (is_new ? O_CREAT : 0), 0644);
  const bool written = file >= 0 && write_all(file, text);
  const int reason = errno;
  if (file >= 0 && !written) (void)!::ftruncate(file, before.bytes);  // drops the written part
  if (file >= 0) ::close(file);
  if (!written) {
    throw UserError("expected a file that can be written, got " + path.string() + " (" +
                    std::strerror(reason) + "). Free some space or choose another folder.");
  }
  settle(name, after);
}

void OutFolder::recognize(const std::string& name) {
  const auto file = files_.find(name);
  const std::optional<FileDigest> found = digest_of_file(folder_ / name);
  if (file != files_.end() && found) file->second.contents.push_back(*found);
}

void OutFolder::remove_others(std::string_view prefix, const std::string& current) {
  for (auto file = files_.begin(); file != files_.end();) {
    const std::string& name = file->first;
    const bool old = name.starts_with(prefix) && name != current;
    std::error_code error;
    if (!old || oddity(folder_ / name)) {
      ++file;
      continue;
    }
    if (is_ours(name)) fs::remove(folder_ / name, error);
    file = files_.erase(file);  // also if it belongs to another program now
    list_is_old_ = true;
  }
}

}  // namespace tandem::apps
