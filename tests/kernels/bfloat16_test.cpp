#include "kernels/bfloat16.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <vector>

namespace tandem::kernels::cpu {
namespace {

bool fits(const std::vector<float>& x, std::vector<uint16_t>& out) {
  out.assign(x.size(), 0xABCD);
  return to_bfloat16_if_exact(x.data(), x.size(), out.data());
}

/// All bfloat16 numbers but denormals, some of them several times.
std::vector<float> numbers(size_t count) {
  std::vector<float> x;
  for (uint32_t bits = 0; x.size() < count; bits = (bits + 1) & 0xFFFF)
    if ((bits & 0x7F80) != 0 || (bits & 0x7F) == 0) x.push_back(std::bit_cast<float>(bits << 16));
  return x;
}

TEST(ToBfloat16IfExact, TakesEveryNumberThatIsNotDenormal) {
  std::vector<uint16_t> out;
  for (const size_t count : {1, 7, 64, 65, 1000, 100000}) {
    const std::vector<float> x = numbers(count);
    ASSERT_TRUE(fits(x, out)) << count;
    for (size_t i = 0; i < count; ++i)
      ASSERT_EQ(uint32_t{out[i]} << 16, std::bit_cast<uint32_t>(x[i])) << i << " of " << count;
  }
  EXPECT_TRUE(fits({}, out));
}

TEST(ToBfloat16IfExact, RefusesOneNumberAnywhere) {
  std::vector<uint16_t> out;
  for (const size_t count : {1, 9, 64, 1001, 70001})
    for (const size_t place : {size_t{0}, count / 2, count - 1})
      for (const float other : {1.0f + 0x1p-8f, 0x1p-127f, -0x1p-133f, 0x1p-149f, 1e-40f}) {
        std::vector<float> x = numbers(count);
        x[place] = other;
        EXPECT_FALSE(fits(x, out)) << other << " at " << place << " of " << count;
      }
}

}  // namespace
}  // namespace tandem::kernels::cpu
