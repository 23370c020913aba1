#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem::cli {

/// One line on stderr: redrawn on a terminal, printed now and then elsewhere, absent if disabled.
class Progress {
 public:
  Progress(bool enabled, int64_t total);
  ~Progress();

  /// Shows `done` of the total after `label`; `details` follows the bar.
  void show(const std::string& label, int64_t done, const std::string& details);
  /// Ends the line, so that other output starts on a new one.
  void finish();

 private:
  bool due(bool last);

  bool enabled_, terminal_, open_ = false;
  int64_t total_;
  std::chrono::steady_clock::time_point shown_{};
};

/// The median of some times; 0 if there are none.
double median(std::vector<double> values);

}  // namespace tandem::cli
