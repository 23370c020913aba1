#include "kernel_ops/framework/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "tandem/memory.h"

namespace tandem::kernel_ops {

namespace {

// Smaller tensors come from the C library's free lists, whose pages stay mapped.
constexpr size_t kWorthCaching = 64 * 1024;
// Alignment of the data.
constexpr size_t kAlignment = 64;
// Sizes are rounded up to a multiple of this, so that sequences of similar lengths share blocks.
constexpr size_t kGranularity = 16 * 1024;
// A cached block that was not used for so many allocations belongs to shapes that no longer occur.
constexpr uint64_t kPatience = 4096;
// Blocks in use and cached blocks together are at most so many times the peak of bytes in use. If
// every step has another length, blocks of lengths that never return would otherwise fill the
// limit. Steps of one shape hold less than twice their peak.
constexpr int64_t kShareOfPeak = 2;
// Bytes between the header and the data, so that both are aligned.
constexpr size_t kHeader = kAlignment;

int64_t default_limit() {
  // AddressSanitizer takes a cached block for a live one and would not see a use after free.
  return kSanitized ? 0 : static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) / 8;
}

/// The header of a block. torch's allocators must free by the data's address alone.
struct Block {
  size_t capacity;        // bytes of data
  uint64_t freed_at = 0;  // the count of allocations when it was freed

  void* data() { return reinterpret_cast<char*>(this) + kHeader; }
  static Block* of(void* data) {
    return reinterpret_cast<Block*>(static_cast<char*>(data) - kHeader);
  }
};
static_assert(sizeof(Block) <= kHeader);

class BlockAllocator final : public c10::Allocator {
 public:
  static BlockAllocator& instance() {
    // It is never destroyed: tensors in static objects of others may be freed very late.
    static auto* allocator = new BlockAllocator;
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    Block* block = take(bytes);
    if (block == nullptr) block = make(bytes);
    c10::profiledCPUMemoryReporter().New(block->data(), block->capacity);
    return {block->data(), block->data(), &free_data, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_data; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  int64_t cached() {
    const std::lock_guard lock(mutex_);
    return cached_;
  }
  void release_all() {
    Blocks released;
    {
      const std::lock_guard lock(mutex_);
      released.swap(free_);
      cached_ = 0;
    }
    give_back(released);
  }
  int64_t set_limit(int64_t bytes) {
    Blocks released;
    int64_t before;
    {
      const std::lock_guard lock(mutex_);
      before = std::exchange(limit_, bytes);
      shrink(released);
    }
    give_back(released);
    return before;
  }

 private:
  using Blocks = std::vector<Block*>;

  static void free_data(void* data) {
    if (data == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(data);
    instance().keep(Block::of(data));
  }
  static void give_back(const Blocks& blocks) {
    for (Block* block : blocks) c10::free_cpu(block);
  }

  /// Takes the most recently freed block that is large enough and at most a quarter too large:
  /// recently written memory is most likely in the processor's cache.
  Block* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    ++allocations_;
    for (auto block = free_.rbegin(); block != free_.rend(); ++block) {
      const size_t capacity = (*block)->capacity;
      if (capacity < bytes || capacity - capacity / 5 > std::max(bytes, kGranularity)) continue;
      Block* taken = *block;
      free_.erase(std::next(block).base());
      cached_ -= static_cast<int64_t>(capacity);
      use(static_cast<int64_t>(capacity));
      return taken;
    }
    return nullptr;
  }

  Block* make(size_t bytes) {
    const size_t capacity = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    void* memory = nullptr;
    try {
      memory = c10::alloc_cpu(kHeader + capacity);
    } catch (const c10::Error&) {
      release_all();
      memory = c10::alloc_cpu(kHeader + capacity);
    }
    Blocks released;
    {
      const std::lock_guard lock(mutex_);
      use(static_cast<int64_t>(capacity));
      while (!free_.empty() && allocations_ - free_.front()->freed_at > kPatience)
        release_oldest(released);
      shrink(released);
    }
    give_back(released);
    return new (memory) Block{capacity};
  }

  void keep(Block* block) {
    Blocks released;
    {
      const std::lock_guard lock(mutex_);
      block->freed_at = allocations_;
      free_.push_back(block);
      cached_ += static_cast<int64_t>(block->capacity);
      in_use_ -= static_cast<int64_t>(block->capacity);
      shrink(released);
    }
    give_back(released);
  }

  // The callers of the next three functions hold the mutex, and give the released blocks back
  // without it.
  void use(int64_t bytes) {
    in_use_ += bytes;
    if (allocations_ - peak_since_ > kPatience) {
      earlier_peak_ = std::exchange(peak_, 0);
      peak_since_ = allocations_;
    }
    peak_ = std::max(peak_, in_use_);
  }
  void shrink(Blocks& released) {
    const int64_t held = kShareOfPeak * std::max(peak_, earlier_peak_);
    while (!free_.empty() && (cached_ > limit_ || cached_ + in_use_ > held))
      release_oldest(released);
  }
  void release_oldest(Blocks& released) {
    released.push_back(free_.front());
    cached_ -= static_cast<int64_t>(free_.front()->capacity);
    free_.erase(free_.begin());
  }

  std::mutex mutex_;
  Blocks free_;  // the most recently freed one is last
  int64_t cached_ = 0, in_use_ = 0;
  int64_t limit_ = default_limit();
  uint64_t allocations_ = 0;
  // The most bytes in use since allocation `peak_since_`, and in the kPatience allocations before
  // it.
  int64_t peak_ = 0, earlier_peak_ = 0;
  uint64_t peak_since_ = 0;
};

/// Allocates by malloc(), which keeps small blocks per thread; for aligned blocks, as torch
/// requests them, the C library takes many times as long. malloc()'s address is stored ahead of the
/// data.
class SmallAllocator final : public c10::Allocator {
 public:
  static SmallAllocator& instance() {
    static auto* allocator = new SmallAllocator;  // never destroyed, as BlockAllocator
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* const block = std::malloc(bytes + kAlignment);
    if (block == nullptr) return BlockAllocator::instance().allocate(bytes);  // retries or throws
    auto* const data = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(block) + kAlignment) /
                                                kAlignment * kAlignment);
    static_assert(alignof(std::max_align_t) >= sizeof(void*), "so much is free ahead of the data");
    data[-1] = block;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &free_data, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_data; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void free_data(void* data) {
    if (data == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(data);
    std::free(static_cast<void**>(data)[-1]);
  }
};

}  // namespace

at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype) {
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  c10::Allocator* allocator = &BlockAllocator::instance();
  if (bytes < kWorthCaching) allocator = &SmallAllocator::instance();
  return at::Tensor(at::detail::empty_generic(
      sizes, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt));
}

at::Tensor empty_beside(const at::Tensor& neighbour, at::IntArrayRef sizes, at::ScalarType dtype) {
  if (is_on_host(neighbour)) return empty_cpu(sizes, dtype);
  return at::empty(sizes,
                   neighbour.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
}

}  // namespace tandem::kernel_ops

namespace tandem {

int64_t cached_bytes() { return kernel_ops::BlockAllocator::instance().cached(); }

void empty_cache() { kernel_ops::BlockAllocator::instance().release_all(); }

int64_t set_cache_limit(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "set_cache_limit: expected a number of bytes of at least 0, got ",
                    bytes, ". 0 keeps nothing.");
  return kernel_ops::BlockAllocator::instance().set_limit(bytes);
}

}  // namespace tandem
