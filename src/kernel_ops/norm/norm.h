// RMSNorm and LayerNorm as kernel ops. y has the dtype of weight; statistics are float32 (float64
// where weight is).
#pragma once

#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

/// y = x * inv_rms * gamma, inv_rms = 1 / sqrt(mean(x^2) + eps) over the dimensions that weight
/// has, the last ones; gamma = weight or 1 + weight.
///
/// Shapes:  x [..., *hidden], weight [*hidden] -> y like x, inv_rms [rows].
/// Error:   at most 8 float32 ULP from float64 (test NormOp), then one rounding to y's
///          dtype.
/// Throws:  c10::ValueError where weight is not [*hidden].
struct RmsNormForward {
  static constexpr const char* kName = "rms_norm_forward";
  static constexpr const char* kQualifiedName = "tandem::rms_norm_forward";
  static constexpr const char* kSchema =
      "rms_norm_forward(Tensor x, Tensor weight, float eps, bool zero_centered_gamma) -> (Tensor "
      "y, Tensor inv_rms)";
  static Specs<2> shapes(const Tensor& x, const Tensor& weight, double eps,
                         bool zero_centered_gamma);
  static void cpu(const Tensor& x, const Tensor& weight, double eps, bool zero_centered_gamma,
                  Results<2>& results);
  static Results<2> reference(const Tensor& x, const Tensor& weight, double eps,
                              bool zero_centered_gamma);
};

/// The gradient of RmsNormForward, with the gradient of the residual stream added to grad_x as it
/// was rounded, and y written again where wanted.
///
/// output_mask: grad_x, grad_weight, y; a result that is masked out is an empty tensor.
struct RmsNormBackward {
  static constexpr const char* kName = "rms_norm_backward";
  static constexpr const char* kQualifiedName = "tandem::rms_norm_backward";
  static constexpr const char* kSchema =
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor inv_rms, Tensor? "
      "grad_residual, bool zero_centered_gamma, "
      "bool[3] output_mask) -> (Tensor grad_x, Tensor grad_weight, Tensor y)";
  static Specs<3> shapes(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                         const Tensor& inv_rms, const std::optional<Tensor>& grad_residual,
                         bool zero_centered_gamma, std::array<bool, 3> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                  const Tensor& inv_rms, const std::optional<Tensor>& grad_residual,
                  bool zero_centered_gamma, std::array<bool, 3> output_mask, Results<3>& results);
  static Results<3> reference(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                              const Tensor& inv_rms, const std::optional<Tensor>& grad_residual,
                              bool zero_centered_gamma, std::array<bool, 3> output_mask);
};

/// y = (x - mean) * inv_std * gamma + bias over the dimensions that weight has.
///
/// Shapes:  x [..., *hidden], weight and bias [*hidden] -> y like x, mean and inv_std [rows].
struct LayerNormForward {
  static constexpr const char* kName = "layer_norm_forward";
  static constexpr const char* kQualifiedName = "tandem::layer_norm_forward";
  static constexpr const char* kSchema =
      "layer_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps, bool "
      "zero_centered_gamma) -> (Tensor y, Tensor mean, "
      "Tensor inv_std)";
  static Specs<3> shapes(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                         bool zero_centered_gamma);
  static void cpu(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                  bool zero_centered_gamma, Results<3>& results);
  static Results<3> reference(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                              bool zero_centered_gamma);
};

/// The gradient of LayerNormForward; as RmsNormBackward. `bias` is read only where y is wanted.
///
/// output_mask: grad_x, grad_weight, grad_bias, y.
struct LayerNormBackward {
  static constexpr const char* kName = "layer_norm_backward";
  static constexpr const char* kQualifiedName = "tandem::layer_norm_backward";
  static constexpr const char* kSchema =
      "layer_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor? bias, Tensor mean, "
      "Tensor inv_std, Tensor? grad_residual, "
      "bool zero_centered_gamma, bool[4] output_mask) -> (Tensor grad_x, Tensor grad_weight, "
      "Tensor grad_bias, Tensor y)";
  static Specs<4> shapes(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                         const std::optional<Tensor>& bias, const Tensor& mean,
                         const Tensor& inv_std, const std::optional<Tensor>& grad_residual,
                         bool zero_centered_gamma, std::array<bool, 4> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& mean, const Tensor& inv_std,
                  const std::optional<Tensor>& grad_residual, bool zero_centered_gamma,
                  std::array<bool, 4> output_mask, Results<4>& results);
  static Results<4> reference(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                              const std::optional<Tensor>& bias, const Tensor& mean,
                              const Tensor& inv_std, const std::optional<Tensor>& grad_residual,
                              bool zero_centered_gamma, std::array<bool, 4> output_mask);
};

/// y = x * inv_norm, inv_norm = 1 / sqrt(sum(x^2) + eps) over the last dimension.
///
/// Shapes:  x [..., hidden] -> y like x, inv_norm [rows].
/// Dtypes:  y as x; inv_norm float32, float64 where x is.
/// Error:   as RmsNormForward (test NormOp).
struct L2NormForward {
  static constexpr const char* kName = "l2_norm_forward";
  static constexpr const char* kQualifiedName = "tandem::l2_norm_forward";
  static constexpr const char* kSchema =
      "l2_norm_forward(Tensor x, float eps) -> (Tensor y, Tensor inv_norm)";
  static Specs<2> shapes(const Tensor& x, double eps);
  static void cpu(const Tensor& x, double eps, Results<2>& results);
  static Results<2> reference(const Tensor& x, double eps);
};

