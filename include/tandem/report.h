// What Tandem tells about a pipeline.
#pragma once

#include <cstdint>
#include <string>

namespace tandem {

/// What `explain` shows.
enum class ExplainFormat : uint8_t { text, svg, html, json };

/// The outcome of comparing fused with unfused.
struct VerifyReport {
  bool passed = true;
  /// Tensors compared.
  int64_t comparisons = 0;
  /// For people; names the first fusion that differs.
  std::string text;
};

}  // namespace tandem
