// Converts rows of float32, bfloat16 or float16 to FP8 and back, and finds their amax. Included
// once per Highway target; bitwise equal on all of them.

#if defined(TANDEM_KERNELS_CPU_QUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_QUANTIZE_INL_H_
#undef TANDEM_KERNELS_CPU_QUANTIZE_INL_H_
#else
#define TANDEM_KERNELS_CPU_QUANTIZE_INL_H_
#endif

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/element-inl.h"
#include "kernels/cpu/float_mode.h"
#include "kernels/parallel.h"
#include "kernels/quantize.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// What one pass over a tensor finds: max |x| over the elements that are not NaN, as bits of the
/// element without a sign, which are ordered like the values; and whether there is a NaN.
struct Extremes {
  uint32_t amax_bits = 0;
  bool has_nan = false;
};

/// The maximum of the bits of x without their signs; with kSkipNan, over the elements that are not
/// NaN.
template <bool kSkipNan, typename E>
HWY_INLINE uint32_t max_magnitude_bits(E, const typename E::Stored* HWY_RESTRICT x, size_t count,
                                       uint32_t infinity_bits) {
  using Signed = std::conditional_t<E::kElement == Element::float32, int32_t, int16_t>;
  const hn::ScalableTag<Signed> d;
  const size_t lanes = hn::Lanes(d);
  const auto infinity = hn::Set(d, static_cast<Signed>(infinity_bits));
  const auto magnitude_bits = hn::Set(d, std::numeric_limits<Signed>::max());
  const auto bits_at = [&](const typename E::Stored* p) TANDEM_INLINE_LAMBDA {
    if constexpr (E::kElement == Element::float32) {
      return hn::BitCast(d, hn::LoadU(hn::ScalableTag<float>(), p));
    } else {
      return hn::LoadU(d, reinterpret_cast<const Signed*>(p));
    }
  };
  const auto larger = [&](auto max, const typename E::Stored* p) TANDEM_INLINE_LAMBDA {
    auto magnitude = hn::And(bits_at(p), magnitude_bits);
    if constexpr (kSkipNan) magnitude = hn::IfThenZeroElse(hn::Gt(magnitude, infinity), magnitude);
    return hn::Max(max, magnitude);
  };
  // Reads four streams at a time: a single stream waits for memory at each page, because hardware
  // does not prefetch across pages.
  const size_t quarter = count / (4 * lanes) * lanes;
  auto max0 = hn::Zero(d), max1 = hn::Zero(d);
  for (size_t i = 0; i < quarter; i += lanes) {
    max0 = larger(larger(max0, x + i), x + quarter + i);
    max1 = larger(larger(max1, x + 2 * quarter + i), x + 3 * quarter + i);
  }
  size_t i = 4 * quarter;
  for (; i + lanes <= count; i += lanes) max0 = larger(max0, x + i);
  if (i < count) {
    HWY_ALIGN typename E::Stored rest[HWY_MAX_BYTES / sizeof(Signed)] = {};
    std::memcpy(static_cast<void*>(rest), x + i, (count - i) * sizeof(Signed));
    max0 = larger(max0, rest);
  }
  HWY_ALIGN Signed maxima[HWY_MAX_BYTES / sizeof(Signed)];
  hn::Store(hn::Max(max0, max1), d, maxima);
  return static_cast<uint32_t>(*std::max_element(maxima, maxima + lanes));
}

/// Adds a row to `extremes`. NaN is detected by its bits, because targets differ in max
/// instructions.
template <typename E>
HWY_INLINE void look_at(E element, const typename E::Stored* HWY_RESTRICT x, size_t count,
                        Extremes& extremes) {
  constexpr uint32_t kInfinity = E::kElement == Element::float32    ? 0x7F800000u
                                 : E::kElement == Element::bfloat16 ? 0x7F80u
                                                                    : 0x7C00u;
  uint32_t largest = max_magnitude_bits<false>(element, x, count, kInfinity);
  if (largest > kInfinity) {
    extremes.has_nan = true;
    largest = max_magnitude_bits<true>(element, x, count, kInfinity);
  }
  extremes.amax_bits = std::max(extremes.amax_bits, largest);
}

/// Extremes that several threads add to.
class SharedExtremes {
 public:
  void add(const Extremes& extremes) {
    uint32_t seen = amax_bits_.load();
    while (seen < extremes.amax_bits &&
           !amax_bits_.compare_exchange_weak(seen, extremes.amax_bits)) {
    }
    if (extremes.has_nan) has_nan_ = true;
  }
  Extremes get() const { return {amax_bits_.load(), has_nan_.load()}; }

