// Activations and gated units as kernel ops: after the bias of a product, or times one number per
// row.
#pragma once

#include "kernel_ops/framework/kernel_op.h"
#include "tandem/export.h"

namespace tandem::kernel_ops {

/// act(z) in torch operations. Throws c10::ValueError for an unknown name.
TANDEM_API Tensor activation(std::string_view name, const Tensor& z);

/// z = x + bias; y = act(z), or the formula of a gated unit, such as act(a) * b. a and b are the
/// halves of the last dimension of z, or alternating blocks of it, and the gate a comes first.
/// `activation` is a text as in activation_function.h.
///
/// Shapes:  x [..., cols], bias [cols] -> z, y like x; gated y [..., cols / 2].
/// Dtypes:  z and y as x + bias promotes.
struct ActivationForward {
  static constexpr const char* kName = "activation_forward";
  enum Result : size_t { z, y };
  static constexpr std::array kResults{"z", "y"};
  struct Args {
    const Tensor& x;
    std::optional<Tensor> bias = {};
    std::string_view activation;
    bool is_gated;
    std::array<bool, 2> output_mask{false, true};
    CodesOf<y> codes = {};
    TANDEM_ARGUMENTS(x, bias, activation, is_gated, output_mask, codes)
  };
  static Specs<2> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<2> reference(const Args& args);
};

/// grad_z = grad_y times the derivative of y by z; y is as forward wrote it; grad_bias = sum over
/// rows of grad_z, in the dtype of grad_z.
struct ActivationBackward {
  static constexpr const char* kName = "activation_backward";
  enum Result : size_t { grad_z, y, grad_bias };
  static constexpr std::array kResults{"grad_z", "y", "grad_bias"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& z;
    std::string_view activation;
    bool is_gated;
    std::array<bool, 3> output_mask;
    CodesOf<grad_z> codes = {};
    CodesOf<y> y_codes = {};
    TANDEM_ARGUMENTS(grad_y, z, activation, is_gated, output_mask, codes, y_codes)
  };
  static Specs<3> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<3> reference(const Args& args);
};

/// Throws c10::ValueError unless there is one scale per row of x.
void check_scales(const Tensor& x, const Tensor& scales);

/// y = act(x) * scales, with one scale per row of x; for a gated unit, its formula instead of act.
///
/// Shapes:  x [..., cols], gated [..., 2 * cols], scales [...] -> y [..., cols].
/// Dtypes:  y as x.
struct ScaledActivationForward {
  static constexpr const char* kName = "scaled_activation_forward";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& x;
    const Tensor& scales;
    std::string_view activation;
    bool is_gated;
    TANDEM_ARGUMENTS(x, scales, activation, is_gated)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// grad_x = grad_y * scales times the derivative of act(x); grad_scales = sum over columns of
/// grad_y * act(x); y is as forward wrote it.
struct ScaledActivationBackward {
  static constexpr const char* kName = "scaled_activation_backward";
  enum Result : size_t { grad_x, grad_scales, y };
  static constexpr std::array kResults{"grad_x", "grad_scales", "y"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& x;
    const Tensor& scales;
    std::string_view activation;
    bool is_gated;
    std::array<bool, 3> output_mask;
    TANDEM_ARGUMENTS(grad_y, x, scales, activation, is_gated, output_mask)
  };
  static Specs<3> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<3> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
