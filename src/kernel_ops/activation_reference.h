// The activations in torch's operations, which can be differentiated again: a specialization for
// each row of tandem/activations.h.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "kernels/activation.h"

namespace tandem::kernel_ops {

using kernels::Activation;

/// value(z), and grad(grad_y, z) = grad_y * act'(z). For every finite z it is finite where grad_y
/// is; at an infinite z it is what torch's formulas give, which for gelu and silu is NaN.
template <Activation>
struct ActivationReference;

template <>
struct ActivationReference<Activation::gelu> {
  static at::Tensor value(const at::Tensor& z) { return at::gelu(z, "tanh"); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    constexpr double kBeta = 0.7978845608028654,
                     kCubic = 0.044715,  // sqrt(2 / pi), and Hendrycks and Gimpel's constant
        kSaturated = 20;  // tanh is 1 from there on; the cube of a larger z may overflow
    const at::Tensor bounded = at::clamp(z, -kSaturated, kSaturated);
    const at::Tensor t = at::tanh(kBeta * (bounded + kCubic * bounded * bounded * bounded));
    return grad_y * (0.5 * (1 + t) +
                     0.5 * z * ((1 - t * t) * (kBeta * (1 + 3 * kCubic * bounded * bounded))));
  }
};

template <>
struct ActivationReference<Activation::silu> {
  static at::Tensor value(const at::Tensor& z) { return at::silu(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    const at::Tensor s = at::sigmoid(z);
    return grad_y * (s * (1 + z * (1 - s)));
  }
};

template <>
struct ActivationReference<Activation::relu> {
  static at::Tensor value(const at::Tensor& z) { return at::relu(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    return at::where(z <= 0, at::zeros_like(grad_y), grad_y);
  }
};

}  // namespace tandem::kernel_ops
