#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace tandem::cli {

/// Returns the median seconds of each call.
using Measure = std::function<std::vector<double>(const std::vector<std::function<void()>>&)>;

/// The bytes of all tensors that are defined.
double total_bytes(std::span<const at::Tensor> tensors);

/// Times each quantizer that a recipe uses for inputs, weights or gradients, on random numbers
/// [rows, width], with codes of both directions in one call. Returns a table, or JSON. Bytes are
/// the bytes read once and written once; times are compared with a copy of the numbers.
std::string bench_quantizers(int64_t rows, int64_t width, at::ScalarType dtype, bool json,
                             const Measure& measure);

}  // namespace tandem::cli
