// How codes of a kind of scale are made and decoded on the CPU.
#pragma once

#include <span>

#include "kernels/quantize_made.h"
#include "quantization/formats/format.h"

namespace tandem {

/// A Group to write into: its tensors that are defined, contiguous.
using GroupOut = std::span<const at::Tensor, group_size>;

/// The functions of a ScalingDef that compute on the CPU.
struct CpuScaling {
  void (*quantize)(const at::Tensor& x, const std::optional<at::Tensor>& given,
                   const Quantizer& quantizer, GroupOut group);
  /// y = decode(codes) * dequant_scale in float32, rounded once to y's dtype. Codes, scales and y
  /// are contiguous; of packed codes y may end before their padding does.
  void (*dequantize)(const Codes& codes, const Quantizer& quantizer, const at::Tensor& y);
  /// quantize of what is made meanwhile, with the same bits; nullptr: one after the other.
  void (*quantize_made)(const kernels::cpu::MadeRows& made, const std::optional<at::Tensor>& given,
                        const Quantizer& quantizer, GroupOut group) = nullptr;
  /// Writes the codes of a band: of one of `band_rows` rows, or a multiple of these, or the last;
  /// what is of the whole tensor is left to `quantize_seen`. nullptr: that needs the whole tensor's
  /// amax, and then all of it once more.
  kernels::cpu::Seen (*quantize_band)(const kernels::cpu::Band& band,
                                      const std::optional<at::Tensor>& given,
                                      const Quantizer& quantizer, GroupOut group) = nullptr;
  size_t band_rows = 1;
  /// What bands leave to be written, but the amax; nullptr: nothing.
  void (*quantize_seen)(const kernels::ConstRows& y, const kernels::cpu::Seen& seen,
                        const std::optional<at::Tensor>& given, const Quantizer& quantizer,
                        GroupOut group) = nullptr;
};

}  // namespace tandem
