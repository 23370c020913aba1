// The activations in torch's differentiable operations: a specialization for each row of
// tandem/activations.h, and for each unit that has numbers.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/erfc.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "kernels/activation.h"

namespace tandem::kernel_ops {

using kernels::Activation;

/// value(z), and grad(grad_y, z) = grad_y * act'(z). For every finite z the gradient is finite if
/// grad_y is; for an infinite z it is what torch's formulas give, which is NaN for some.
template <Activation>
struct ActivationReference;

/// The gate of a gated unit with numbers, and its factor: y = value(a) other(b).
template <Activation>
struct UnitReference;

// 1 - x is written as at::rsub(x, 1): ATen's operator with a number before a tensor writes in
// place, which an exported program must not do.

/// z sigmoid(rate z), and its gradient.
inline at::Tensor linear_gate(const at::Tensor& z, double rate) {
  return z * at::sigmoid(rate * z);
}
inline at::Tensor linear_gate_grad(const at::Tensor& grad_y, const at::Tensor& z, double rate) {
  const at::Tensor s = at::sigmoid(rate * z);
  return grad_y * (s + (rate * at::rsub(s, 1)) * (z * s));
}

template <>
struct ActivationReference<Activation::gelu> {
  static at::Tensor value(const at::Tensor& z) { return at::gelu(z, "tanh"); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    constexpr double kBeta = 0.7978845608028654,
                     kCubic = 0.044715,  // sqrt(2 / pi), and Hendrycks and Gimpel's constant
        kSaturated = 20;  // tanh is 1 from there on; the cube of a larger z may overflow
    const at::Tensor bounded = at::clamp(z, -kSaturated, kSaturated);
    const at::Tensor t = at::tanh(kBeta * (bounded + kCubic * bounded * bounded * bounded));
    return grad_y *
           (0.5 * (1 + t) +
            0.5 * z * (at::rsub(t * t, 1) * (kBeta * (1 + 3 * kCubic * bounded * bounded))));
  }
};

template <>
struct ActivationReference<Activation::silu> {
  static at::Tensor value(const at::Tensor& z) { return at::silu(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    const at::Tensor s = at::sigmoid(z);
    return grad_y * (s * (1 + z * at::rsub(s, 1)));
  }
};

template <>
struct ActivationReference<Activation::relu> {
  static at::Tensor value(const at::Tensor& z) { return at::relu(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    return at::where(z <= 0, at::zeros_like(grad_y), grad_y);
  }
};

template <>
struct ActivationReference<Activation::sigmoid> {
  static at::Tensor value(const at::Tensor& z) { return at::sigmoid(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    const at::Tensor s = at::sigmoid(z);
    return grad_y * (s * at::rsub(s, 1));
  }
};

template <>
struct ActivationReference<Activation::qgelu> {
  static at::Tensor value(const at::Tensor& z) { return linear_gate(z, 1.702); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    return linear_gate_grad(grad_y, z, 1.702);
  }
};

template <>
struct ActivationReference<Activation::srelu> {
  static at::Tensor value(const at::Tensor& z) {
    const at::Tensor on = at::relu(z);
    return on * on;
  }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    return at::where(z <= 0, at::zeros_like(grad_y), 2 * z * grad_y);
  }
};

template <>
struct ActivationReference<Activation::erf_gelu> {
  static at::Tensor value(const at::Tensor& z) { return z * phi(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    constexpr double kDensity = 0.3989422804014327;  // 1 / sqrt(2 pi)
    return grad_y * (phi(z) + kDensity * (z * at::exp(-0.5 * z * z)));
  }

 private:
  // 1 + erf(x) is written as erfc(-x), which does not cancel.
  static at::Tensor phi(const at::Tensor& z) { return 0.5 * at::erfc(-0.7071067811865476 * z); }
};

template <>
struct ActivationReference<Activation::mish> {
  static at::Tensor value(const at::Tensor& z) { return at::mish(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    const at::Tensor t = at::tanh(at::softplus(z));
    return grad_y * (t + z * (at::sigmoid(z) * at::rsub(t * t, 1)));
  }
};

template <>
struct ActivationReference<Activation::softplus> {
  static at::Tensor value(const at::Tensor& z) { return at::softplus(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    return at::where(z > 20, grad_y, grad_y * at::sigmoid(z));  // there at::softplus(z) is z
  }
};

template <>
struct ActivationReference<Activation::hard_swish> {
  static at::Tensor value(const at::Tensor& z) { return at::hardswish(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    const at::Tensor bent = at::where(z <= -3, at::zeros_like(grad_y), grad_y * (z / 3 + 0.5));
    return at::where(z >= 3, grad_y, bent);
  }
};

template <>
struct ActivationReference<Activation::leaky_relu> {
  static at::Tensor value(const at::Tensor& z) { return at::leaky_relu(z); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    return at::where(z > 0, grad_y, 0.01 * grad_y);
  }
};

template <>
struct UnitReference<Activation::situglu> {
  using Numbers = kernels::UnitNumbers;
  static at::Tensor value(const at::Tensor& a, const Numbers& numbers) {
    return bounded(a, numbers[0]) * at::sigmoid(a);
  }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& a, const Numbers& numbers) {
    const at::Tensor t = at::tanh(a / numbers[0]), s = at::sigmoid(a);
    return grad_y * (s * (at::rsub(t * t, 1) + numbers[0] * t * at::rsub(s, 1)));
  }
  static at::Tensor other(const at::Tensor& b, const Numbers& numbers) {
    return bounded(b, numbers[1]);
  }
  static at::Tensor other_grad(const at::Tensor& grad, const at::Tensor& b,
                               const Numbers& numbers) {
    const at::Tensor t = at::tanh(b / numbers[1]);
    return grad * at::rsub(t * t, 1);
  }

 private:
  static at::Tensor bounded(const at::Tensor& x, double beta) { return beta * at::tanh(x / beta); }
};

template <>
struct UnitReference<Activation::clamped_swiglu> {
  using Numbers = kernels::UnitNumbers;
  static at::Tensor value(const at::Tensor& a, const Numbers& numbers) {
    return linear_gate(at::clamp_max(a, numbers[0]), numbers[1]);
  }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& a, const Numbers& numbers) {
    const at::Tensor grad_a = linear_gate_grad(grad_y, at::clamp_max(a, numbers[0]), numbers[1]);
    return at::where(a <= numbers[0], grad_a, at::zeros_like(grad_a));
  }
  static at::Tensor other(const at::Tensor& b, const Numbers& numbers) {
    return at::clamp(b, -numbers[0], numbers[0]) + numbers[2];
  }
  static at::Tensor other_grad(const at::Tensor& grad, const at::Tensor& b,
                               const Numbers& numbers) {
    return at::where((b >= -numbers[0]).logical_and(b <= numbers[0]), grad, at::zeros_like(grad));
  }
};

}  // namespace tandem::kernel_ops
