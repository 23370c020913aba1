// Which tensors share elements, against a list of the bytes of each.
#include "core/overlap.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "support/tensors.h"

namespace tandem::testing::executor_overlap {
namespace {

std::set<intptr_t> bytes_of(const at::Tensor& tensor) {
  std::set<intptr_t> starts{reinterpret_cast<intptr_t>(tensor.const_data_ptr())};
  if (tensor.numel() == 0) return {};
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    std::set<intptr_t> all;
    for (const intptr_t start : starts)
      for (int64_t i = 0; i < tensor.size(d); ++i)
        all.insert(start + i * tensor.stride(d) * static_cast<int64_t>(tensor.element_size()));
    starts = std::move(all);
  }
  const auto size = static_cast<intptr_t>(tensor.element_size());
  std::set<intptr_t> bytes;
  for (const intptr_t start : starts)
    for (intptr_t b = 0; b < size; ++b) bytes.insert(start + b);
  return bytes;
}

TEST(Overlap, IsThatOfTheBytes) {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n)(random);
  };
  const at::Tensor base = at::zeros({400}, at::kFloat), halves = base.view(at::kHalf);
  size_t overlapping = 0;
  const auto part = [&] {
    std::vector<int64_t> sizes(static_cast<size_t>(below(3))), strides(sizes.size());
    for (size_t d = 0; d < sizes.size(); ++d) sizes[d] = below(9) == 0 ? 0 : 1 + below(3);
    for (int64_t& stride : strides) stride = below(16);
    return (below(1) == 0 ? base : halves).as_strided(sizes, strides, below(30));
  };
  for (int i = 0; i < 5000; ++i) {
    const at::Tensor a = part(), b = part();
    bool expected = false;
    const auto others = bytes_of(b);
    for (const intptr_t byte : bytes_of(a)) expected |= others.count(byte) != 0;
    overlapping += expected;
    ASSERT_EQ(overlap(a, b), expected)
        << a.sizes() << a.strides() << a.storage_offset() << a.dtype() << " and " << b.sizes()
        << b.strides() << b.storage_offset() << b.dtype();
  }
  EXPECT_GT(overlapping, 500u);
  EXPECT_LT(overlapping, 4000u);
}

TEST(Overlap, SeesWhichPartsOfALargeTensorAreApart) {
  const at::Tensor whole = at::zeros({1000, 3, 700});
  EXPECT_FALSE(overlap(whole.narrow(2, 0, 350), whole.narrow(2, 350, 350)));
  EXPECT_FALSE(overlap(whole.select(1, 0).t(), whole.select(1, 2).t()));
  EXPECT_TRUE(overlap(whole.narrow(2, 0, 351), whole.narrow(2, 350, 350)));
  EXPECT_FALSE(overlap(whole, whole.clone()));
}

TEST(Overlap, TheSameElementsAreThoseOfOneGeometry) {
  const at::Tensor x = at::zeros({1, 4, 4});
  EXPECT_TRUE(same_elements(x, x.as_strided({1, 4, 4}, {7, 4, 1})));
  EXPECT_FALSE(same_elements(x, x.transpose(1, 2)));
  EXPECT_FALSE(same_elements(x, x.view({4, 4})));
  EXPECT_FALSE(same_elements(x.narrow(1, 0, 2), x.narrow(1, 1, 2)));
  EXPECT_FALSE(same_elements(x, x.view(at::kHalf).narrow(2, 0, 4)));
}

}  // namespace
}  // namespace tandem::testing::executor_overlap
