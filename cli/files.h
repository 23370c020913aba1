#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace tandem::cli {

/// FNV-1a, 64 bits: finds damage, keeps no secrets.
class Checksum {
 public:
  void add(std::string_view bytes);
  std::string hex() const;

 private:
  uint64_t state_ = 0xcbf29ce484222325ULL;
};

/// Writes `path` so that a crash leaves the old content or the new, never a part: a temporary file
/// beside it, fsync, rename, fsync of the folder. Without `commit` nothing changes.
///
/// Throws: UserError when the disk refuses (test test_unwritable_out_folder).
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* doing) const;

  std::filesystem::path path_, temporary_;
  int descriptor_ = -1;
};

void write_file(const std::filesystem::path& path, std::string_view content);

/// The whole file. `expected` and `remedy` complete the error: "expected <expected>, got <path>
/// (<reason>). <remedy>".
std::string read_file(const std::filesystem::path& path, std::string_view expected,
                      std::string_view remedy);

/// Creates `folder` if needed and proves that a file can be written there. Throws: UserError.
void require_writable_folder(const std::filesystem::path& folder);

}  // namespace tandem::cli
