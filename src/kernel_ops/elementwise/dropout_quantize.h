// The gradient of dropout together with the quantizer behind it.
#pragma once

#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

/// DropoutBackwardBias and Quantize of its grad_x in one: the same bits. Where a kernel can, grad_x
/// is quantized while rows of it are in the cache, and does not come to memory unless it is asked
/// for.
///
/// output_mask: grad_x, grad_bias, then as of Quantize.
struct DropoutBackwardQuantize {
  static constexpr const char* kName = "dropout_backward_quantize";
  static constexpr const char* kQualifiedName = "tandem::dropout_backward_quantize";
  static constexpr const char* kSchema =
      "dropout_backward_quantize(Tensor grad_y, Tensor seed, Tensor? given, float p, ScalarType "
      "dtype, str quantizer, bool[5] output_mask) -> (Tensor grad_x, Tensor grad_bias, Tensor "
      "row_codes, Tensor row_scale, Tensor row_amax, Tensor column_codes, Tensor column_scale, "
      "Tensor column_amax, Tensor amax)";
  static Specs<2 + group_size> shapes(const Tensor& grad_y, const Tensor& seed,
                                      const std::optional<Tensor>& given, double p,
                                      at::ScalarType dtype, const Quantizer& quantizer,
                                      std::array<bool, 5> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& seed, const std::optional<Tensor>& given,
                  double p, at::ScalarType dtype, const Quantizer& quantizer,
                  std::array<bool, 5> output_mask, Results<2 + group_size>& results);
  static Results<2 + group_size> reference(const Tensor& grad_y, const Tensor& seed,
                                           const std::optional<Tensor>& given, double p,
                                           at::ScalarType dtype, const Quantizer& quantizer,
                                           std::array<bool, 5> output_mask);
};

}  // namespace tandem::kernel_ops
