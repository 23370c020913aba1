// How codes are made and dequantized on the CPU, for each kind of scale.
#pragma once

#include <span>

#include "kernels/quantize_made.h"
#include "quantization/formats/format.h"

namespace tandem {

/// A Group to write into. Its defined tensors are contiguous.
using GroupOut = std::span<const at::Tensor, group_size>;

/// The functions of a ScalingDef that compute on the CPU.
struct CpuScaling {
  void (*quantize)(const at::Tensor& x, const std::optional<at::Tensor>& given,
                   const Quantizer& quantizer, GroupOut group);
  /// y = decode(codes) * dequant_scale in float32, rounded once to y's dtype. Codes, scales and y
  /// are contiguous. For packed codes, y may lack the padding.
  void (*dequantize)(const CodedMatrix& codes, const at::Tensor& y);
  /// Quantizes rows while they are computed, to the bits of `quantize`; nullptr: rows must be
  /// computed before.
  void (*quantize_made)(const kernels::cpu::MadeRows& made, const std::optional<at::Tensor>& given,
                        const Quantizer& quantizer, GroupOut group) = nullptr;
  /// Writes the codes of a band of `band_rows` rows or a multiple; the last band may have fewer.
  /// What depends on the whole tensor is left to `quantize_seen`. nullptr: codes depend on the
  /// tensor's amax, so the whole tensor is read a second time.
  kernels::cpu::Seen (*quantize_band)(const kernels::cpu::Band& band,
                                      const std::optional<at::Tensor>& given,
                                      const Quantizer& quantizer, GroupOut group) = nullptr;
  size_t band_rows = 1;
  /// Writes what bands leave, except the amax; nullptr: they leave nothing.
  void (*quantize_seen)(const kernels::ConstRows& y, const kernels::cpu::Seen& seen,
                        const std::optional<at::Tensor>& given, const Quantizer& quantizer,
                        GroupOut group) = nullptr;
};

}  // namespace tandem
