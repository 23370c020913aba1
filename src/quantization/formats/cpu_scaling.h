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
  /// Writes the codes and scales of x, to the same bits whatever the input is, and returns what is
  /// seen of x on the way. What depends on the whole tensor is left to `quantize_seen` if x is a
  /// band.
  kernels::cpu::Seen (*quantize)(const kernels::cpu::Input& x,
                                 const std::optional<at::Tensor>& given, const Quantizer& quantizer,
                                 GroupOut group);
  /// y = decode(codes) * dequant_scale in float32, rounded once to y's dtype. Codes, scales and y
  /// are contiguous. For packed codes, y may lack the padding.
  void (*dequantize)(const CodedMatrix& codes, const at::Tensor& y);
  /// Bands have so many rows or a multiple; the last band may have fewer. 0: codes depend on the
  /// tensor's amax, so the whole tensor is read a second time, and there are no bands.
  size_t band_rows = 0;
  /// Writes what bands leave, except the amax; nullptr: they leave nothing.
  void (*quantize_seen)(const kernels::ConstRows& y, const kernels::cpu::Seen& seen,
                        const std::optional<at::Tensor>& given, const Quantizer& quantizer,
                        GroupOut group) = nullptr;
};

/// Writes the codes, scales and amax of x, which is no band.
inline void quantize_on_cpu(const kernels::cpu::Input& x, const std::optional<at::Tensor>& given,
                            const Quantizer& quantizer, GroupOut group) {
  const kernels::cpu::Seen seen = quantizer.scaling->cpu->quantize(x, given, quantizer, group);
  if (group[group_amax].defined()) *group[group_amax].data_ptr<float>() = seen.amax;
}

}  // namespace tandem
