// Activations and gated linear units as kernel ops, with the bias of the product before them.
#pragma once

#include "kernel_ops/framework/kernel_op.h"
#include "tandem/export.h"

namespace tandem::kernel_ops {

/// act(z) as a user of libtorch would write it. Throws c10::ValueError for a name that is none.
TANDEM_API Tensor activation(std::string_view name, const Tensor& z);

/// z = x + bias; y = act(z). `activation` is the name of a row of tandem/activations.h, of a gated
/// unit what activation_function.h says.
///
/// Shapes:      x [..., cols], bias [cols] -> z, y like x.
/// Dtypes:      z and y as x + bias promotes.
/// output_mask: z, y.
struct ActivationForward {
  static constexpr const char* kName = "activation_forward";
  static constexpr const char* kQualifiedName = "tandem::activation_forward";
  static constexpr const char* kSchema =
      "activation_forward(Tensor x, Tensor? bias, str activation, bool[2] output_mask) -> (Tensor "
      "z, Tensor y)";
  static Specs<2> shapes(const Tensor& x, const std::optional<Tensor>& bias,
                         std::string_view activation, std::array<bool, 2> output_mask);
  static void cpu(const Tensor& x, const std::optional<Tensor>& bias, std::string_view activation,
                  std::array<bool, 2> output_mask, Results<2>& results);
  static Results<2> reference(const Tensor& x, const std::optional<Tensor>& bias,
                              std::string_view activation, std::array<bool, 2> output_mask);
};

/// grad_z = grad_y * act'(z); grad_bias = sum over rows of grad_z, in the dtype of grad_z; y =
/// act(z), as forward wrote it.
///
/// output_mask: grad_z, grad_bias, y.
struct ActivationBackward {
  static constexpr const char* kName = "activation_backward";
  static constexpr const char* kQualifiedName = "tandem::activation_backward";
  static constexpr const char* kSchema =
      "activation_backward(Tensor grad_y, Tensor z, str activation, bool[3] output_mask) -> "
      "(Tensor grad_z, Tensor grad_bias, Tensor "
      "y)";
  static Specs<3> shapes(const Tensor& grad_y, const Tensor& z, std::string_view activation,
                         std::array<bool, 3> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& z, std::string_view activation,
                  std::array<bool, 3> output_mask, Results<3>& results);
  static Results<3> reference(const Tensor& grad_y, const Tensor& z, std::string_view activation,
                              std::array<bool, 3> output_mask);
};

/// y = act(a) * b, or the unit's formula, with [a, b] the halves of the last dimension of z = x +
/// bias, or blocks by turns: the gate comes first.
///
/// Shapes:      x [..., 2 * cols], bias [2 * cols] -> z like x, y [..., cols].
/// output_mask: z, y.
struct GluForward {
  static constexpr const char* kName = "glu_forward";
  static constexpr const char* kQualifiedName = "tandem::glu_forward";
  static constexpr const char* kSchema =
      "glu_forward(Tensor x, Tensor? bias, str activation, bool[2] output_mask) -> (Tensor z, "
      "Tensor y)";
  static Specs<2> shapes(const Tensor& x, const std::optional<Tensor>& bias,
                         std::string_view activation, std::array<bool, 2> output_mask);
  static void cpu(const Tensor& x, const std::optional<Tensor>& bias, std::string_view activation,
                  std::array<bool, 2> output_mask, Results<2>& results);
  static Results<2> reference(const Tensor& x, const std::optional<Tensor>& bias,
                              std::string_view activation, std::array<bool, 2> output_mask);
};

/// The gradient of GluForward; as ActivationBackward, grad_z like z.
struct GluBackward {
  static constexpr const char* kName = "glu_backward";
  static constexpr const char* kQualifiedName = "tandem::glu_backward";
  static constexpr const char* kSchema =
      "glu_backward(Tensor grad_y, Tensor z, str activation, bool[3] output_mask) -> (Tensor "
      "grad_z, Tensor grad_bias, Tensor y)";
  static Specs<3> shapes(const Tensor& grad_y, const Tensor& z, std::string_view activation,
                         std::array<bool, 3> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& z, std::string_view activation,
                  std::array<bool, 3> output_mask, Results<3>& results);
  static Results<3> reference(const Tensor& grad_y, const Tensor& z, std::string_view activation,
                              std::array<bool, 3> output_mask);
};

}  // namespace tandem::kernel_ops
