// What quantizing does to tensors, measured while inspection is on: amax, scales, and what is lost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "quantization/formats/format.h"

namespace tandem {

/// How well codes represent a tensor x, where y are the dequantized values. Shares are fractions of
/// the finite elements of x; without finite elements they are 0.
struct QuantizationStatistics {
  /// The largest finite |x|.
  double amax = 0;
  /// The least and the largest dequant scale.
  double least_scale = 0, largest_scale = 0;
  /// Share of the elements that are not 0 but whose code is 0.
  double underflow = 0;
  /// Share of the elements that exceed every number which rounds to the largest code under its
  /// scale. If that scale is 0, they count as underflow.
  double saturation = 0;
  /// 10 log10(sum x^2 / sum (x - y)^2) over the finite elements, in dB; infinity if y equals x.
  double signal_to_noise = 0;
  /// The number of elements of x that are NaN or infinite.
  int64_t not_finite = 0;
};

/// The statistics of x and its codes.
///
/// Shapes: x any, codes as Quantize writes them for it.
/// Error:  sums are in float64.
TANDEM_API QuantizationStatistics statistics_of(const at::Tensor& x, const CodedMatrix& codes);

/// The record of a quantization that was watched.
struct WatchedQuantization {
  /// The number that was set for the pipeline (PlanningTerms::watched), and the index of the op.
  int64_t pipeline = 0;
  size_t op = 0;
  /// "input", "weight" or "grad_output".
  std::string role = {};
  /// The index of the group for an op with groups; else -1.
  int64_t group = -1;
  /// The recipe's region at that time. Regions are numbered in ascending order.
  int64_t region = 0;
  std::string quantizer = {};
  QuantizationStatistics statistics = {};
};

/// Keeps a record for take_watched. Any thread may call it.
TANDEM_API void keep_watched(WatchedQuantization quantization);
/// Returns the records that were kept since the last call, in order.
TANDEM_API std::vector<WatchedQuantization> take_watched();

}  // namespace tandem
