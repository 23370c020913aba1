// The part of a plan's key that is read from tensors and from torch's state at every call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "quantization/formats/codes.h"

namespace tandem {

/// What a key contains of the sizes of tensors. A plan depends on sizes only under a memory budget
/// or if ops are recomputed; there it depends on the number of rows only if some op may reshape x.
enum class SizesInKey : uint8_t { none, but_rows, all };

/// Words that decide which plan serves a call. Filled and compared without allocation for up to 28
/// tensors.
class PlanKey {
 public:
  struct Call {
    /// Whether gradients are recorded.
    bool grad_mode = false;
    /// Whether the call is dispatched: no step may mutate arguments or return them.
    bool traced = false;
    /// Autocast's dtype for the device type of the input; Undefined outside autocast.
    at::ScalarType autocast_dtype = at::ScalarType::Undefined;
  };
  struct TensorTraits {
    bool defined, requires_grad;
    at::ScalarType dtype;
    at::Device device;
  };

  /// `inputs`: how many of the tensors that `add` gets are inputs; the rest are parameters.
  explicit PlanKey(const Call& call, size_t inputs = 1) {
    words_.push_back(0);
    words_.push_back(0);
    words_.push_back(static_cast<uint32_t>(call.autocast_dtype) << 8 | uint32_t{call.grad_mode} |
                     uint32_t{call.traced} << 1);
    words_.push_back(static_cast<uint32_t>(inputs));
  }

  /// Notes that an input or a parameter (`tensor`: its index among all) comes in codes. Call it
  /// after all tensors are added.
  void add_codes(size_t tensor, const Codes& codes) {
    // A quantizer is never destroyed.
    const auto address = reinterpret_cast<uintptr_t>(codes.quantizer);
    words_.push_back(static_cast<uint32_t>(tensor) << 2 | uint32_t{codes.has(Direction::row)} |
                     uint32_t{codes.has(Direction::column)} << 1);
    words_.push_back(static_cast<uint32_t>(address));
    words_.push_back(static_cast<uint32_t>(uint64_t{address} >> 32));
    ++words_[0];
  }

  /// Placeholders for a tensor's first size that grows with the main input: as the first size of
  /// the main input does, or as its number of rows.
  static constexpr int64_t kGrowsAsFirst = -1, kGrowsAsRows = -2;
  /// Call it for each tensor in order, after all codes. The first of `sizes` may be a placeholder.
  void add_sizes(c10::ArrayRef<int64_t> sizes) {
    words_.push_back(static_cast<uint32_t>(sizes.size()));
    for (const int64_t size : sizes) {
      words_.push_back(static_cast<uint32_t>(size));
      words_.push_back(static_cast<uint32_t>(static_cast<uint64_t>(size) >> 32));
    }
    words_[kSizesLength] += static_cast<uint32_t>(1 + 2 * sizes.size());
  }

  void add(const at::Tensor& tensor, bool grad_mode) {
    if (!tensor.defined()) {
      words_.push_back(0);
      return;
    }
    add({true, grad_mode && tensor.requires_grad(), tensor.scalar_type(), tensor.device()});
  }
  /// Adds a defined tensor by the properties that a plan depends on.
  void add(const TensorTraits& traits) {
    words_.push_back(1u | uint32_t{traits.requires_grad} << 1 |
                     static_cast<uint32_t>(traits.dtype) << 8 |
                     static_cast<uint32_t>(traits.device.type()) << 16 |
                     static_cast<uint32_t>(static_cast<uint8_t>(traits.device.index())) << 24);
  }

  Call call() const {
    const uint32_t word = words_[kCall];
    return {(word & 1u) != 0, (word & 2u) != 0, static_cast<at::ScalarType>(word >> 8 & 0xFF)};
  }
  size_t input_count() const { return words_[kInputs]; }
  size_t tensor_count() const {
    return words_.size() - kHead - 3 * codes_count() - words_[kSizesLength];
  }
  /// The sizes of each tensor; empty if no sizes were added.
  std::vector<std::vector<int64_t>> sizes() const {
    std::vector<std::vector<int64_t>> all;
    for (size_t at = words_.size() - words_[kSizesLength]; at < words_.size();) {
      auto& sizes = all.emplace_back(words_[at++]);
      for (int64_t& size : sizes) {
        size = static_cast<int64_t>(uint64_t{words_[at]} | uint64_t{words_[at + 1]} << 32);
        at += 2;
      }
    }
    return all;
  }
  size_t codes_count() const { return words_[kCodesCount]; }
  struct CodesTraits {
    size_t tensor;
    const Quantizer* quantizer;
    bool row, column;
  };
  CodesTraits codes(size_t i) const {
    const uint32_t* words = &words_[kHead + tensor_count() + 3 * i];
    const uint64_t address = uint64_t{words[1]} | uint64_t{words[2]} << 32;
    return {words[0] >> 2, reinterpret_cast<const Quantizer*>(static_cast<uintptr_t>(address)),
            (words[0] & 1u) != 0, (words[0] & 2u) != 0};
  }
  TensorTraits tensor(size_t i) const {
    const uint32_t word = words_[i + kHead];
    return {(word & 1u) != 0, (word & 2u) != 0, static_cast<at::ScalarType>(word >> 8 & 0xFF),
            at::Device(static_cast<at::DeviceType>(word >> 16 & 0xFF),
                       static_cast<at::DeviceIndex>(word >> 24))};
  }

  bool operator==(const PlanKey& other) const { return words_ == other.words_; }

 private:
  /// The words at the front. Words of tensors, of codes and of sizes follow in this order.
  enum Head : size_t { kCodesCount, kSizesLength, kCall, kInputs, kHead };
  c10::SmallVector<uint32_t, 32> words_;
};

}  // namespace tandem
