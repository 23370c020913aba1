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

/// grad_scale = sum of grad_y * x over the dimensions along which scale was broadcast, in float32
/// or wider, rounded once. Of scale only the sizes and the dtype count.
///
/// Shapes: grad_y like x; scale such that it broadcasts to x -> grad_scale like scale.
struct ModulateScaleBackward {
  static constexpr const char* kName = "modulate_scale_backward";
  static constexpr std::array kResults{"grad_scale"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& x;
    const Tensor& scale;
    TANDEM_ARGUMENTS(grad_y, x, scale)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
