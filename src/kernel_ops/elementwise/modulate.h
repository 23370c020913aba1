// Modulation, x * (offset + scale) + shift, as kernel ops.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// y = x * (offset + scale) + shift in float32 or wider, rounded once.
///
/// Shapes: x [..., cols], scale and shift such that they broadcast to x -> y like x.
/// Dtypes: floating each; y has the dtype to which they promote.
/// Throws: c10::ValueError for other shapes, c10::TypeError for other dtypes.
/// Source: Peebles and Xie 2022, arXiv:2212.09748; without shift Touvron et al. 2021,
///         arXiv:2103.17239.
struct Modulate {
  static constexpr const char* kName = "modulate";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& x;
    const Tensor& scale;
    std::optional<Tensor> shift = {};
    double offset;
    TANDEM_ARGUMENTS(x, scale, shift, offset)
  };
  static bool takes(const Args& args);
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// grad_x = grad_y * (offset + scale); grad_scale = sum of grad_y * x and grad_shift = sum of
/// grad_y, over the dimensions along which scale and shift were broadcast, in float32 or wider,
/// each rounded once; y bitwise as `Modulate` writes it.
///
/// Shapes: grad_y like x; scale and shift such that they broadcast to x -> grad_x, grad_scale,
///         grad_shift like these, y like x.
/// Dtypes: gradients have those of x, scale and shift.
struct ModulateBackward {
  static constexpr const char* kName = "modulate_backward";
  enum Result : size_t { grad_x, grad_scale, grad_shift, y };
  static constexpr std::array kResults{"grad_x", "grad_scale", "grad_shift", "y"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& x;
    const Tensor& scale;
    std::optional<Tensor> shift = {};
    double offset;
    std::array<bool, 4> output_mask{true, true, true, true};
    TANDEM_ARGUMENTS(grad_y, x, scale, shift, offset, output_mask)
  };
  static Specs<4> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<4> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
