// What Tandem tells about a pipeline.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace tandem {

/// What `explain` shows. `dot` is a graph for Graphviz.
enum class ExplainFormat : uint8_t { text, svg, html, json, dot };

/// Microseconds of one run of a step, by its name as plans have it: a profiler's averages, which a
/// picture then shows.
using StepTimes = std::map<std::string, double>;

/// The outcome of comparing fused with unfused.
struct VerifyReport {
  bool passed = true;
  /// Tensors compared.
  int64_t comparisons = 0;
  /// For people; names the first fusion that differs.
  std::string text;
};

}  // namespace tandem
