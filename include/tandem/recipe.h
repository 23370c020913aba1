// Recipes: which low-precision format the operands of products take, and how they are scaled.
#pragma once

#include <variant>

namespace tandem {

/// Per-tensor scaling from the tensor's own amax: scale = format max / amax, for every tensor, at every call.
struct Float8CurrentScaling {
  enum class Format : unsigned char {
    hybrid,  ///< inputs and weights E4M3, gradients E5M2
    e4m3,    ///< everything E4M3
  };
  Format fp8_format = Format::hybrid;
  bool use_power_2_scales = false;
  double amax_epsilon[3] = {0, 0, 0};  ///< lower bound of amax of inputs, weights, gradients
  bool operator==(const Float8CurrentScaling&) const = default;
};

/// FP8 with one power of two as scale per block of 32 numbers along the dimension that a product sums over (OCP MX).
struct MXFP8BlockScaling {
  enum class Format : unsigned char {
    hybrid,  ///< inputs and weights E4M3, gradients E5M2
    e4m3,    ///< everything E4M3
  };
  Format fp8_format = Format::e4m3;
  bool enable_2d_quantization =
      false;  ///< blocks of weights are 32 by 32, so that both directions have the same codes
  bool operator==(const MXFP8BlockScaling&) const = default;
};

/// A recipe, whichever it is.
using Recipe = std::variant<Float8CurrentScaling, MXFP8BlockScaling>;

}  // namespace tandem
