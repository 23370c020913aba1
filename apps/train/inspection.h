#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

namespace tandem::apps {

/// Collects what quantizing loses in the tensors of a run (quantization/inspection.h), under the
/// names of their products. Prints a warning at the first step in which a tensor saturates or is
/// not finite.
class Inspection {
 public:
  /// Takes the records since the last call. `name(pipeline, op)`: the name of the product.
  void take(const std::string& run, int64_t step, bool quiet,
            const std::function<std::string(int64_t pipeline, size_t op)>& name);

  /// Rows with "run", "step", "tensor", "signal_to_noise" (null if nothing is lost) and the other
  /// measurements.
  const nlohmann::json& rows() const { return rows_; }
  void set_rows(nlohmann::json rows) { rows_ = std::move(rows); }

 private:
  void tell(const nlohmann::json& row);

  nlohmann::json rows_ = nlohmann::json::array();
  std::set<std::pair<std::string, std::string>> told_;
};

/// A picture for each run and tensor: the signal-to-noise ratio over the steps, in red where
/// numbers saturate.
std::string inspection_svg(const nlohmann::json& rows);

}  // namespace tandem::apps
