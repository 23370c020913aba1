// Random words of Philox4x32-10 in vectors. Included once per Highway target.

#if defined(TANDEM_KERNELS_CPU_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_PHILOX_INL_H_
#undef TANDEM_KERNELS_CPU_PHILOX_INL_H_
#else
#define TANDEM_KERNELS_CPU_PHILOX_INL_H_
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/philox.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR
/// Four random words for the counter in each 64-bit lane and the upper words `upper`. The high 32
/// bits of each result lane are undefined.
struct PhiloxLanes {
  using V = hn::Vec<hn::ScalableTag<uint64_t>>;
  V c0, c1, c2, c3;

  HWY_INLINE PhiloxLanes(V counter, PhiloxUpper upper, uint64_t seed) {
    const hn::ScalableTag<uint64_t> d;
    const hn::Repartition<uint32_t, decltype(d)> d32;
    c0 = counter;
    c1 = hn::ShiftRight<32>(counter);
    c2 = hn::Set(d, uint64_t{upper.third});
    c3 = hn::Set(d, uint64_t{upper.fourth});
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      // The multiplication reads the low words only.
      const auto p0 = hn::MulEven(hn::BitCast(d32, c0), hn::Set(d32, kPhiloxMultipliers[0]));
      const auto p1 = hn::MulEven(hn::BitCast(d32, c2), hn::Set(d32, kPhiloxMultipliers[1]));
      c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), c1), hn::Set(d, uint64_t{k0}));
      c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), c3), hn::Set(d, uint64_t{k1}));
      c1 = p1;
      c3 = p0;
      k0 += kPhiloxKeySteps[0];
      k1 += kPhiloxKeySteps[1];
    }
  }
};
#endif

/// Fills in the random words of the blocks from `first` on: at least `count` words, and at most 2 *
/// HWY_MAX_BYTES / 4 more.
inline void fill_words(uint64_t seed, uint64_t first, size_t count, uint32_t* words,
                       PhiloxUpper upper = {}) {
#if HWY_TARGET == HWY_SCALAR
  for (size_t i = 0; i < count; i += 4) {
    const auto block = philox4x32_10(first + i / 4, seed, upper);
    std::copy(block.begin(), block.end(), words + i);
  }
#else
  const hn::ScalableTag<uint64_t> d;
  const hn::Repartition<uint32_t, decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  // Even lanes take the first half of a group of blocks and odd lanes the second, so that
  // interleaving pairs leaves them in order.
  const auto number = hn::Iota(d, 0);
  const auto is_odd = hn::Ne(hn::And(number, hn::Set(d, uint64_t{1})), hn::Zero(d));
  const auto within = hn::Add(hn::ShiftRight<1>(number),
                              hn::IfThenElseZero(is_odd, hn::Set(d, uint64_t{lanes / 2})));
  const auto low_word = hn::Set(d, uint64_t{0xFFFFFFFFu});
  for (size_t done = 0; done < count; done += 4 * lanes) {
    const PhiloxLanes r(hn::Add(hn::Set(d, uint64_t{first + done / 4}), within), upper, seed);
    const auto first_words = hn::Or(hn::And(r.c0, low_word), hn::ShiftLeft<32>(r.c1));
    const auto last_words = hn::Or(hn::And(r.c2, low_word), hn::ShiftLeft<32>(r.c3));
    hn::StoreU(hn::BitCast(d32, hn::InterleaveLower(d, first_words, last_words)), d32,
               words + done);
    hn::StoreU(hn::BitCast(d32, hn::InterleaveUpper(d, first_words, last_words)), d32,
               words + done + 2 * lanes);
  }
#endif
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_PHILOX_INL_H_
