// Philox4x32-10, a counter-based random generator: the scalar reference of cpu/philox-inl.h.
#pragma once

#include <array>
#include <cstdint>

namespace tandem::kernels {

inline constexpr uint32_t kPhiloxMultipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
inline constexpr uint32_t kPhiloxKeySteps[2] = {0x9E3779B9u, 0xBB67AE85u};
inline constexpr int kPhiloxRounds = 10;

/// The upper 64 bits of a counter.
struct PhiloxUpper {
  uint32_t third = 0, fourth = 0;
};

/// Returns four random words for a counter and a key, both with the least significant word first.
/// Counter 0 and key 0 give 6627E8D5 E169C58D BC57AC4C 9B00DBD8.
///
/// Source:  Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
constexpr std::array<uint32_t, 4> philox4x32_10(uint64_t counter, uint64_t key,
                                                PhiloxUpper upper = {}) {
  std::array<uint32_t, 4> c = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                               upper.third, upper.fourth};
  uint32_t k[2] = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxMultipliers[0]} * c[0],
                   p1 = uint64_t{kPhiloxMultipliers[1]} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k[0] += kPhiloxKeySteps[0];
    k[1] += kPhiloxKeySteps[1];
  }
  return c;
}

}  // namespace tandem::kernels