 private:
  std::atomic<uint32_t> amax_bits_{0};
  std::atomic<bool> has_nan_{false};
};

/// The float32 value of Extremes::amax_bits.
template <typename E>
HWY_INLINE float value_of_bits(E element, uint32_t bits) {
  const ScopedFloatMode mode;
  typename E::Stored stored;
  std::memcpy(static_cast<void*>(&stored), &bits, sizeof(stored));
  const hn::ScalableTag<float> d;
  return hn::GetLane(load_first(element, d, &stored, 1));
}

/// a where the bits of `mask` are set, b elsewhere; one instruction on targets that have one.
template <class V>
HWY_INLINE V select_bits(V mask, V a, V b) {
  return hn::Xor(hn::And(hn::Xor(a, b), mask), b);
}

/// The code of every magnitude in the low byte; the other bits are undefined. Magnitudes that round
/// to more than the format's largest value give no valid code.
///
/// Let 2^e be the power of two in a magnitude, but at least the smallest normal number. The code is
/// the number of codes from the smallest normal number to 2^e, plus the magnitude in units of 2^e /
/// 2^mantissa_bits. These units are the last bits of the sum of the magnitude and 2^e times
/// 2^dropped_bits: the adder rounds, and subnormals need no case of their own. The excess in the
/// number of codes is subtracted in the same sum, where it must be even so that ties are not
/// disturbed.
template <Fp8Format kFormat, class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> magnitude_codes(D d, hn::Vec<D> magnitude) {
  constexpr Fp8Traits kTraits = traits_of(kFormat);
  constexpr auto kMinNormal = static_cast<int32_t>(kTraits.min_normal_bits());
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const auto exponent = hn::And(hn::BitCast(di, magnitude), hn::Set(di, 0x7F800000));
  const auto power = hn::Max(exponent, hn::Set(di, kMinNormal));
  constexpr int32_t kTooManySteps = (kMinNormal >> kTraits.dropped_bits()) & 0xFF;
  static_assert(kTooManySteps % 2 == 0);
  const auto addend =
      hn::Add(power, hn::Set(di, (kTraits.dropped_bits() << 23) + (0x100 - kTooManySteps)));
  const auto sum = hn::BitCast(di, hn::Add(magnitude, hn::BitCast(d, addend)));
  return hn::BitCast(du, hn::Add(sum, hn::ShiftRight<kTraits.dropped_bits()>(power)));
}

/// fp8_from_float of every lane.
template <Fp8Format kFormat, class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> fp8_codes(D d, hn::Vec<D> v) {
  constexpr Fp8Traits kTraits = traits_of(kFormat);
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(du, v);
  const auto unsigned_bits = hn::BitCast(di, hn::And(bits, hn::Set(du, 0x7FFFFFFFu)));
  const auto is_nan = hn::RebindMask(du, hn::Gt(unsigned_bits, hn::Set(di, 0x7F800000)));
  // Clamped as integers, which are ordered like magnitudes, so that rounding above the largest
  // value needs no case.
  const auto clamped = hn::Min(unsigned_bits, hn::Set(di, std::bit_cast<int32_t>(kTraits.max)));
  const auto codes = magnitude_codes<kFormat>(d, hn::BitCast(d, clamped));
  const auto magnitude_bits = hn::Set(du, kTraits.nan_code());
  const auto code = select_bits(magnitude_bits, codes, hn::ShiftRight<32 - kTraits.bits>(bits));
  const auto code_bits = hn::Set(du, 2 * kTraits.sign() - 1);
  return hn::IfThenElse(is_nan, magnitude_bits, hn::And(code, code_bits));
}

/// Whether every |x * quant_scale| rounds to a code below NaN and infinity without a clamp, no x is
/// NaN, and signs are kept.
HWY_INLINE bool is_ordinary(float amax, bool has_nan, float quant_scale, Fp8Format format) {
  const ScopedFloatMode mode;
  return !has_nan && !std::signbit(quant_scale) &&
         amax * quant_scale < traits_of(format).overflow_from;
}

