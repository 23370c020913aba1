#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <vector>

#include "program/files.h"

namespace tandem::apps {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};
using NamedTensors = std::vector<NamedTensor>;

/// Writes tensors in the safetensors format: 8 bytes of header length, a JSON header, the raw data.
/// This is by hand, because the library of the format is for Rust and Python, and neither libtorch
/// nor Debian has one for C++. A library reads and writes the JSON.
///
/// Dtypes:  float32, bfloat16, float16, float64, int64, uint8.
/// Throws:  UserError if the file cannot be written.
/// Source:  https://huggingface.co/docs/safetensors, "Format".
void write_safetensors(AtomicFile& file, const NamedTensors& tensors);

/// Reads tensors back and checks every number of the header before it is used. If `expected` is
/// given, the file must have that digest.
///
/// Throws:  UserError if the file is missing, truncated or damaged (test test_damaged_checkpoint).
NamedTensors read_safetensors(const std::filesystem::path& path,
                              const FileDigest* expected = nullptr);

}  // namespace tandem::apps
