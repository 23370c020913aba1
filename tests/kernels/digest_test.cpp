#include "kernels/digest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

namespace tandem::kernels::cpu {
namespace {

std::vector<char> random_bytes(size_t size) {
  std::vector<char> bytes(size);
  std::mt19937 random(7);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

uint64_t digest_of(const std::vector<char>& bytes) { return digest(bytes.data(), bytes.size()); }

TEST(Digest, DependsOnEveryBit) {
  for (const size_t size : {1, 7, 8, 9, 63, 64, 65, 200}) {
    std::vector<char> bytes = random_bytes(size);
    std::set<uint64_t> seen{digest_of(bytes)};
    for (size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
      EXPECT_TRUE(seen.insert(digest_of(bytes)).second) << "bit " << bit << " of " << size;
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    }
  }
}

TEST(Digest, NoTwoBitsTakeEachOtherBack) {
  std::vector<char> bytes = random_bytes(72);  // two words of one lane
  const auto flip = [&](size_t bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
  };
  std::set<uint64_t> seen{digest_of(bytes)};
  for (size_t one = 0; one < 8 * bytes.size(); ++one)
    for (size_t other = 0; other < one; ++other) {
      flip(one), flip(other);
      EXPECT_TRUE(seen.insert(digest_of(bytes)).second) << "bits " << one << " and " << other;
      flip(one), flip(other);
    }
}

TEST(Digest, DependsOnEveryPiece) {
  constexpr size_t kSize = 3'000'001;
  std::vector<char> bytes = random_bytes(kSize);
  std::set<uint64_t> seen{digest_of(bytes)};
  for (size_t at = 0; at < kSize; at += 99'991) {
    ++bytes[at];
    EXPECT_TRUE(seen.insert(digest_of(bytes)).second) << "byte " << at;
  }
  ++bytes[kSize - 1];
  EXPECT_TRUE(seen.insert(digest_of(bytes)).second);
}

TEST(Digest, DependsOnTheSize) {
  const std::vector<char> zeros(1 << 20);
  std::set<uint64_t> seen;
  for (const size_t size : {0, 1, 2, 8, 16, 64, 128, 1 << 18, (1 << 18) + 1, 1 << 19, 1 << 20})
    EXPECT_TRUE(seen.insert(digest(zeros.data(), size)).second) << size;
}

TEST(Digest, SeesWhatManyWordsShare) {
  for (const size_t count : {16, 64, 4096, 1 << 18}) {
    std::vector<float> values(count);
    std::mt19937 random(count);
    for (float& value : values) value = std::uniform_real_distribution<float>(-1, 1)(random);
    std::set<uint64_t> seen;
    const auto is_new = [&] {
      return seen.insert(digest(values.data(), values.size() * sizeof(float))).second;
    };
    EXPECT_TRUE(is_new());
    for (float& value : values) value = -value;
    EXPECT_TRUE(is_new()) << "negated";
    for (float& value : values) value *= 2;
    EXPECT_TRUE(is_new()) << "doubled";
    std::swap(values[0], values[count - 1]);
    EXPECT_TRUE(is_new()) << "exchanged";
    for (size_t i = 0; i < count; i += 16) values[i] = -values[i];
    EXPECT_TRUE(is_new()) << "one lane negated";
    std::fill(values.begin(), values.end(), 0.0f);
    EXPECT_TRUE(is_new()) << "zeros";
    std::fill(values.begin(), values.end(), -0.0f);
    EXPECT_TRUE(is_new()) << "negative zeros";
  }
}

}  // namespace
}  // namespace tandem::kernels::cpu
