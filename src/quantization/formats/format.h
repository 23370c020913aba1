// Formats of quantized tensors and kinds of scale, as rows of two tables. Everything that depends
// on how codes are made and dequantized is in these rows.
#pragma once

#include <array>
#include <optional>
#include <span>

#include "kernel_ops/framework/results.h"
#include "kernels/fp8.h"
#include "quantization/formats/codes.h"
#include "quantization/formats/quantizer.h"

namespace tandem {

struct CpuScaling;  // cpu_scaling.h

/// Rows and columns of a tensor as a matrix over its last dimension.
struct MatrixSize {
  explicit MatrixSize(c10::SymIntArrayRef sizes);
  c10::SymInt rows, cols;
};

/// The layout of a format's codes and scales, and how scales apply: source ~= decode(codes) *
/// dequant_scale.
struct CodeLayout {
  /// Whether row codes and their scale also serve as column codes.
  bool serves_both_directions = false;
  /// Whether the scale, one number per tensor, is applied to a product of decoded codes instead of
  /// to each number.
  bool applies_at_end = false;
  /// Whether there is a second level of scale: codes then come with the amax of their source, [1],
  /// float32.
  bool has_amax = false;
  /// The largest scale of a block if there is a second level: the scale of a block that has that
  /// amax.
  float largest_scale = 0;
  /// The dtype of the scales.
  at::ScalarType dtype = at::kFloat;
  /// The sizes of the scales of a matrix.
  c10::SymDimVector (*sizes)(const MatrixSize& numbers, Direction direction) = nullptr;
  /// For packed codes: the sizes of the codes (uint8) of a tensor, and the sizes of the tensor,
  /// padded to whole blocks, of these codes. nullptr: codes have the sizes of their tensor.
  c10::SymDimVector (*packed_sizes)(c10::SymIntArrayRef numbers, Direction direction) = nullptr;
  c10::SymDimVector (*unpacked_sizes)(c10::SymIntArrayRef codes, Direction direction) = nullptr;
  /// For packed codes: one code per byte, in ATen operations. nullptr: codes are not packed.
  at::Tensor (*unpacked)(const at::Tensor& codes, Direction direction) = nullptr;
  /// dequant_scale in float32, broadcastable to the unpacked codes.
  at::Tensor (*scales_of_elements)(const CodedMatrix& codes) = nullptr;
};

/// A row of the table of formats.
struct FormatDef {
  /// "fp8_e4m3".
  std::string_view name;
  kernels::Fp8Format element;
  const CodeLayout& layout;
  /// The kinds of scale that the format may have. The first is the default.
  std::span<const ScalingDef* const> scalings;
};

/// What a quantizer needs besides x.
enum class Given : uint8_t {
  nothing,
  /// The factor of x: one float32.
  scale,
  /// For stochastic rounding: one int64, the seed, or two, the seed and an offset.
  seed,
};

/// A kind of scale: how scales are computed, with functions that quantize and dequantize in ATen
/// operations and on the CPU. Other devices register rows of Quantize, Dequantize and Decode.
struct ScalingDef {
  /// "current"; empty if the format has only one kind.
  std::string_view name;
  /// The class of the fronts that has these options: "MXFP8Quantizer".
  std::string_view class_name;
  /// The names of its options in texts.
  std::array<std::string_view, 8> options = {};
  /// Whether the quantization scale is an operand instead of being computed from x.
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

/// The parts that are written if the parts in `mask` are wanted: a value for both directions is
/// written as row codes.
inline GroupMask written_of(const Quantizer& quantizer, GroupMask mask) {
  if (!quantizer.format->layout.serves_both_directions) return mask;
  return {mask[0] || mask[1], false, mask[2]};
}

/// Whether a tensor of a group is written if the parts in `written` are.
inline bool is_written(const Quantizer& quantizer, GroupMask written, size_t group_part) {
  return written[place_in_mask(group_part)] &&
         (!is_amax_part(group_part) || quantizer.format->layout.has_amax);
}

/// The dtype of a tensor of a group.
inline at::ScalarType dtype_of_part(const Quantizer& quantizer, size_t group_part) {
  if (group_part == group_amax || is_amax_part(group_part)) return at::kFloat;
  return group_part % kPartsOfCodes == 0 ? at::kByte : quantizer.format->layout.dtype;
}

/// Whether codes have other sizes than their tensor.
inline bool is_packed(const Quantizer& quantizer) {
  return quantizer.format->layout.packed_sizes != nullptr;
}
/// The sizes of the codes of a tensor with these sizes, and the sizes of the padded tensor of such
/// codes.
c10::SymDimVector sizes_of_codes(const Quantizer& quantizer, c10::SymIntArrayRef numbers,
                                 Direction direction);
c10::SymDimVector sizes_of_numbers(const Quantizer& quantizer, c10::SymIntArrayRef codes,
                                   Direction direction);

/// The sizes of a tensor of a group for a tensor with these sizes.
TANDEM_API c10::SymDimVector sizes_of_part(const Quantizer& quantizer, c10::SymIntArrayRef numbers,
                                           size_t group_part);

/// How a tensor of a group grows with the rows of a matrix: by one along `dim` for each `rows`
/// rows; `rows` is 0 if the tensor serves all rows.
struct OfRows {
  int64_t dim = 0, rows = 0;
};
TANDEM_API OfRows rows_of_part(const Quantizer& quantizer, size_t group_part);

namespace kernel_ops {

/// Sizes and dtypes of the group for a tensor with these sizes. Checks that `given` is what the
/// quantizer needs.
Specs<group_size> group_specs(const char* op, c10::SymIntArrayRef sizes,
                              const std::optional<Tensor>& given, const Quantizer& quantizer,
                              GroupMask mask);
/// The composite reference of quantizing; parts that `mask` excludes are empty. Throws
/// c10::NotImplementedError if a gradient of x is recorded.
Group group_reference(const Tensor& x, const std::optional<Tensor>& given,
                      const Quantizer& quantizer, GroupMask mask);

/// Cast to a format and back in ATen operations, exact for every dtype and device. With `words`, a
/// random int64 for each element, the cast rounds up or down at random.
Tensor encode(const Tensor& scaled, kernels::Fp8Format format, bool saturate = true,
              const Tensor& words = {});
Tensor decode_values(const Tensor& codes, kernels::Fp8Format format);

}  // namespace kernel_ops
}  // namespace tandem
