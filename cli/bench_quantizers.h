#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tandem::cli {

/// Median seconds of each call.
using Measure = std::function<std::vector<double>(const std::vector<std::function<void()>>&)>;

/// Times each quantizer that a recipe has for inputs, weights or gradients, on random numbers
/// [rows, width], codes of both directions in one call: a table, or JSON. Bytes are those read once
/// and written once; what they are compared with is a copy of the numbers.
std::string bench_quantizers(int64_t rows, int64_t width, at::ScalarType dtype, bool json,
                             const Measure& measure);

}  // namespace tandem::cli
