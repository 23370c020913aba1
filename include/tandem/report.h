// What `explain` and `verify` take and return.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace tandem {

/// The output format of `explain`; `dot` is a graph for Graphviz.
enum class ExplainFormat : uint8_t { text, svg, html, json, dot };

/// The average time of one run of each step, by the step's name in the plan, which a picture shows.
///
/// Units:   microseconds.
using StepTimes = std::map<std::string, double>;

/// The result of comparing a pipeline with and without fusions.
struct VerifyReport {
  bool passed = true;
  /// The number of compared tensors.
  int64_t comparisons = 0;
  /// A text for the user, which names the first fusion whose tensors differ.
  std::string text;
};

}  // namespace tandem
