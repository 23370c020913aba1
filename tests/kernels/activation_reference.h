// Activations in float64, as their formulas say: what the vector code is measured against.
#pragma once

#include <cmath>

#include "kernels/activation.h"

namespace tandem::testing {

/// v with act(z) = z / (1 + exp(-v)), and its derivative.
inline double gate(kernels::Activation activation, double z) {
  return activation == kernels::Activation::silu ? z
                                                 : std::sqrt(8 / M_PI) * (z + 0.044715 * z * z * z);
}
inline double gate_slope(kernels::Activation activation, double z) {
  return activation == kernels::Activation::silu ? 1
                                                 : std::sqrt(8 / M_PI) * (1 + 3 * 0.044715 * z * z);
}

inline double activation_reference(kernels::Activation activation, double z) {
  if (std::isnan(z)) return z;
  if (activation == kernels::Activation::relu) return z > 0 ? z : 0;
  if (std::isinf(z)) return z > 0 ? z : NAN;  // -infinity times 0, as in torch
  return z / (1 + std::exp(-gate(activation, z)));
}

inline double activation_slope_reference(kernels::Activation activation, double z) {
  if (activation == kernels::Activation::relu)
    return z <= 0 ? 0 : 1;            // at NaN the gradient passes, as in torch
  if (!std::isfinite(z)) return NAN;  // infinity times 0, as in torch
  const double v = gate(activation, z), on = 1 / (1 + std::exp(-v)), off = 1 / (1 + std::exp(v));
  // Where `on` has underflowed the product is 0, however large the rest.
  return on == 0 ? 0 : on + z * on * off * gate_slope(activation, z);
}

}  // namespace tandem::testing
