// Activations in float64, as their formulas say: what the vector code is measured against.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/activation.h"
#include "tests/support/matrix.h"
#include "tests/support/ulp.h"

namespace tandem::testing {

/// The activations whose formulas are here. Another one is compared with its composite reference
/// only (tests/kernel_ops/activation_test.cpp).
inline constexpr kernels::Activation kKnownActivations[] = {
    kernels::Activation::gelu,       kernels::Activation::silu,      kernels::Activation::relu,
    kernels::Activation::sigmoid,    kernels::Activation::qgelu,     kernels::Activation::srelu,
    kernels::Activation::erf_gelu,   kernels::Activation::mish,      kernels::Activation::softplus,
    kernels::Activation::hard_swish, kernels::Activation::leaky_relu};

/// v with act(z) = z / (1 + exp(-v)).
inline double gate(kernels::Activation activation, double z) {
  if (activation == kernels::Activation::gelu)
    return std::sqrt(8 / M_PI) * (z + 0.044715 * z * z * z);
  return activation == kernels::Activation::qgelu ? 1.702 * z : z;
}
/// Its derivative.
inline double gate_slope(kernels::Activation activation, double z) {
  if (activation == kernels::Activation::gelu)
    return std::sqrt(8 / M_PI) * (1 + 3 * 0.044715 * z * z);
  return activation == kernels::Activation::qgelu ? 1.702 : 1;
}

inline double activation_reference(kernels::Activation activation, double z) {
  using kernels::Activation;
  if (std::isnan(z)) return z;
  switch (activation) {
    case Activation::relu:
      return z > 0 ? z : 0;
    case Activation::srelu:
      return z > 0 ? z * z : 0;
    case Activation::leaky_relu:
      return z > 0 ? z : 0.01 * z;
    case Activation::sigmoid:
      return 1 / (1 + std::exp(-z));
    case Activation::softplus:
      return std::max(z, 0.0) + std::log1p(std::exp(-std::fabs(z)));
    case Activation::hard_swish:
      return z * (std::clamp(z + 3, 0.0, 6.0) / 6);
    case Activation::erf_gelu:
      return z * (std::erfc(-z / M_SQRT2) / 2);
    case Activation::mish:
      return z * std::tanh(std::log1p(std::exp(z)));
    default:
      if (std::isinf(z)) return z > 0 ? z : NAN;  // -infinity times 0, as in torch
      return z / (1 + std::exp(-gate(activation, z)));
  }
}

inline double activation_slope_reference(kernels::Activation activation, double z) {
  using kernels::Activation;
  const double sigmoid = 1 / (1 + std::exp(-z));
  switch (activation) {
    case Activation::relu:
      return z <= 0 ? 0 : 1;  // at NaN the gradient passes, as in torch
    case Activation::srelu:
      return z <= 0 ? 0 : 2 * z;
    case Activation::leaky_relu:
      return z > 0 ? 1 : 0.01;  // at NaN too, as in torch
    case Activation::sigmoid:
      return sigmoid / (1 + std::exp(z));
    case Activation::softplus:
      return sigmoid;
    case Activation::hard_swish:
      return z <= -3 ? 0 : z >= 3 ? 1 : z / 3 + 0.5;
    case Activation::erf_gelu:
      return std::erfc(-z / M_SQRT2) / 2 + z * std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
    case Activation::mish: {
      const double t = std::tanh(std::log1p(std::exp(z)));
      return t + z * (sigmoid * (1 - t * t));
    }
    default: {
      if (!std::isfinite(z)) return NAN;  // infinity times 0, as in torch
      const double v = gate(activation, z), on = 1 / (1 + std::exp(-v)),
                   off = 1 / (1 + std::exp(v));
      // Where `on` has underflowed the product is 0, however large the rest.
      return on == 0 ? 0 : on + z * on * off * gate_slope(activation, z);
    }
  }
}

inline float value(const Matrix& matrix, size_t r, size_t c) {
  return matrix.at(r * matrix.cols() + c);
}
inline void put(Matrix& matrix, size_t r, size_t c, double value) {
  matrix.set(r * matrix.cols() + c, static_cast<float>(value));
}

/// The distance from |value| to the next float32 above it, at least that of `floor`.
inline double ulp(double value, double floor) {
  const double magnitude = std::max(std::fabs(value), floor);
  return std::isnormal(magnitude) ? std::ldexp(1.0, std::ilogb(magnitude) - 23) : INFINITY;
}

/// As activation.h states, for act(z), or act(z) * factor: a product that is rounded once more.
inline double forward_bound(double expected, kernels::Element z_element,
                            const double* factor = nullptr) {
  const double floor = 0x1p-121 * (factor ? std::fabs(*factor) : 1);
  if (z_element != kernels::Element::float32) return 0x1p-16 * std::fabs(expected) + floor;
  return (factor ? 5 : 4) * ulp(expected, 0x1p-126) + floor;
}

/// |actual - expected| <= bound before the one rounding to the element.
inline ::testing::AssertionResult is_near(double expected, double actual, double bound,
                                          kernels::Element element, size_t r, size_t c) {
  if ((std::isnan(expected) && std::isnan(actual)) || expected == actual)
    return ::testing::AssertionSuccess();
  // A sum of float32 that overflows, or rounds to infinity in the element.
  const double largest = element == kernels::Element::float16    ? 65504
                         : element == kernels::Element::bfloat16 ? 0x1.fep127
                                                                 : 0x1.fffffep127;
  if (std::isinf(actual) && std::fabs(expected) >= largest) return ::testing::AssertionSuccess();
  const double allowed = bound + allowed_error(element, 0, std::fabs(expected) + bound);
  if (std::fabs(actual - expected) <= allowed) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "at [" << r << ", " << c << "]: expected " << expected << ", got " << actual
         << ", off by " << std::fabs(actual - expected) << " where " << allowed << " is allowed";
}

}  // namespace tandem::testing
