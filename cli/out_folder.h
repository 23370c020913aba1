#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::cli {

/// The folder that `tandem train` writes into. One process holds it at a time, and what Tandem did
/// not write there is neither replaced nor removed.
///
/// tandem-files.json lists what Tandem writes, by name; a name enters the list before its file is
/// made, so that a crash leaves no file that the list lacks. tandem.lock is locked with flock(2),
/// which ends with the process however it ends, and is removed when the folder is given back.
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

  /// Throws: UserError naming the first of `names` that exists and that Tandem did not write (test
  ///         test_files_of_others_are_kept).
  void require_free(const std::vector<std::string>& names) const;

  /// The path to write `name` to. Throws: as require_free.
  std::filesystem::path claim(const std::string& name);

  /// Removes all files on the list whose names begin with `prefix`, but `current`.
  void remove_others(std::string_view prefix, const std::string& current);

 private:
  void lock();
  void unlock();
  void read_list();
  void write_list();
  void remove_temporaries() const;

  const std::filesystem::path folder_;
  std::set<std::string> files_;  ///< the list
  bool list_is_old_ = false;     ///< a name left it since it was written
  int lock_ = -1;
};

}  // namespace tandem::cli
