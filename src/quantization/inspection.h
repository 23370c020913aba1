// What quantizing does to tensors, measured while somebody watches: amax, scales, what is lost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "quantization/formats/format.h"

namespace tandem {

/// How well codes stand for the numbers x that they are of, y being what they mean. Shares are of
/// the finite elements of x, of none 0.
struct QuantizationStatistics {
  /// The largest finite |x|.
  double amax = 0;
  /// The least and the largest of the scales that codes are multiplied by.
  double least_scale = 0, largest_scale = 0;
  /// Elements that are not 0, and whose code is.
  double underflow = 0;
  /// Elements beyond what is rounded to the largest number that a code can mean under its scale,
  /// unless that scale is 0: those count as underflow.
  double saturation = 0;
  /// 10 log10(sum x^2 / sum (x - y)^2) over the finite elements, dB; infinity where y is x.
  double signal_to_noise = 0;
  /// Elements of x that are NaN or infinite.
  int64_t not_finite = 0;
};

/// Of x and its codes by `quantizer`.
///
/// Shapes: x any, codes as Quantize writes them for it.
/// Error:  sums are in float64.
TANDEM_API QuantizationStatistics statistics_of(const at::Tensor& x, const Codes& codes,
                                                const Quantizer& quantizer);

/// A quantization that was watched.
struct WatchedQuantization {
  /// What the pipeline was told to be called, and the place of the op in it.
  int64_t pipeline = 0;
  size_t op = 0;
  /// "input", "weight" or "grad_output".
  std::string role = {};
  /// Of an op with groups, which; else -1.
  int64_t group = -1;
  /// The recipe's region in which it happened, which grows from step to step.
  int64_t region = 0;
  std::string quantizer = {};
  QuantizationStatistics statistics = {};
};

/// Keeps one for whoever takes them. Any thread may.
TANDEM_API void keep_watched(WatchedQuantization quantization);
/// Those that were kept since the last time, in order.
TANDEM_API std::vector<WatchedQuantization> take_watched();

}  // namespace tandem
