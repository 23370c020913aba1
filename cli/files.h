#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tandem::cli {

/// FNV-1a, 64 bits: finds damage, keeps no secrets. One changed byte always changes it.
class Checksum {
 public:
  static constexpr size_t kDigits = 16;

  void add(std::string_view bytes);
  std::string hex() const;
  bool operator==(const Checksum&) const = default;

  /// Whether `text` is what `hex` may return, and the checksum that returns it.
  static bool is_hex(std::string_view text);
  static Checksum of_hex(const std::string& text);

 private:
  uint64_t state_ = 0xcbf29ce484222325ULL;
};

/// What tells the content of a file from others.
struct FileDigest {
  int64_t bytes = 0;
  Checksum checksum;

  void add(std::string_view more);
  bool operator==(const FileDigest&) const = default;
};

/// The digest of what the file `path` holds; nothing where it cannot be read.
std::optional<FileDigest> digest_of_file(const std::filesystem::path& path);

/// Writes all of `bytes` to an open file, however often write(2) takes a part, is interrupted, or
/// finds a pipe full that its reader made non-blocking. Returns false with errno set when it fails.
bool write_all(int descriptor, std::string_view bytes);

/// Writes `path` so that a crash leaves the old content or the new, never a part: a temporary file
/// beside it with a name of its own, fsync, rename, fsync of the folder. Without `commit` nothing
/// changes, and the temporary file is removed. What is replaced gives its permissions; another hard
/// link to it keeps the old content.
///
/// Throws: UserError when the disk refuses (test test_unwritable_out_folder).
class AtomicFile {
 public:
  /// `owner`: part of the temporary file's name, by which it can be told when it is left.
  explicit AtomicFile(std::filesystem::path path, const std::string& owner = "tandem");
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view bytes);
  /// What was written is on the disk, and nothing more can be written.
  void flush();
  /// Flushes, and gives the file its name.
  void commit();

  const std::filesystem::path& path() const { return path_; }
  /// Of what was written.
  const FileDigest& digest() const { return digest_; }

 private:
  [[noreturn]] void fail(const char* doing) const;

  /// temporary_ is empty once it is gone.
  std::filesystem::path path_, temporary_;
  FileDigest digest_;
  int descriptor_ = -1;
};

/// Whether a temporary file of an AtomicFile with this `owner` may have this name.
bool is_temporary_of(const std::string& owner, std::string_view name);

/// Writes a file that the user names: what is there is replaced atomically where it is a regular
/// file, and written to where it is a device or a pipe. A symbolic link stays: the file that it
/// leads to is written, and made where it is not there. A file that is open, as /dev/stdout and
/// /dev/fd/3 name one, is written behind what was written to it.
///
/// Throws: UserError when it cannot be written (tests test_explain_output,
///         test_explain_output_through_links_to_nothing, test_explain_output_to_a_protected_file).
void write_file(const std::filesystem::path& path, std::string_view content);

/// What may be read: `file` refuses what is no regular file.
enum class Source { any, file };

/// The whole file. `expected` and `remedy` complete the error: "expected <expected>, got <path>
/// (<reason>). <remedy>".
///
/// Throws: UserError when it cannot be read to its end, also for lack of memory (tests
/// test_text_errors, test_text_that_does_not_fit_in_memory, test_checkpoint_that_is_no_file).
std::string read_file(const std::filesystem::path& path, std::string_view expected,
                      std::string_view remedy, Source source = Source::file);

/// `text` as JSON; discarded where it is none. What lies deeper than in any file of ours is
/// dropped: copying or printing it would take a stack as deep.
nlohmann::json parse_document(std::string_view text);

}  // namespace tandem::cli
