// Activations and gated linear units times a number per row, as kernel ops.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// Throws c10::ValueError unless there is one scale per row of x.
void check_scales(const Tensor& x, const Tensor& scales);

/// y = act(x) * scales, of a gated unit its formula instead of act; one number per row of x.
/// `activation` is what activation_function.h says.
///
/// Shapes: x [..., cols], gated [..., 2 * cols], scales [...] -> y [..., cols].
/// Dtypes: y as x.
struct ScaledActivationForward {
  static constexpr const char* kName = "scaled_activation_forward";
  static constexpr const char* kQualifiedName = "tandem::scaled_activation_forward";
  static constexpr const char* kSchema =
      "scaled_activation_forward(Tensor x, Tensor scales, str activation, bool is_gated) -> Tensor";
  static Specs<1> shapes(const Tensor& x, const Tensor& scales, std::string_view activation,
                         bool is_gated);
  static void cpu(const Tensor& x, const Tensor& scales, std::string_view activation, bool is_gated,
                  Results<1>& results);
  static Results<1> reference(const Tensor& x, const Tensor& scales, std::string_view activation,
                              bool is_gated);
};

/// grad_x = grad_y * scales * act'(x); grad_scales = sum over columns of grad_y * act(x); y as
/// forward wrote it.
///
/// output_mask: grad_x, grad_scales, y.
struct ScaledActivationBackward {
  static constexpr const char* kName = "scaled_activation_backward";
  static constexpr const char* kQualifiedName = "tandem::scaled_activation_backward";
  static constexpr const char* kSchema =
      "scaled_activation_backward(Tensor grad_y, Tensor x, Tensor scales, str activation, bool "
      "is_gated, bool[3] output_mask) -> (Tensor grad_x, Tensor grad_scales, Tensor y)";
  static Specs<3> shapes(const Tensor& grad_y, const Tensor& x, const Tensor& scales,
                         std::string_view activation, bool is_gated,
                         std::array<bool, 3> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& x, const Tensor& scales,
                  std::string_view activation, bool is_gated, std::array<bool, 3> output_mask,
                  Results<3>& results);
  static Results<3> reference(const Tensor& grad_y, const Tensor& x, const Tensor& scales,
                              std::string_view activation, bool is_gated,
                              std::array<bool, 3> output_mask);
};

}  // namespace tandem::kernel_ops
