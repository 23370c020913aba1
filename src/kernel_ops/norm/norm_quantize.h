// Sums before norms, and gradients of norms, together with the quantizer behind them.
#pragma once

#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

/// AddNormForward and Quantize of its y in one: the same bits. Where a kernel can, y is quantized
/// while rows of it are in the cache, and does not come to memory unless it is asked for.
///
/// output_mask: sum, y, then as of Quantize.
struct AddNormQuantize {
  static constexpr const char* kName = "add_norm_quantize";
  static constexpr const char* kQualifiedName = "tandem::add_norm_quantize";
  static constexpr const char* kSchema =
      "add_norm_quantize(Tensor x, Tensor extra, Tensor weight, Tensor? bias, Tensor? given, float "
      "eps, bool zero_centered_gamma, str quantizer, bool[5] output_mask) -> (Tensor sum, Tensor "
      "y, Tensor mean, Tensor inv_norm, Tensor row_codes, Tensor row_scale, Tensor row_amax, "
      "Tensor column_codes, Tensor column_scale, Tensor column_amax, Tensor amax)";
  static Specs<4 + group_size> shapes(const Tensor& x, const Tensor& extra, const Tensor& weight,
                                      const std::optional<Tensor>& bias,
                                      const std::optional<Tensor>& given, double eps,
                                      bool zero_centered_gamma, const Quantizer& quantizer,
                                      std::array<bool, 5> output_mask);
  static void cpu(const Tensor& x, const Tensor& extra, const Tensor& weight,
                  const std::optional<Tensor>& bias, const std::optional<Tensor>& given, double eps,
                  bool zero_centered_gamma, const Quantizer& quantizer,
                  std::array<bool, 5> output_mask, Results<4 + group_size>& results);
  static Results<4 + group_size> reference(const Tensor& x, const Tensor& extra,
                                           const Tensor& weight, const std::optional<Tensor>& bias,
                                           const std::optional<Tensor>& given, double eps,
                                           bool zero_centered_gamma, const Quantizer& quantizer,
                                           std::array<bool, 5> output_mask);
};

/// LayerNormBackward where there is a mean, else RmsNormBackward, with SumRows and Quantize of its
/// grad_x, with Quantize of the y that it writes again, or with all of them, in one, likewise. Each
/// matrix has a quantizer of its own.
///
/// Shapes:      sums [last dimension of x]; others as of the ops that it stands for. grad_bias of
///              RMSNorm is masked out.
/// Dtypes:      sums of `sums_dtype`.
/// output_mask: grad_x, grad_weight, y, sums, grad_bias, then as of Quantize for grad_x and for y.
struct NormBackwardQuantize {
  static constexpr size_t kMade = 5, kResults = kMade + 2 * group_size;
  static constexpr const char* kName = "norm_backward_quantize";
  static constexpr const char* kQualifiedName = "tandem::norm_backward_quantize";
  static constexpr const char* kSchema =
      "norm_backward_quantize(Tensor grad_y, Tensor x, Tensor weight, Tensor? bias, Tensor? mean, "
      "Tensor inv_norm, Tensor? grad_residual, Tensor? given, Tensor? y_given, bool "
      "zero_centered_gamma, ScalarType sums_dtype, str? quantizer, str? y_quantizer, bool[11] "
      "output_mask) -> (Tensor grad_x, Tensor grad_weight, Tensor y, Tensor sums, Tensor "
      "grad_bias, Tensor row_codes, Tensor row_scale, Tensor row_amax, Tensor column_codes, Tensor "
      "column_scale, Tensor column_amax, Tensor amax, Tensor y_row_codes, Tensor y_row_scale, "
      "Tensor y_row_amax, Tensor y_column_codes, Tensor y_column_scale, Tensor y_column_amax, "
      "Tensor y_amax)";
  static Specs<kResults> shapes(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                                const std::optional<Tensor>& bias,
                                const std::optional<Tensor>& mean, const Tensor& inv_norm,
                                const std::optional<Tensor>& grad_residual,
                                const std::optional<Tensor>& given,
                                const std::optional<Tensor>& y_given, bool zero_centered_gamma,
                                at::ScalarType sums_dtype, const Quantizer* quantizer,
                                const Quantizer* y_quantizer, std::array<bool, 11> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const std::optional<Tensor>& mean,
                  const Tensor& inv_norm, const std::optional<Tensor>& grad_residual,
                  const std::optional<Tensor>& given, const std::optional<Tensor>& y_given,
                  bool zero_centered_gamma, at::ScalarType sums_dtype, const Quantizer* quantizer,
                  const Quantizer* y_quantizer, std::array<bool, 11> output_mask,
                  Results<kResults>& results);
  static Results<kResults> reference(
      const Tensor& grad_y, const Tensor& x, const Tensor& weight,
      const std::optional<Tensor>& bias, const std::optional<Tensor>& mean, const Tensor& inv_norm,
      const std::optional<Tensor>& grad_residual, const std::optional<Tensor>& given,
      const std::optional<Tensor>& y_given, bool zero_centered_gamma, at::ScalarType sums_dtype,
      const Quantizer* quantizer, const Quantizer* y_quantizer, std::array<bool, 11> output_mask);
};

}  // namespace tandem::kernel_ops
