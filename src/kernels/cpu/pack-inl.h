// Packs: several vectors of float32 that take each step together. Included once per Highway target.
//
// A long chain of dependent instructions can fill a core's scheduler before the next vector's chain
// begins. If the steps of several vectors are interleaved, their chains overlap.

#if defined(TANDEM_KERNELS_CPU_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_PACK_INL_H_
#undef TANDEM_KERNELS_CPU_PACK_INL_H_
#else
#define TANDEM_KERNELS_CPU_PACK_INL_H_
#endif

#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/element-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Without vectors, a core overlaps the chains of single numbers by itself.
constexpr size_t kPackVectors = HWY_TARGET == HWY_SCALAR ? 1 : 4;

/// N vectors of float32. A float converts to a pack that holds it in every lane.
template <size_t N>
struct Pack {
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;

  Pack() = default;
  HWY_INLINE Pack(float value) {  // NOLINT: meant to convert
    for (size_t k = 0; k < N; ++k) v[k] = hn::Set(D(), value);
  }

  V v[N];
};

/// Applies f to each vector of `first` and the vectors with equal index in `more`.
template <class F, size_t N, class... More>
HWY_INLINE Pack<N> each(F&& f, const Pack<N>& first, const More&... more) {
  Pack<N> result;
  for (size_t k = 0; k < N; ++k) result.v[k] = f(first.v[k], more.v[k]...);
  return result;
}

template <size_t N>
HWY_INLINE Pack<N> operator+(const Pack<N>& a, const Pack<N>& b) {
  return each([](auto x, auto y) TANDEM_INLINE_LAMBDA { return hn::Add(x, y); }, a, b);
}
template <size_t N>
HWY_INLINE Pack<N> operator-(const Pack<N>& a, const Pack<N>& b) {
  return each([](auto x, auto y) TANDEM_INLINE_LAMBDA { return hn::Sub(x, y); }, a, b);
}
template <size_t N>
HWY_INLINE Pack<N> operator*(const Pack<N>& a, const Pack<N>& b) {
  return each([](auto x, auto y) TANDEM_INLINE_LAMBDA { return hn::Mul(x, y); }, a, b);
}
template <size_t N>
HWY_INLINE Pack<N> operator/(const Pack<N>& a, const Pack<N>& b) {
  return each([](auto x, auto y) TANDEM_INLINE_LAMBDA { return hn::Div(x, y); }, a, b);
}

/// a * b + c, rounded once if the target has FMA.
template <size_t N>
HWY_INLINE Pack<N> mul_add(const Pack<N>& a, const Pack<N>& b, const Pack<N>& c) {
  return each([](auto x, auto y, auto z) TANDEM_INLINE_LAMBDA { return hn::MulAdd(x, y, z); }, a, b,
              c);
}

/// a * b - c, rounded once if the target has FMA.
template <size_t N>
HWY_INLINE Pack<N> mul_sub(const Pack<N>& a, const Pack<N>& b, const Pack<N>& c) {
  return each([](auto x, auto y, auto z) TANDEM_INLINE_LAMBDA { return hn::MulSub(x, y, z); }, a, b,
              c);
}

// Two vectors of bfloat16 fit in one register of AVX-512. Converting them together takes half the
// instructions, and conversions are a third of an activation's instructions.
#if HWY_TARGET == HWY_AVX3
constexpr bool kPairsBFloat16 = true;
using BFloat16Pair = __m512i;

