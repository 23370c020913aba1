#include "files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "errors.h"
#include "strings.h"

namespace tandem::cli {

namespace fs = std::filesystem;

void Checksum::add(std::string_view bytes) {
  uint64_t state = state_;
  for (const char byte : bytes)
    state = (state ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
  state_ = state;
}

std::string Checksum::hex() const {
  return format("%016llx", static_cast<unsigned long long>(state_));
}

AtomicFile::AtomicFile(fs::path path) : path_(std::move(path)), temporary_(path_) {
  temporary_ += ".tmp";
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail("created");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* doing) const {
  throw UserError("expected a file that can be " + std::string(doing) + ", got " + path_.string() +
                  " (" + std::strerror(errno) + "). Free some space or choose another folder.");
}

void AtomicFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("written");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("flushed to disk");
  ::close(descriptor_);
  descriptor_ = -1;
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("replaced");
  const fs::path folder = path_.has_parent_path() ? path_.parent_path() : ".";
  if (const int opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); opened >= 0) {
    ::fsync(opened);  // makes the rename durable; a file system without that is no error
    ::close(opened);
  }
}

void write_file(const fs::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

std::string read_file(const fs::path& path, std::string_view expected, std::string_view remedy) {
  const auto refuse = [&](const char* reason) {
    throw UserError("expected " + std::string(expected) + ", got " + path.string() + " (" + reason +
                    "). " + std::string(remedy));
  };
  std::error_code error;
  if (fs::is_directory(path, error)) refuse("a folder");
  std::ifstream stream(path, std::ios::binary);
  if (!stream) refuse(std::strerror(errno));
  std::ostringstream content;
  content << stream.rdbuf();
  if (stream.bad()) refuse("cannot be read to its end");
  return std::move(content).str();
}

void require_writable_folder(const fs::path& folder) {
  const auto refuse = [&](const std::string& reason) {
    throw UserError("expected a folder that can be written, got " + folder.string() + " (" +
                    reason + "). Pass another folder with --out.");
  };
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) refuse(error.message());
  if (!fs::is_directory(folder, error)) refuse("not a folder");
  const fs::path probe = folder / ".probe.tmp";
  const int descriptor = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor < 0) refuse(std::strerror(errno));
  ::close(descriptor);
  ::unlink(probe.c_str());
}

}  // namespace tandem::cli