#if HWY_TARGET != HWY_SCALAR
/// The high 16 bits of two vectors of float32, with their signs, in the order of memory.
HWY_INLINE hn::Vec<hn::ScalableTag<uint16_t>> high_words(hn::Vec<hn::ScalableTag<float>> first,
                                                         hn::Vec<hn::ScalableTag<float>> second) {
  const hn::ScalableTag<uint16_t> d16;
  return hn::ConcatOdd(d16, hn::BitCast(d16, second), hn::BitCast(d16, first));
}

/// Two vectors of elements: magnitudes as float32 and, with their signs, the high 16 bits in the
/// order of memory. For bfloat16, `first` holds the even elements and `second` the odd ones: each
/// is a float32 in its place, and nothing moves between lanes.
struct ElementPair {
  hn::Vec<hn::ScalableTag<float>> first, second;
  hn::Vec<hn::ScalableTag<uint16_t>> words;
};

template <typename E>
HWY_INLINE ElementPair load_pair(E element, const typename E::Stored* HWY_RESTRICT x) {
  const hn::ScalableTag<float> d;
  if constexpr (E::kElement == Element::bfloat16) {
    const hn::RebindToUnsigned<decltype(d)> du;
    const auto words = hn::LoadU(hn::ScalableTag<uint16_t>(), x);
    const auto magnitudes = hn::And(hn::BitCast(du, words), hn::Set(du, 0x7FFF7FFFu));
    return {hn::BitCast(d, hn::ShiftLeft<16>(magnitudes)),
            hn::BitCast(d, hn::And(magnitudes, hn::Set(du, 0xFFFF0000u))), words};
  } else {
    const auto first = load(element, d, x), second = load(element, d, x + hn::Lanes(d));
    return {hn::Abs(first), hn::Abs(second), high_words(first, second)};
  }
}

/// The low 16 bits of results from the two halves of an ElementPair, in the order of memory.
template <typename E, class V>
HWY_INLINE hn::Vec<hn::ScalableTag<uint16_t>> join_pair(E, V first, V second) {
  const hn::ScalableTag<uint16_t> d16;
  if constexpr (E::kElement == Element::bfloat16) {
    return hn::OddEven(hn::BitCast(d16, hn::ShiftLeft<16>(second)), hn::BitCast(d16, first));
  } else {
    return hn::ConcatEven(d16, hn::BitCast(d16, second), hn::BitCast(d16, first));
  }
}

/// The low bytes of a joined pair.
HWY_INLINE void store_bytes(hn::Vec<hn::ScalableTag<uint16_t>> words, uint8_t* HWY_RESTRICT to) {
  const hn::Rebind<uint8_t, hn::ScalableTag<uint16_t>> d8;
  hn::StoreU(hn::TruncateTo(d8, words), d8, to);
}

/// fp8_codes of a pair of ordinary x (see is_ordinary) times positive factors: it needs no clamp
/// and no case for NaN, and joins signs if a vector holds two elements per lane.
template <Fp8Format kFormat, typename E>
HWY_INLINE void quantize_ordinary_pair(E element, const ElementPair& x,
                                       hn::Vec<hn::ScalableTag<float>> first_factor,
                                       hn::Vec<hn::ScalableTag<float>> second_factor,
                                       uint8_t* HWY_RESTRICT codes) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<uint16_t> d16;
  const auto both = join_pair(element, magnitude_codes<kFormat>(d, hn::Mul(x.first, first_factor)),
                              magnitude_codes<kFormat>(d, hn::Mul(x.second, second_factor)));
  store_bytes(select_bits(hn::Set(d16, uint16_t{0x7F}), both, hn::ShiftRight<8>(x.words)), codes);
}
#endif

/// codes[i] = fp8_from_float(x[i] * quant_scale). `ordinary`: is_ordinary for the whole tensor.
template <Fp8Format kFormat, typename E>
HWY_INLINE void quantize_row(E element, const typename E::Stored* HWY_RESTRICT x, size_t count,
                             float quant_scale, [[maybe_unused]] bool ordinary,
                             uint8_t* HWY_RESTRICT codes) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, quant_scale);
  const auto convert = [&](auto v) TANDEM_INLINE_LAMBDA {
    return hn::TruncateTo(d8, fp8_codes<kFormat>(d, hn::Mul(v, factor)));
  };
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  if (ordinary) {
    for (; i + 2 * lanes <= count; i += 2 * lanes)
      quantize_ordinary_pair<kFormat>(element, load_pair(element, x + i), factor, factor,
                                      codes + i);
  }
