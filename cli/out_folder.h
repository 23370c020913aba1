#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "files.h"

namespace tandem::cli {

/// The folder that `tandem train` writes into. One process holds it at a time, and what Tandem did
/// not write there is neither replaced nor removed.
///
/// tandem-files.json lists what Tandem writes: each name with the size and checksum of what Tandem
/// wrote under it. What differs from that is not Tandem's, whatever its name. The order of the
/// writes lets a crash at any point leave no file of Tandem's that the list does not know:
///
///   commit   the temporary file is on the disk; the list knows its content beside the content that
///            it will replace; the file gets its name
///   append   as commit, but the two contents stand in tandem.lock: a row of metrics.jsonl is worth
///            no fsync. Whoever locks the folder next brings them into the list.
///
/// Contents are compared rather than times and inodes, because a folder that was copied, and a
/// checkpoint that was restored from a copy, are Tandem's still. A file is read for it once, unless
/// it has changed since: the checkpoints that a training replaces are its own and not read again.
///
/// tandem.lock is locked with flock(2), which ends with the process however it ends, and is removed
/// when the folder is given back. It names the owner that temporary files have in their names, so
/// that those of a killed process are told from all others. A lock without Tandem's mark is
/// another's.
class OutFolder {
 public:
  enum class Missing { create, refuse };

  /// Locks the folder and removes what a killed process left half written.
  ///
  /// Throws: UserError for a folder that cannot be written or that another process holds (tests
  ///         test_unwritable_out_folder, test_second_training_in_a_folder_is_refused).
  OutFolder(std::filesystem::path folder, Missing missing);
  ~OutFolder();
  OutFolder(const OutFolder&) = delete;
  OutFolder& operator=(const OutFolder&) = delete;

  const std::filesystem::path& path() const { return folder_; }

  /// Throws: UserError naming the first of `names` that exists and that Tandem did not write (tests
  ///         test_files_of_others_are_kept, test_files_changed_since_tandem_wrote_them_are_kept).
  void require_free(const std::vector<std::string>& names);

  /// Begins to write the file `name`, which `commit` puts in its place. Throws: as require_free.
  AtomicFile begin(const std::string& name);
  void commit(AtomicFile& file);

  /// Writes `text` behind what the file `name` holds. Throws: as require_free.
  void append(const std::string& name, std::string_view text);

  /// Takes the file `name` for Tandem's as it is, if the name is on the list: it was found to be
  /// Tandem's by what it holds (test test_checkpoint_restored_from_a_copy_goes_on).
  void recognize(const std::string& name);

  /// Removes all files on the list whose names begin with `prefix`, but `current`.
  void remove_others(std::string_view prefix, const std::string& current);

 private:
  /// What changes when somebody writes to a file or puts another in its place.
  struct Stamp {
    uint64_t device = 0, inode = 0;
    int64_t bytes = 0, seconds = 0, nanoseconds = 0;
    bool operator==(const Stamp&) const = default;
  };

  struct Entry {
    /// What Tandem wrote under this name; the last is the newest.
    std::vector<FileDigest> contents;
    /// Of the file when it was last known to be Tandem's.
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
  /// The list.
  std::map<std::string, Entry> files_;
  /// It differs from the file.
  bool list_is_old_ = false;
  /// What the lock says of the list's newest entry, as JSON.
  std::string growth_;
  /// Of temporary files, as the lock names it.
  std::string owner_;
  int lock_ = -1;
};

}  // namespace tandem::cli
