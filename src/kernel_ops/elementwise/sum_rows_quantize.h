// The gradient of a bias together with the quantizer that reads what it is summed from.
#pragma once

#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

/// SumRows and Quantize of x in one, which reads x once where blocks have scales of their own or
/// the scale is given: the same bits.
///
/// Shapes:      x [..., cols] -> sums [cols]; codes as of Quantize.
/// output_mask: as of Quantize.
struct SumRowsQuantize {
  static constexpr const char* kName = "sum_rows_quantize";
  static constexpr const char* kQualifiedName = "tandem::sum_rows_quantize";
  static constexpr const char* kSchema =
      "sum_rows_quantize(Tensor x, Tensor? given, ScalarType dtype, str quantizer, bool[3] "
      "output_mask) -> (Tensor sums, Tensor row_codes, Tensor row_scale, Tensor row_amax, Tensor "
      "column_codes, Tensor column_scale, Tensor column_amax, Tensor amax)";
  static Specs<1 + group_size> shapes(const Tensor& x, const std::optional<Tensor>& given,
                                      at::ScalarType dtype, const Quantizer& quantizer,
                                      std::array<bool, 3> output_mask);
  static void cpu(const Tensor& x, const std::optional<Tensor>& given, at::ScalarType dtype,
                  const Quantizer& quantizer, std::array<bool, 3> output_mask,
                  Results<1 + group_size>& results);
  static Results<1 + group_size> reference(const Tensor& x, const std::optional<Tensor>& given,
                                           at::ScalarType dtype, const Quantizer& quantizer,
                                           std::array<bool, 3> output_mask);
};

}  // namespace tandem::kernel_ops
