// Activations and gated linear units together with the quantizer behind them.
#pragma once

#include "kernel_ops/unit/activation.h"
#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

/// `Forward` and Quantize of its y in one: the same bits. Where a kernel can, y is quantized while
/// rows of it are in the cache, and does not come to memory unless it is asked for.
///
/// output_mask: y, z, then as of Quantize.
template <typename Forward>
struct ThenQuantize {
  static c10::SymDimVector sizes_of_y(const Tensor& x);
  static Specs<2 + group_size> shapes(const Tensor& x, const std::optional<Tensor>& bias,
                                      const std::optional<Tensor>& given,
                                      std::string_view activation, const Quantizer& quantizer,
                                      std::array<bool, 5> output_mask);
  static void cpu(const Tensor& x, const std::optional<Tensor>& bias,
                  const std::optional<Tensor>& given, std::string_view activation,
                  const Quantizer& quantizer, std::array<bool, 5> output_mask,
                  Results<2 + group_size>& results);
  static Results<2 + group_size> reference(const Tensor& x, const std::optional<Tensor>& bias,
                                           const std::optional<Tensor>& given,
                                           std::string_view activation, const Quantizer& quantizer,
                                           std::array<bool, 5> output_mask);
};

struct ActivationQuantize : ThenQuantize<ActivationForward> {
  static constexpr const char* kName = "activation_quantize";
  static constexpr const char* kQualifiedName = "tandem::activation_quantize";
  static constexpr const char* kSchema =
      "activation_quantize(Tensor x, Tensor? bias, Tensor? given, str activation, str quantizer, "
      "bool[5] output_mask) -> (Tensor y, Tensor z, Tensor row_codes, Tensor row_scale, Tensor "
      "row_amax, Tensor column_codes, Tensor column_scale, Tensor column_amax, Tensor amax)";
};

struct GluQuantize : ThenQuantize<GluForward> {
  static constexpr const char* kName = "glu_quantize";
  static constexpr const char* kQualifiedName = "tandem::glu_quantize";
  static constexpr const char* kSchema =
      "glu_quantize(Tensor x, Tensor? bias, Tensor? given, str activation, str quantizer, bool[5] "
      "output_mask) -> (Tensor y, Tensor z, Tensor row_codes, Tensor row_scale, Tensor row_amax, "
      "Tensor column_codes, Tensor column_scale, Tensor column_amax, Tensor amax)";
};

/// `Backward` and Quantize of its grad_z, of the y that it writes again, or of both, each by a
/// quantizer of its own, in one, likewise.
///
/// output_mask: grad_z, y, grad_bias, then as of Quantize for grad_z and for y.
template <typename Backward>
struct BackwardThenQuantize {
  static constexpr size_t kMade = 3, kResults = kMade + 2 * group_size;
  static Specs<kResults> shapes(const Tensor& grad_y, const Tensor& z,
                                const std::optional<Tensor>& given,
                                const std::optional<Tensor>& y_given, std::string_view activation,
                                const Quantizer* quantizer, const Quantizer* y_quantizer,
                                std::array<bool, 9> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& z, const std::optional<Tensor>& given,
                  const std::optional<Tensor>& y_given, std::string_view activation,
                  const Quantizer* quantizer, const Quantizer* y_quantizer,
                  std::array<bool, 9> output_mask, Results<kResults>& results);
  static Results<kResults> reference(const Tensor& grad_y, const Tensor& z,
                                     const std::optional<Tensor>& given,
                                     const std::optional<Tensor>& y_given,
                                     std::string_view activation, const Quantizer* quantizer,
                                     const Quantizer* y_quantizer, std::array<bool, 9> output_mask);
};

struct ActivationBackwardQuantize : BackwardThenQuantize<ActivationBackward> {
  static constexpr const char* kName = "activation_backward_quantize";
  static constexpr const char* kQualifiedName = "tandem::activation_backward_quantize";
  static constexpr const char* kSchema =
      "activation_backward_quantize(Tensor grad_y, Tensor z, Tensor? given, Tensor? y_given, str "
      "activation, str? quantizer, str? y_quantizer, bool[9] output_mask) -> (Tensor grad_z, "
      "Tensor y, Tensor grad_bias, Tensor row_codes, Tensor row_scale, Tensor row_amax, Tensor "
      "column_codes, Tensor column_scale, Tensor column_amax, Tensor amax, Tensor y_row_codes, "
      "Tensor y_row_scale, Tensor y_row_amax, Tensor y_column_codes, Tensor y_column_scale, Tensor "
      "y_column_amax, Tensor y_amax)";
};

struct GluBackwardQuantize : BackwardThenQuantize<GluBackward> {
  static constexpr const char* kName = "glu_backward_quantize";
  static constexpr const char* kQualifiedName = "tandem::glu_backward_quantize";
  static constexpr const char* kSchema =
      "glu_backward_quantize(Tensor grad_y, Tensor z, Tensor? given, Tensor? y_given, str "
      "activation, str? quantizer, str? y_quantizer, bool[9] output_mask) -> (Tensor grad_z, "
      "Tensor y, Tensor grad_bias, Tensor row_codes, Tensor row_scale, Tensor row_amax, Tensor "
      "column_codes, Tensor column_scale, Tensor column_amax, Tensor amax, Tensor y_row_codes, "
      "Tensor y_row_scale, Tensor y_row_amax, Tensor y_column_codes, Tensor y_column_scale, Tensor "
      "y_column_amax, Tensor y_amax)";
};

}  // namespace tandem::kernel_ops
