// Memory of large CPU tensors: what is freed serves again, within the limit.
#include "kernel_ops/framework/memory.h"

#include "support/memory.h"
#include "support/tensors.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_memory {
namespace {

using kernel_ops::empty_cpu;

constexpr int64_t kBytes = 1 << 20;

class Memory : public ::testing::Test {
 protected:
  /// The address of a tensor that is freed at once.
  static const void* freed(int64_t bytes) { return empty_cpu({bytes}, at::kByte).const_data_ptr(); }

  CachedMemory cached_;
};

TEST_F(Memory, OfEverySizeIsAlignedAndCanBeResized) {
  for (const int64_t bytes : {0, 1, 8, 63, 64, 1000, 65535, 65536, 65537, 1 << 20, 40 << 20}) {
    at::Tensor tensor = empty_cpu({bytes}, at::kByte);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64, 0u) << bytes;
    tensor.fill_(1);
    tensor.resize_({bytes + 100000}).slice(0, bytes).fill_(1);
    EXPECT_EQ(tensor.sum().item<int64_t>(), bytes + 100000);
  }
}

TEST_F(Memory, OfAFreedTensorServesAgain) {
  const void* first = freed(kBytes);
  EXPECT_EQ(cached_bytes(), kBytes);
  const at::Tensor again = empty_cpu({2, kBytes / 8}, at::kFloat);
  EXPECT_EQ(again.const_data_ptr(), first);
  EXPECT_EQ(again.sizes(), (std::vector<int64_t>{2, kBytes / 8}));
  EXPECT_TRUE(again.is_contiguous());
  EXPECT_EQ(cached_bytes(), 0);
  EXPECT_NE(empty_cpu({kBytes}, at::kByte).const_data_ptr(), first) << "it serves one tensor only";
}

TEST_F(Memory, OfATensorThatOthersHoldDoesNot) {
  at::Tensor tensor = empty_cpu({kBytes}, at::kByte);
  const at::Tensor view = tensor.view({2, -1});
  tensor = at::Tensor();
  EXPECT_EQ(cached_bytes(), 0);
  EXPECT_NE(empty_cpu({kBytes}, at::kByte).const_data_ptr(), view.const_data_ptr());
}

TEST_F(Memory, ServesAboutItsSizeOnly) {
  const void* first = freed(kBytes);
  EXPECT_NE(freed(kBytes + 1), first) << "too small";
  empty_cache();
  first = freed(kBytes);
  EXPECT_NE(empty_cpu({kBytes / 2}, at::kByte).const_data_ptr(), first) << "too large";
  EXPECT_EQ(empty_cpu({kBytes * 9 / 10}, at::kByte).const_data_ptr(), first);
}

TEST_F(Memory, OfSmallTensorsIsTheCLibrarys) {
  freed(1024);
  EXPECT_EQ(cached_bytes(), 0);
  EXPECT_EQ(empty_cpu({0, 7}, at::kFloat).numel(), 0);
}

TEST_F(Memory, TheLimitLetsTheOldestGo) {
  set_cache_limit(3 * kBytes);
  const at::Tensor held = empty_cpu({4 * kBytes}, at::kByte);
  freed(kBytes);
  freed(2 * kBytes);
  EXPECT_EQ(cached_bytes(), 3 * kBytes);
  freed(3 * kBytes);
  EXPECT_EQ(cached_bytes(), 3 * kBytes) << "the two before it went";
  EXPECT_EQ(set_cache_limit(0), 3 * kBytes);
  EXPECT_EQ(cached_bytes(), 0);
  freed(kBytes);
  EXPECT_EQ(cached_bytes(), 0);
}

TEST_F(Memory, WhatManyAllocationsPassedByIsGivenBack) {
  freed(8 * kBytes);
  for (int i = 0; i < 5000; ++i) freed(kBytes);
  freed(2 * kBytes);  // nothing of its size is cached, so the cache is looked through
  EXPECT_EQ(cached_bytes(), 3 * kBytes);
}

TEST_F(Memory, OfManyLengthsIsNoMoreThanTwiceWhatWasInUse) {
  const int64_t largest = 200 * kBytes / 8;
  for (int i = 0; i < 9000; ++i)
    freed(kBytes / 8);  // what was in use before this test is forgotten
  for (int i = 0; i < 200; ++i) {
    const at::Tensor x = empty_cpu({(i * 77 % 200 + 1) * kBytes / 8}, at::kByte);
    EXPECT_LE(cached_bytes() + x.numel(), 2 * largest) << "length " << x.numel();
  }
  EXPECT_GT(cached_bytes(), largest / 2);
}

TEST_F(Memory, GrowsWithItsTensor) {
  at::Tensor tensor = empty_cpu({kBytes}, at::kByte);
  tensor.fill_(7);
  tensor.resize_({2 * kBytes});
  EXPECT_EQ(tensor[kBytes - 1].item<int>(), 7);
  EXPECT_EQ(cached_bytes(), kBytes) << "the block that it left";
}

TEST_F(Memory, AnAbsurdRequestFailsAsInTorchAndLosesNothing) {
  freed(kBytes);
  EXPECT_ERROR(empty_cpu({int64_t{1} << 60}, at::kByte), c10::Error, "can't allocate memory");
  EXPECT_EQ(empty_cpu({kBytes}, at::kByte).numel(), kBytes);
}

TEST_F(Memory, ANegativeLimitIsRefused) {
  EXPECT_ERROR(
      set_cache_limit(-1), c10::ValueError,
      "set_cache_limit: expected a number of bytes of at least 0, got -1. 0 keeps nothing.");
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_memory
