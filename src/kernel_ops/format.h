// Formats of quantized tensors and kinds of scale, as rows of two tables: all that knows how codes
// are made and what they mean.
#pragma once

#include <optional>
#include <span>

#include "kernel_ops/kernel_op.h"
#include "kernel_ops/quantizer.h"
#include "kernels/fp8.h"
#include "kernels/norm.h"

namespace tandem {

/// What whoever writes codes returns, absent tensors empty: the fixed group of results.
enum GroupPart : size_t {
  row_codes,
  row_scale,
  column_codes,
  column_scale,
  group_amax,
  group_size
};
using Group = std::array<at::Tensor, group_size>;
/// Which of them are wanted: codes and scale of rows, codes and scale of columns, amax.
using GroupMask = std::array<bool, 3>;

/// Where the scales of a format lie, and what they do to numbers. source ~= decode(codes) *
/// dequant_scale.
struct ScaleLayout {
  /// Codes and scale of rows are those of columns too.
  bool serves_both_directions = false;
  /// To a product of decoded codes, as one number per tensor; else to numbers as they are decoded.
  bool applies_at_end = false;
  at::ScalarType dtype = at::kFloat;
  /// Sizes of the scales of x or of its codes, which lie as x does, uint8.
  c10::SymDimVector (*sizes)(const at::Tensor& x, Direction direction) = nullptr;
  /// y = decode(codes) * dequant_scale in float32, rounded once to y's dtype. On the CPU, into
  /// contiguous y.
  void (*dequantize)(const at::Tensor& codes, const at::Tensor& dequant_scale,
                     kernels::Fp8Format element, Direction direction,
                     const at::Tensor& y) = nullptr;
  /// dequant_scale as float32 that broadcasts over the codes.
  at::Tensor (*scales_of_elements)(const at::Tensor& codes, const at::Tensor& dequant_scale,
                                   Direction direction) = nullptr;
};

/// A row of the table of formats.
struct FormatDef {
  /// "fp8_e4m3".
  std::string_view name;
  kernels::Fp8Format element;
  const ScaleLayout& layout;
  /// The kinds of scale that it may have, the one that is meant where none is named first.
  std::span<const ScalingDef* const> scalings;
};

/// A norm whose result is quantized.
struct NormToQuantize {
  kernels::ConstRows x;
  kernels::ConstVector weight, bias;
  kernels::cpu::NormOptions options;
  kernels::Element y_element;
  /// null where it is not wanted.
  kernels::Rows y;
  /// LayerNorm, which has a mean.
  bool is_centered = false;
  float* mean = nullptr;
  float* inv_norm = nullptr;
};

/// A kind of scale: how scales come about, and what computes codes with them.
struct ScalingDef {
  /// "current"; empty where the format says it.
  std::string_view name;
  bool has_epsilon = false, has_power_of_two = false, has_square_blocks = false;
  /// a quantization scale is an operand, not computed from x.
  bool takes_scale = false;
  /// Writes the tensors of `group` that are defined, contiguous. On the CPU.
  void (*quantize)(const at::Tensor& x, const std::optional<at::Tensor>& scale,
                   const Quantizer& quantizer, Group& group) = nullptr;
  /// The same in ATen operations, for every device and dtype.
  Group (*reference)(const at::Tensor& x, const std::optional<at::Tensor>& scale,
                     const Quantizer& quantizer, GroupMask mask) = nullptr;
  /// Norm and quantize in one kernel with the same bits; nullptr: one after the other.
  void (*norm_quantize)(const NormToQuantize& norm, const Quantizer& quantizer,
                        Group& group) = nullptr;
};

/// All formats.
std::span<const FormatDef> formats();

/// What is written of what is wanted: a value that serves both directions is that of rows.
inline GroupMask written_of(const Quantizer& quantizer, GroupMask mask) {
  if (!quantizer.format->layout.serves_both_directions) return mask;
  return {mask[0] || mask[1], false, mask[2]};
}

namespace kernel_ops {

/// Sizes and dtypes of the group of x, after checking that the quantizer has the scale that it
/// takes.
std::array<ResultSpec, group_size> group_specs(const char* op, const Tensor& x,
                                               const std::optional<Tensor>& scale,
                                               const Quantizer& quantizer, GroupMask mask);
/// The composite reference, masked.
Group group_reference(const Tensor& x, const std::optional<Tensor>& scale,
                      const Quantizer& quantizer, GroupMask mask);

/// The saturating cast and its inverse in ATen operations, exact for every dtype and device.
Tensor encode(const Tensor& scaled, kernels::Fp8Format format);
Tensor decode_values(const Tensor& codes, kernels::Fp8Format format);

}  // namespace kernel_ops
}  // namespace tandem
