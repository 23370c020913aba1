// Options of ops as they run with. What a user may write of them is in the signature of each op.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem::ops {

struct NormOptions {
  /// Added inside the square root.
  double eps = 1e-5;
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
  /// What the parameter asks to be given instead, so that whoever waits for a gradient wakes up:
  /// nothing, anything, zeros.
  enum class Dummy : uint8_t { none, empty, zeros };
  /// It is added to the buffer main_grad, not returned.
  bool accumulate_into_main_grad = false;
  /// It takes the place of what main_grad holds.
  bool overwrite_main_grad = false;
  Dummy dummy = Dummy::none;
};
struct GroupedLinearOptions {
  size_t num_groups = 1;
  bool bias = true;
  /// One tensor for all groups.
  bool packed_weight = false, packed_bias = false;
};
struct QuantizeOptions {
  bool forward = true, backward = false;
};

}  // namespace tandem::ops
