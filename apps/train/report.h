#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tandem::apps {

/// The figures of a finished run.
struct RunResult {
  std::string run;
  double validation_bits_per_byte = 0;
  /// The median over steps.
  double tokens_per_second = 0;
  /// Bytes that are kept for backward, without parameters.
  double saved_bytes_per_token = 0;
  /// The largest memory, minus what the process held before.
  double peak_memory_bytes = 0;
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunResult, run, validation_bits_per_byte, tokens_per_second,
                                   saved_bytes_per_token, peak_memory_bytes)

/// The results as a table of aligned columns.
std::string results_table(const std::vector<RunResult>& results);

struct Report {
  /// The configuration in words.
  std::string title;
  std::vector<RunResult> results;
  /// Rows with "run", "step" and "bits_per_byte".
  const nlohmann::json* log;
  std::string plan_svg, sample;
  /// A picture of what quantizing lost in each tensor; empty without inspection.
  std::string inspection_svg;
};

/// One self-contained HTML page: loss curves, table, plan of a layer, sample.
std::string report_html(const Report& report);

}  // namespace tandem::apps
