#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "program/files.h"

namespace tandem::apps {

/// The folder that `tandem train` writes into. One process holds it at a time. Files that Tandem
/// did not write are neither replaced nor removed.
///
/// tandem-files.json lists what Tandem writes: each name with the size and checksum of the content
/// that Tandem wrote. A file with another content is not Tandem's, whatever its name. Writes happen
/// in an order such that a crash at any point leaves no file of Tandem that the list does not know:
///
///   commit   the temporary file is on the disk; the list knows its content beside the content that
///            it will replace; the file is renamed
///   append   as commit, but both contents are written to tandem.lock, because a row of
///            metrics.jsonl is not worth an fsync. The next process that locks the folder copies
///            them to the list.
///
/// Contents are compared instead of times and inodes, because a copied folder and a checkpoint that
/// was restored from a copy are still Tandem's. A file is read for this once, unless it has changed
/// since: the checkpoints that a training replaces are known to be its own.
///
/// tandem.lock is locked with flock(2), which ends with the process in any case, and is removed
/// when the folder is released. It names the owner that is part of temporary files' names, so that
/// those of a killed process are recognized. A lock without Tandem's mark belongs to another
/// program.
class OutFolder {
 public:
  enum class Missing { create, refuse };

  /// Locks the folder and removes temporary files of a killed process.
  ///
  /// Throws: UserError if the folder cannot be written or another process holds it (tests
  ///         test_unwritable_out_folder, test_second_training_in_a_folder_is_refused).
  OutFolder(std::filesystem::path folder, Missing missing);
  ~OutFolder();
  OutFolder(const OutFolder&) = delete;
  OutFolder& operator=(const OutFolder&) = delete;

  const std::filesystem::path& path() const { return folder_; }

  /// Throws: UserError that names the first of `names` which exists and which Tandem did not write
  ///         (tests test_files_of_others_are_kept,
  ///         test_files_changed_since_tandem_wrote_them_are_kept).
  void require_free(const std::vector<std::string>& names);

  /// Begins to write the file `name`; `commit` gives it that name. Throws: as require_free.
  AtomicFile begin(const std::string& name);
  void commit(AtomicFile& file);

  /// Appends `text` to the file `name`. Throws: as require_free.
  void append(const std::string& name, std::string_view text);

  /// Accepts the file `name` in its present state if the name is on the list, because its content
  /// has shown that Tandem wrote it (test test_checkpoint_restored_from_a_copy_goes_on).
  void recognize(const std::string& name);

  /// Removes all files on the list whose names begin with `prefix`, except `current`.
  void remove_others(std::string_view prefix, const std::string& current);

 private:
  /// Changes when a file is written to or replaced.
  struct Stamp {
    uint64_t device = 0, inode = 0;
    int64_t bytes = 0, seconds = 0, nanoseconds = 0;
    bool operator==(const Stamp&) const = default;
  };

  struct Entry {
    /// The contents that Tandem wrote under this name; the newest is last.
    std::vector<FileDigest> contents;
    /// The file's stamp when it was last known to be Tandem's.
    std::optional<Stamp> checked;
  };

  static std::optional<Stamp> stamp_of(const std::filesystem::path& path);
  void lock();
  void unlock();
  void write_lock() const;
  void read_list();
  void write_list();
  void remove_temporaries() const;
  bool is_ours(const std::string& name);
  void settle(const std::string& name, const FileDigest& content);

  const std::filesystem::path folder_;
  /// The list of files.
  std::map<std::string, Entry> files_;
  /// Whether the list differs from tandem-files.json.
  bool list_is_old_ = false;
  /// The newest entry of the list as the lock holds it, in JSON.
  std::string growth_;
  /// The owner in the names of temporary files, which the lock names.
  std::string owner_;
  int lock_ = -1;
};

}  // namespace tandem::apps