alignas(64) inline constexpr uint16_t kHighWords[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                        23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                        45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
// The words that move to the high halves of the first and of the second vector. The low halves are
// masked out.
alignas(64) inline constexpr uint16_t kFirstWords[32] = {0, 0,  0, 1,  0, 2,  0, 3,  0, 4, 0,
                                                         5, 0,  6, 0,  7, 0,  8, 0,  9, 0, 10,
                                                         0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
alignas(64) inline constexpr uint16_t kSecondWords[32] = {0, 16, 0, 17, 0, 18, 0, 19, 0, 20, 0, 21,
                                                          0, 22, 0, 23, 0, 24, 0, 25, 0, 26, 0, 27,
                                                          0, 28, 0, 29, 0, 30, 0, 31};

/// Bits whose high half is `v` as bfloat16, rounded to nearest even. NaN stays NaN if it is quiet,
/// as results of arithmetic are.
HWY_INLINE __m512i round_high_half(hn::Vec<hn::ScalableTag<float>> v) {
  const __m512i bits = _mm512_castps_si512(v.raw);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i below_half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  return _mm512_mask_add_epi32(bits, _mm512_cmp_ps_mask(v.raw, v.raw, _CMP_ORD_Q), bits,
                               below_half);
}

/// The high halves of two vectors.
HWY_INLINE BFloat16Pair high_halves(__m512i first, __m512i second) {
  return _mm512_permutex2var_epi16(first, _mm512_load_si512(kHighWords), second);
}

template <size_t N>
HWY_INLINE void widen_pair(BFloat16Pair pair, Pack<N>& pack, size_t k) {
  const auto to_high_halves = [&](const uint16_t* words) TANDEM_INLINE_LAMBDA {
    return _mm512_castsi512_ps(
        _mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, _mm512_load_si512(words), pair));
  };
  pack.v[k].raw = to_high_halves(kFirstWords);
  pack.v[k + 1].raw = to_high_halves(kSecondWords);
}
#else
constexpr bool kPairsBFloat16 = false;
#endif

/// Whether parts of float32 vectors use masked instructions, which are several times faster than
/// copies through memory.
template <typename E, typename Part>
inline constexpr bool kGoesMasked =
    (HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2) && E::kElement == Element::float32 &&
    !std::is_same_v<Part, Whole>;

template <size_t N, typename E>
inline constexpr bool kGoesInPairs =
    kPairsBFloat16&& N % 2 == 0 && E::kElement == Element::bfloat16;

/// The elements at `p` as float32. `part` is Whole, or a count of elements if N is 1.
template <size_t N, typename E, typename Part>
HWY_INLINE Pack<N> load_pack(E element, const typename E::Stored* p, Part part) {
  const hn::ScalableTag<float> d;
  Pack<N> result;
  if constexpr (kGoesInPairs<N, E>) {
#if HWY_TARGET == HWY_AVX3
    for (size_t k = 0; k < N; k += 2)
      widen_pair(_mm512_loadu_si512(p + k * hn::Lanes(d)), result, k);
#endif
  } else if constexpr (kGoesMasked<E, Part>) {
    result.v[0] = hn::MaskedLoad(hn::FirstN(d, part), d, p);
  } else {
    for (size_t k = 0; k < N; ++k) result.v[k] = load_part(element, d, p + k * hn::Lanes(d), part);
  }
  return result;
}

/// Prefetches what load_pack<N> would read at `p`, which may lie outside of any object.
template <size_t N, typename E>
HWY_INLINE void prefetch_pack(E, const typename E::Stored* p) {
  constexpr size_t kLine = 64, kLaneBytes = sizeof(typename E::Stored);
  const size_t bytes = N * hn::Lanes(hn::ScalableTag<float>()) * kLaneBytes;
  for (size_t b = 0; b < bytes; b += kLine) hwy::Prefetch(p + b / kLaneBytes);
}

/// Stores a pack, rounded once to the element. A NaN must be quiet, or exact in the element.
template <size_t N, typename E, typename Part>
HWY_INLINE void store_pack(E element, const Pack<N>& pack, typename E::Stored* p, Part part) {
  const hn::ScalableTag<float> d;
  if constexpr (kGoesInPairs<N, E>) {
#if HWY_TARGET == HWY_AVX3
    for (size_t k = 0; k < N; k += 2)
      _mm512_storeu_si512(p + k * hn::Lanes(d),
                          high_halves(round_high_half(pack.v[k]), round_high_half(pack.v[k + 1])));
#endif
  } else if constexpr (kGoesMasked<E, Part>) {
    hn::BlendedStore(pack.v[0], hn::FirstN(d, part), d, p);
  } else {
    for (size_t k = 0; k < N; ++k) store_part(element, d, pack.v[k], p + k * hn::Lanes(d), part);
  }
}

/// What load_pack returns after store_pack.
template <size_t N, typename E>
HWY_INLINE Pack<N> round_pack(E element, const Pack<N>& pack) {
  if constexpr (kGoesInPairs<N, E>) {
    Pack<N> result;
#if HWY_TARGET == HWY_AVX3
    const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
    for (size_t k = 0; k < N; ++k)
      result.v[k].raw = _mm512_castsi512_ps(_mm512_and_si512(round_high_half(pack.v[k]), high));
#endif
    return result;
  } else {
    return each([&](auto x)
                    TANDEM_INLINE_LAMBDA { return round_to(element, hn::ScalableTag<float>(), x); },
                pack);
  }
}

/// Calls `body.template run<N>(i, part)` for [0, count): packs of kPackVectors, then single
/// vectors, then what is left.
template <typename Body>
HWY_INLINE void for_each_pack(size_t count, const Body& body) {
  const size_t lanes = hn::Lanes(hn::ScalableTag<float>());
  size_t i = 0;
  for (; i + kPackVectors * lanes <= count; i += kPackVectors * lanes)
    body.template run<kPackVectors>(i, Whole{});
  for (; i + lanes <= count; i += lanes) body.template run<1>(i, Whole{});
  if (i < count) body.template run<1>(i, count - i);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_PACK_INL_H_
