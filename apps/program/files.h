#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tandem::apps {

/// FNV-1a with 64 bits. It finds damage and is not cryptographic. One changed byte always changes
/// it. It is by hand, because std::hash may differ from build to build.
class Checksum {
 public:
  static constexpr size_t kDigits = 16;

  void add(std::string_view bytes);
  std::string hex() const;
  bool operator==(const Checksum&) const = default;

  /// The checksum of which `text` is the `hex`; nullopt if it is that of none.
  static std::optional<Checksum> of_hex(std::string_view text);

 private:
  uint64_t state_ = 0xcbf29ce484222325ULL;
};

/// Size and checksum of a file's content, by which contents are compared.
struct FileDigest {
  int64_t bytes = 0;
  Checksum checksum;

  void add(std::string_view more);
  bool operator==(const FileDigest&) const = default;
};

/// {"bytes": .., "fnv1a64": ..}, and back; nullopt if `from` is no such object.
void to_json(nlohmann::json& to, const FileDigest& from);
std::optional<FileDigest> digest_of_json(const nlohmann::json& from);

/// The digest of the file `path`; nullopt if it cannot be read.
std::optional<FileDigest> digest_of_file(const std::filesystem::path& path);

/// Writes all of `bytes` to an open file, even if write(2) writes a part, is interrupted, or finds
/// a full pipe that its reader made non-blocking. Returns false and sets errno if it fails.
bool write_all(int descriptor, std::string_view bytes);

/// Writes `path` so that a crash leaves either the old or the new content: a temporary file beside
/// it with a unique name, fsync, rename, fsync of the folder. Without `commit` nothing changes, and
/// the temporary file is removed. The new file keeps the permissions of the replaced one; other
/// hard links to that keep the old content. It is by hand, because C++ streams know no fsync.
///
/// Throws: UserError if the file cannot be written (test test_unwritable_out_folder).
class AtomicFile {
 public:
  /// `owner`: a part of the temporary file's name, by which a file that was left behind is
  /// recognized.
  explicit AtomicFile(std::filesystem::path path, const std::string& owner = "tandem");
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view bytes);
  /// Ensures that everything written is on the disk. Nothing more can be written.
  void flush();
  /// Flushes, and renames the file to its final name.
  void commit();

  const std::filesystem::path& path() const { return path_; }
  /// The digest of what was written.
  const FileDigest& digest() const { return digest_; }

 private:
  [[noreturn]] void fail(const char* doing) const;

  /// temporary_ is empty once the temporary file is gone.
  std::filesystem::path path_, temporary_;
  FileDigest digest_;
  int descriptor_ = -1;
};

/// Whether a temporary file of an AtomicFile with this `owner` may have this name.
bool is_temporary_of(const std::string& owner, std::string_view name);

/// Writes a file that the user names. A regular file is replaced atomically; a device or a pipe is
/// written to. A symbolic link stays: the file that it leads to is written, and created if it does
/// not exist. If the name refers to an open file, such as /dev/stdout or /dev/fd/3, the content is
/// appended to it.
///
/// Throws: UserError if it cannot be written (tests test_explain_output,
///         test_explain_output_through_links_to_nothing, test_explain_output_to_a_protected_file).
void write_file(const std::filesystem::path& path, std::string_view content);

/// What read_file may read: `file` refuses everything but regular files.
enum class Source { any, file };

/// Returns the whole file. `expected` and `remedy` complete the error: "expected <expected>, got
/// <path> (<reason>). <remedy>".
///
/// Throws: UserError if it cannot be read to its end, also for lack of memory (tests
///         test_text_errors, test_text_that_does_not_fit_in_memory,
///         test_checkpoint_that_is_no_file).
std::string read_file(const std::filesystem::path& path, std::string_view expected,
                      std::string_view remedy, Source source = Source::file);

/// The folder of the running program.
std::filesystem::path program_folder();

/// The text that comes with Tandem: in share/tandem of the prefix, or in data/ of the source tree,
/// in which the program lies.
std::filesystem::path default_text();

/// `text` as JSON; a discarded value if it is none. Values that are nested deeper than in any file
/// of Tandem are dropped, because copying or printing them would overflow the stack.
nlohmann::json parse_document(std::string_view text);

}  // namespace tandem::apps
