#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>

namespace tandem::apps {

/// Bytes to predict. `targets` is `inputs` one byte later; both are int64 [batch, context].
struct Batch {
  at::Tensor inputs, targets;
};

/// A text as bytes: the first nine tenths are for training, the rest for validation. A training
/// batch depends only on the seed and the step, so a resumed run draws what the uninterrupted run
/// would have drawn.
///
/// Throws: UserError if the text is missing, unreadable, empty or too short (test
///         test_text_errors).
class TextData {
 public:
  TextData(const std::filesystem::path& path, int64_t context);

  Batch training_batch(int64_t batch, int64_t seed, int64_t step) const;
  /// Batch `index` of `count` batches, which are spread evenly over the validation part.
  Batch validation_batch(int64_t batch, int64_t index, int64_t count) const;

  int64_t bytes() const { return static_cast<int64_t>(text_.size()); }
  std::string checksum() const;
  /// The first `length` bytes of the validation part: a prompt that is not in the training part.
  std::string prompt(int64_t length) const;

 private:
  Batch gather(const std::vector<int64_t>& offsets) const;

  std::string text_;
  int64_t context_, training_bytes_;
};

}  // namespace tandem::apps
