#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

namespace tandem::cli {

/// Collects what quantizing does to the tensors of a run (quantization/inspection.h), under the
/// names of their products, and tells of the first step in which one saturates or is not finite.
class Inspection {
 public:
  /// Takes what was quantized since the last time. `name(pipeline, op)`: of the product.
  void take(const std::string& run, int64_t step, bool quiet,
            const std::function<std::string(int64_t pipeline, size_t op)>& name);

  /// Rows with "run", "step", "tensor", "signal_to_noise" (null where nothing is lost) and what
  /// else is measured.
  const nlohmann::json& rows() const { return rows_; }
  void set_rows(nlohmann::json rows) { rows_ = std::move(rows); }

 private:
  void tell(const nlohmann::json& row);

  nlohmann::json rows_ = nlohmann::json::array();
  std::set<std::pair<std::string, std::string>> told_;
};

/// For each run and tensor how far the signal is above the noise, step by step; red where numbers
/// saturate.
std::string inspection_svg(const nlohmann::json& rows);

}  // namespace tandem::cli
