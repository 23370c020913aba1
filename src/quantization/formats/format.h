// Formats of quantized tensors and kinds of scale, as rows of two tables: all that knows how codes
// are made and what they mean.
#pragma once

#include <optional>
#include <span>

#include "kernel_ops/framework/results.h"
#include "kernels/fp8.h"
#include "quantization/formats/group.h"
#include "quantization/formats/quantizer.h"

namespace tandem {

struct CpuScaling;  // cpu_scaling.h

/// Rows and columns of a tensor as a matrix over its last dimension.
struct MatrixSize {
  explicit MatrixSize(c10::SymIntArrayRef sizes);
  c10::SymInt rows, cols;
};

/// A value in codes, of one direction.
struct Codes {
  const at::Tensor &codes, &dequant_scale;
  /// Where the format has one.
  std::optional<at::Tensor> amax;
  Direction direction;
};

/// Where the codes and scales of a format lie, and what these do to numbers. source ~=
/// decode(codes) * dequant_scale.
struct CodeLayout {
  /// Codes and scale of rows are those of columns too.
  bool serves_both_directions = false;
  /// To a product of decoded codes, as one number per tensor; else to numbers as they are decoded.
  bool applies_at_end = false;
  /// A second level of scale: codes come with the amax of what they are of, [1], float32.
  bool has_amax = false;
  /// What the scale of a block becomes then whose amax is that one.
  float largest_scale = 0;
  /// Of the scales.
  at::ScalarType dtype = at::kFloat;
  /// Sizes of the scales of a matrix of numbers.
  c10::SymDimVector (*sizes)(const MatrixSize& numbers, Direction direction) = nullptr;
  /// Of codes that are packed: sizes of the codes of numbers of these sizes, uint8, and of the
  /// numbers, padded to whole blocks, of codes of these sizes. Null: codes lie as the numbers do.
  c10::SymDimVector (*packed_sizes)(c10::SymIntArrayRef numbers, Direction direction) = nullptr;
  c10::SymDimVector (*unpacked_sizes)(c10::SymIntArrayRef codes, Direction direction) = nullptr;
  /// Codes one by one, in ATen operations. Null: they are not packed.
  at::Tensor (*unpacked)(const at::Tensor& codes, Direction direction) = nullptr;
  /// dequant_scale as float32 that broadcasts over the unpacked codes.
  at::Tensor (*scales_of_elements)(const Codes& codes) = nullptr;
};

/// A row of the table of formats.
struct FormatDef {
  /// "fp8_e4m3".
  std::string_view name;
  kernels::Fp8Format element;
  const CodeLayout& layout;
  /// The kinds of scale that it may have, the one that is meant where none is named first.
  std::span<const ScalingDef* const> scalings;
};

/// What a quantizer is given beside x.
enum class Given : uint8_t {
  nothing,
  /// What x is multiplied by: one float32.
  scale,
  /// Of stochastic rounding: one int64, the seed, or two, the seed and an offset.
  seed,
};

/// A kind of scale: how scales come about, and what computes codes with them, in ATen operations
/// and on the CPU. Other devices register rows of Quantize, Dequantize and Decode.
struct ScalingDef {
  /// "current"; empty where the format says it.
  std::string_view name;
  bool has_epsilon = false, has_power_of_two = false, has_square_blocks = false,
       has_hadamard = false, has_stochastic_rounding = false, has_four_over_six = false;
  /// a quantization scale is an operand, not computed from x.
  bool takes_scale = false;
  /// In ATen operations, for every device and dtype.
  Group (*reference)(const at::Tensor& x, const std::optional<at::Tensor>& given,
                     const Quantizer& quantizer, GroupMask mask) = nullptr;
  const CpuScaling* cpu = nullptr;
};

/// All formats.
std::span<const FormatDef> formats();

inline Given given_to(const Quantizer& quantizer) {
  if (quantizer.scaling->takes_scale) return Given::scale;
  return quantizer.stochastic_rounding ? Given::seed : Given::nothing;
}

/// What is written of what is wanted: a value that serves both directions is that of rows.
inline GroupMask written_of(const Quantizer& quantizer, GroupMask mask) {
  if (!quantizer.format->layout.serves_both_directions) return mask;
  return {mask[0] || mask[1], false, mask[2]};
}

/// Whether a group has this tensor, where `written` is written.
inline bool is_written(const Quantizer& quantizer, GroupMask written, size_t group_part) {
  return written[place_in_mask(group_part)] &&
         (!is_amax_part(group_part) || quantizer.format->layout.has_amax);
}

/// The dtype of a tensor of a group.
inline at::ScalarType dtype_of_part(const Quantizer& quantizer, size_t group_part) {
  if (group_part == group_amax || is_amax_part(group_part)) return at::kFloat;
  return group_part % kPartsOfCodes == 0 ? at::kByte : quantizer.format->layout.dtype;
}

/// Whether codes have other sizes than their numbers.
inline bool is_packed(const Quantizer& quantizer) {
  return quantizer.format->layout.packed_sizes != nullptr;
}
/// Sizes of the codes of numbers of these sizes; and of the numbers, with their padding, of codes.
c10::SymDimVector sizes_of_codes(const Quantizer& quantizer, c10::SymIntArrayRef numbers,
                                 Direction direction);
c10::SymDimVector sizes_of_numbers(const Quantizer& quantizer, c10::SymIntArrayRef codes,
                                   Direction direction);

namespace kernel_ops {

/// Sizes and dtypes of the group of a tensor of these sizes, after checking that the quantizer has
/// been given what it takes.
Specs<group_size> group_specs(const char* op, c10::SymIntArrayRef sizes,
                              const std::optional<Tensor>& given, const Quantizer& quantizer,
                              GroupMask mask);
/// The composite reference, masked. Throws c10::NotImplementedError where a gradient of x is
/// recorded.
Group group_reference(const Tensor& x, const std::optional<Tensor>& given,
                      const Quantizer& quantizer, GroupMask mask);

/// The cast and its inverse in ATen operations, exact for every dtype and device. With `words`,
/// random ones in int64 for each element, it rounds up or down by chance.
Tensor encode(const Tensor& scaled, kernels::Fp8Format format, bool saturate = true,
              const Tensor& words = {});
Tensor decode_values(const Tensor& codes, kernels::Fp8Format format);

}  // namespace kernel_ops
}  // namespace tandem
