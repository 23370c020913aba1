#include "quantization/inspection.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <utility>

#include "kernel_ops/quantize/quantize.h"

namespace tandem {

namespace {

struct Watched {
  std::mutex mutex;
  std::vector<WatchedQuantization> quantizations;
};
Watched& watched() {
  static auto& kept = *new Watched;
  return kept;
}

/// The dequantized values of codes, with the sizes of x.
at::Tensor meaning(const at::Tensor& x, const CodedMatrix& codes) {
  return kernel_ops::Dequantize::reference(
             kernel_ops::dequantizing(codes, at::kFloat, x.sym_sizes()))[0]
      .to(at::kDouble);
}

/// A byte in which every code is that of the largest number.
int64_t largest_code(const Quantizer& quantizer) {
  const kernels::Fp8Traits& traits = kernels::traits_of(quantizer.format->element);
  int64_t code = traits.largest;
  for (int filled = traits.bits; filled < 8; filled += traits.bits)
    code = code << traits.bits | traits.largest;
  return code;
}

}  // namespace

QuantizationStatistics statistics_of(const at::Tensor& x, const CodedMatrix& codes) {
  QuantizationStatistics found;
  if (x.numel() == 0) return found;
  const at::Tensor wide = x.detach().to(at::kDouble), is_finite = at::isfinite(wide);
  const auto count = is_finite.sum().item<int64_t>();
  found.not_finite = x.numel() - count;
  if (count == 0) return found;
  const at::Tensor zero = at::zeros_like(wide), finite = at::where(is_finite, wide, zero);
  const at::Tensor largest = at::full_like(codes.matrix, largest_code(*codes.quantizer));
  const at::Tensor decoded = meaning(x, codes), limit = meaning(x, codes.as(largest));
  const auto share = [&](const at::Tensor& elements) {
    return static_cast<double>((elements & is_finite).sum().item<int64_t>()) /
           static_cast<double>(count);
  };
  const kernels::Fp8Traits& element = kernels::traits_of(codes.quantizer->format->element);
  const at::Tensor scales = limit / static_cast<double>(element.max);
  found.amax = finite.abs().max().item<double>();
  found.least_scale = scales.min().item<double>();
  found.largest_scale = scales.max().item<double>();
  found.underflow = share((finite != 0).logical_and(decoded == 0));
  // If a block's scale is rounded to 0, its elements are too small for the format, not too large.
  const at::Tensor is_beyond = finite.abs() > scales * static_cast<double>(element.overflow_from);
  found.saturation = share(is_beyond.logical_and(decoded != 0));
  const at::Tensor lost = at::where(is_finite, decoded - finite, zero);
  const double signal = finite.square().sum().item<double>(),
               noise = lost.square().sum().item<double>();
  found.signal_to_noise =
      noise == 0 ? std::numeric_limits<double>::infinity() : 10 * std::log10(signal / noise);
  return found;
}

void keep_watched(WatchedQuantization quantization) {
  const std::lock_guard<std::mutex> lock(watched().mutex);
  watched().quantizations.push_back(std::move(quantization));
}

std::vector<WatchedQuantization> take_watched() {
  const std::lock_guard<std::mutex> lock(watched().mutex);
  return std::exchange(watched().quantizations, {});
}

}  // namespace tandem