#endif
  for (; i + lanes <= count; i += lanes)
    hn::StoreU(convert(load(element, d, x + i)), d8, codes + i);
  if (i < count) {
    HWY_ALIGN uint8_t buffer[HWY_MAX_BYTES];
    hn::StoreU(convert(load_first(element, d, x + i, count - i)), d8, buffer);
    std::memcpy(codes + i, buffer, count - i);
  }
}

/// float_from_fp8 of the code in the low bits of every lane.
template <Fp8Format kFormat, class D>
HWY_INLINE hn::Vec<D> fp8_values(D d, hn::Vec<hn::RebindToUnsigned<D>> code) {
  constexpr Fp8Traits kTraits = traits_of(kFormat);
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kTraits.bias) << 23;
  constexpr float kUnit = std::bit_cast<float>(kTraits.min_subnormal_bits());
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto magnitude = hn::BitCast(di, hn::And(code, hn::Set(du, kTraits.nan_code())));
  const auto sign = hn::ShiftLeft<32 - kTraits.bits>(hn::And(code, hn::Set(du, kTraits.sign())));
  const auto normal = hn::Add(hn::ShiftLeft<kTraits.dropped_bits()>(hn::BitCast(du, magnitude)),
                              hn::Set(du, kRebias));
  const auto subnormal = hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, kUnit));
  const auto is_subnormal =
      hn::RebindMask(du, hn::Lt(magnitude, hn::Set(di, 1 << kTraits.mantissa_bits)));
  const auto is_nan = hn::RebindMask(
      du, hn::Gt(magnitude, hn::Set(di, static_cast<int32_t>(kTraits.first_nan) - 1)));
  auto value = hn::IfThenElse(is_subnormal, hn::BitCast(du, subnormal), normal);
  if constexpr (kTraits.above < kTraits.first_nan) {
    value = hn::IfThenElse(
        hn::RebindMask(du, hn::Eq(magnitude, hn::Set(di, static_cast<int32_t>(kTraits.above)))),
        hn::Set(du, 0x7F800000u), value);
  }
  value = hn::Or(value, sign);
  return hn::BitCast(d, hn::IfThenElse(is_nan, hn::Set(du, 0x7FC00000u), value));
}

/// The bytes at `p`, one per lane; with a count, zeros after so many.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> load_bytes(D, const uint8_t* HWY_RESTRICT p, Whole) {
  return hn::PromoteTo(hn::RebindToUnsigned<D>(), hn::LoadU(hn::Rebind<uint8_t, D>(), p));
}
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> load_bytes(D d, const uint8_t* HWY_RESTRICT p,
                                                       size_t count) {
  HWY_ALIGN uint8_t buffer[HWY_MAX_BYTES] = {};
  std::memcpy(buffer, p, count);
  return load_bytes(d, buffer, Whole{});
}

/// y[i] = float_from_fp8(codes[i]) * dequant_scale.
template <Fp8Format kFormat, typename E>
HWY_INLINE void dequantize_row(E element, const uint8_t* HWY_RESTRICT codes, size_t count,
                               float dequant_scale, typename E::Stored* HWY_RESTRICT y) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, dequant_scale);
  write_row(element, count, y, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    return hn::Mul(fp8_values<kFormat>(d, load_bytes(d, codes + i, part)), factor);
  });
}

/// Calls `body(element, row, r)` for each row of a matrix, on several threads if that pays.
template <typename Rows, typename Body>
HWY_INLINE void for_each_row(const Rows& matrix, Body&& body) {
  const auto grain =
      static_cast<int64_t>(std::max<size_t>(1, 32768 / std::max<size_t>(1, matrix.cols)));
  with_element(matrix.element, [&](auto element) HWY_ATTR {
    parallel_for(0, static_cast<int64_t>(matrix.rows), grain,
                 [&](int64_t first, int64_t last) HWY_ATTR {
                   const ScopedFloatMode mode;
                   for (auto r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r)
                     body(element, decltype(element)::at(matrix.data, r * matrix.stride), r);
                 });
  });
}

/// Calls `body(std::integral_constant<Fp8Format, ...>{})`. A lambda needs HWY_ATTR before its body.
template <typename Body>
HWY_INLINE void with_format(Fp8Format format, Body&& body) {
  if (format == Fp8Format::e4m3) {
    body(std::integral_constant<Fp8Format, Fp8Format::e4m3>{});
  } else {
    body(std::integral_constant<Fp8Format, Fp8Format::e5m2>{});
  }
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_QUANTIZE_INL_H_