/// The gradient of L2NormForward, and y written again where wanted.
///
/// output_mask: grad_x, y.
struct L2NormBackward {
  static constexpr const char* kName = "l2_norm_backward";
  static constexpr const char* kQualifiedName = "tandem::l2_norm_backward";
  static constexpr const char* kSchema =
      "l2_norm_backward(Tensor grad_y, Tensor x, Tensor inv_norm, bool[2] output_mask) -> (Tensor "
      "grad_x, Tensor y)";
  static Specs<2> shapes(const Tensor& grad_y, const Tensor& x, const Tensor& inv_norm,
                         std::array<bool, 2> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& x, const Tensor& inv_norm,
                  std::array<bool, 2> output_mask, Results<2>& results);
  static Results<2> reference(const Tensor& grad_y, const Tensor& x, const Tensor& inv_norm,
                              std::array<bool, 2> output_mask);
};

/// sum = x + extra; y and the statistics of the sum, as LayerNormForward where there is a bias,
/// else as RmsNormForward: the same bits.
///
/// Shapes:      x, extra [..., hidden], weight and bias [hidden] -> sum and y like x, mean (of
///              LayerNorm) and inv_norm [rows].
/// output_mask: sum; one that is masked out is an empty tensor.
struct AddNormForward {
  static constexpr const char* kName = "add_norm_forward";
  static constexpr const char* kQualifiedName = "tandem::add_norm_forward";
  static constexpr const char* kSchema =
      "add_norm_forward(Tensor x, Tensor extra, Tensor weight, Tensor? bias, float eps, bool "
      "zero_centered_gamma, bool[1] output_mask) -> (Tensor sum, Tensor y, Tensor mean, Tensor "
      "inv_norm)";
  static Specs<4> shapes(const Tensor& x, const Tensor& extra, const Tensor& weight,
                         const std::optional<Tensor>& bias, double eps, bool zero_centered_gamma,
                         std::array<bool, 1> output_mask);
  static void cpu(const Tensor& x, const Tensor& extra, const Tensor& weight,
                  const std::optional<Tensor>& bias, double eps, bool zero_centered_gamma,
                  std::array<bool, 1> output_mask, Results<4>& results);
  static Results<4> reference(const Tensor& x, const Tensor& extra, const Tensor& weight,
                              const std::optional<Tensor>& bias, double eps,
                              bool zero_centered_gamma, std::array<bool, 1> output_mask);
};

/// RmsNormForward and Quantize of its y in one: the same bits. Where a kernel can, y is quantized
/// while rows of it are in the cache, and does not come to memory unless it is asked for.
///
/// output_mask: y, then as of Quantize.
struct RmsNormQuantize {
  static constexpr const char* kName = "rms_norm_quantize";
  static constexpr const char* kQualifiedName = "tandem::rms_norm_quantize";
  static constexpr const char* kSchema =
      "rms_norm_quantize(Tensor x, Tensor weight, Tensor? given, float eps, bool "
      "zero_centered_gamma, str quantizer, bool[4] output_mask) -> (Tensor y, Tensor inv_rms, "
      "Tensor row_codes, Tensor row_scale, Tensor row_amax, Tensor column_codes, Tensor "
      "column_scale, Tensor column_amax, Tensor amax)";
  static Specs<2 + group_size> shapes(const Tensor& x, const Tensor& weight,
                                      const std::optional<Tensor>& given, double eps,
                                      bool zero_centered_gamma, const Quantizer& quantizer,
                                      std::array<bool, 4> output_mask);
  static void cpu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& given,
                  double eps, bool zero_centered_gamma, const Quantizer& quantizer,
                  std::array<bool, 4> output_mask, Results<2 + group_size>& results);
  static Results<2 + group_size> reference(const Tensor& x, const Tensor& weight,
                                           const std::optional<Tensor>& given, double eps,
                                           bool zero_centered_gamma, const Quantizer& quantizer,
                                           std::array<bool, 4> output_mask);
};

/// LayerNormForward and Quantize of its y in one, likewise.
struct LayerNormQuantize {
  static constexpr const char* kName = "layer_norm_quantize";
  static constexpr const char* kQualifiedName = "tandem::layer_norm_quantize";
  static constexpr const char* kSchema =
      "layer_norm_quantize(Tensor x, Tensor weight, Tensor bias, Tensor? given, float eps, bool "
      "zero_centered_gamma, str quantizer, bool[4] output_mask) -> (Tensor y, Tensor mean, Tensor "
      "inv_std, Tensor row_codes, Tensor row_scale, Tensor row_amax, Tensor column_codes, Tensor "
      "column_scale, Tensor column_amax, Tensor amax)";
  static Specs<3 + group_size> shapes(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                      const std::optional<Tensor>& given, double eps,
                                      bool zero_centered_gamma, const Quantizer& quantizer,
                                      std::array<bool, 4> output_mask);
  static void cpu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const std::optional<Tensor>& given, double eps, bool zero_centered_gamma,
                  const Quantizer& quantizer, std::array<bool, 4> output_mask,
                  Results<3 + group_size>& results);
  static Results<3 + group_size> reference(const Tensor& x, const Tensor& weight,
                                           const Tensor& bias, const std::optional<Tensor>& given,
                                           double eps, bool zero_centered_gamma,
                                           const Quantizer& quantizer,
                                           std::array<bool, 4> output_mask);
};

}  // namespace tandem::kernel_ops
