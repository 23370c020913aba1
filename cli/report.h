#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace tandem::cli {

/// What is left of a run when it has ended.
struct RunResult {
  std::string run;
  double validation_bits_per_byte = 0;
  /// Median over steps.
  double tokens_per_second = 0;
  /// Kept for backward, parameters aside.
  double saved_bytes_per_token = 0;
  /// Beyond what the process held before.
  double peak_memory_bytes = 0;
};

void to_json(nlohmann::json& to, const RunResult& from);
void from_json(const nlohmann::json& from, RunResult& to);

/// The results as lines of aligned columns.
std::string results_table(const std::vector<RunResult>& results);

struct Report {
  /// The configuration in words.
  std::string title;
  std::vector<RunResult> results;
  /// Rows with "run", "step" and "bits_per_byte".
  const nlohmann::json* log;
  std::string plan_svg, sample;
  /// What quantizing did to each tensor, drawn; empty where nobody looked.
  std::string inspection_svg;
};

/// One HTML page that needs nothing beside it: loss curves, table, plan of a layer, sample.
std::string report_html(const Report& report);

}  // namespace tandem::cli
