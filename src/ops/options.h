// Options of ops: structs that JSON is read into, every name and value checked.
#pragma once

#include <cstdint>
#include <vector>

#include "core/op_def.h"

namespace tandem::ops {

struct NormOptions {
  double eps = 1e-5;  ///< added inside the square root
  bool zero_centered_gamma = false;
};
struct ScaleOptions {
  double factor = 1;
};
struct DropoutOptions {
  double p = 0.5;
};
struct ReshapeOptions {
  std::vector<int64_t> shape;
};
/// What becomes of a weight's gradient.
struct LinearOptions {
  /// What the parameter asks to be given instead, so that whoever waits for a gradient wakes up: nothing, anything, zeros.
  enum class Dummy : uint8_t { none, empty, zeros };
  bool accumulate_into_main_grad = false;  ///< it is added to the buffer main_grad, not returned
  bool overwrite_main_grad = false;        ///< it takes the place of what main_grad holds
  Dummy dummy = Dummy::none;
};
struct GroupedLinearOptions {
  size_t num_groups = 1;
  bool bias = true;
  bool packed_weight = false, packed_bias = false;  ///< one tensor for all groups
};
struct QuantizeOptions {
  bool forward = true, backward = false;
};

Options parse_no_options(const nlohmann::json& options);
Options parse_norm(const nlohmann::json& options);
Options parse_scale(const nlohmann::json& options);
Options parse_dropout(const nlohmann::json& options);
Options parse_reshape(const nlohmann::json& options);
Options parse_linear(const nlohmann::json& options);
Options parse_grouped_linear(const nlohmann::json& options);
Options parse_quantize(const nlohmann::json& options);

}  // namespace tandem::ops
