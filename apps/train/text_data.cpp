#include "text_data.h"

#include <ATen/ops/empty.h>

#include "program/errors.h"
#include "program/files.h"

namespace tandem::apps {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kValidationShare = 10;  // one byte in ten

/// A step of SplitMix64 (Steele, Lea and Flood 2014): different inputs give unrelated outputs.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

TextData::TextData(const fs::path& path, int64_t context)
    : text_(read_file(path, "a text file", "Pass an existing file with --text.", Source::any)),
      context_(context) {
  const int64_t least = kValidationShare * (context + 1);
  if (bytes() < least) {
    throw UserError("expected a text of at least " + std::to_string(least) +
                    " bytes (ten windows of --context " + std::to_string(context) + "), got " +
                    std::to_string(bytes()) + " in " + path.string() +
                    ". Pass a longer --text or a smaller --context.");
  }
  training_bytes_ = bytes() - bytes() / kValidationShare;
}

Batch TextData::gather(const std::vector<int64_t>& offsets) const {
  const auto batch = static_cast<int64_t>(offsets.size());
  Batch made{at::empty({batch, context_}, at::kLong), at::empty({batch, context_}, at::kLong)};
  auto* inputs = made.inputs.mutable_data_ptr<int64_t>();
  auto* targets = made.targets.mutable_data_ptr<int64_t>();
  for (const int64_t offset : offsets) {
    for (int64_t i = 0; i < context_; ++i) {
      *inputs++ = static_cast<unsigned char>(text_[static_cast<size_t>(offset + i)]);
      *targets++ = static_cast<unsigned char>(text_[static_cast<size_t>(offset + i + 1)]);
    }
  }
  return made;
}

Batch TextData::training_batch(int64_t batch, int64_t seed, int64_t step) const {
  const auto starts = static_cast<uint64_t>(training_bytes_ - context_);
  std::vector<int64_t> offsets;
  for (int64_t row = 0; row < batch; ++row) {
    const uint64_t drawn = mix(mix(mix(static_cast<uint64_t>(seed)) ^ static_cast<uint64_t>(step)) ^
                               static_cast<uint64_t>(row));
    offsets.push_back(static_cast<int64_t>(drawn % starts));
  }
  return gather(offsets);
}

Batch TextData::validation_batch(int64_t batch, int64_t index, int64_t count) const {
  const int64_t last = bytes() - training_bytes_ - context_ - 1, windows = batch * count;
  std::vector<int64_t> offsets;
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t window = index * batch + row;
    offsets.push_back(training_bytes_ + (windows > 1 ? last * window / (windows - 1) : 0));
  }
  return gather(offsets);
}

std::string TextData::checksum() const {
  Checksum checksum;
  checksum.add(text_);
  return checksum.hex();
}

std::string TextData::prompt(int64_t length) const {
  return text_.substr(static_cast<size_t>(training_bytes_), static_cast<size_t>(length));
}

}  // namespace tandem::apps
