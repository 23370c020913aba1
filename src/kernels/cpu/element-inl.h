// Vectors of float32 loaded from and stored to memory of any Element. Included once per Highway
// target.
//
//   const hn::ScalableTag<float> d;
//   with_element(x.element, [&](auto element) HWY_ATTR {
//     using E = decltype(element);
//     const auto* row = E::at(x.data, r * x.stride);
//     store(E{}, d, hn::Mul(load(E{}, d, row), factor), out);
//   });

#if defined(TANDEM_KERNELS_CPU_ELEMENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_ELEMENT_INL_H_
#undef TANDEM_KERNELS_CPU_ELEMENT_INL_H_
#else
#define TANDEM_KERNELS_CPU_ELEMENT_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/targets.h"
#include "kernels/views.h"

// Goes between the parameters and the body of a lambda in a vector loop.
#ifndef TANDEM_INLINE_LAMBDA
#define TANDEM_INLINE_LAMBDA HWY_ATTR __attribute__((always_inline))
#endif

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The memory of one Element: `Stored` is its C++ type, `at` the typed address of the element
/// `offset` after `data`.
template <typename S, Element kTag>
struct ElementTag {
  using Stored = S;
  static constexpr Element kElement = kTag;
  static const S* at(const void* data, size_t offset) {
    return static_cast<const S*>(data) + offset;
  }
  static S* at(void* data, size_t offset) { return static_cast<S*>(data) + offset; }
};
using Float32 = ElementTag<float, Element::float32>;
using BFloat16 = ElementTag<uint16_t, Element::bfloat16>;
using Float16 = ElementTag<hwy::float16_t, Element::float16>;

/// Calls `body(Float32{})`, `body(BFloat16{})` or `body(Float16{})`. A lambda needs HWY_ATTR before
/// its body.
template <typename Body>
HWY_INLINE decltype(auto) with_element(Element element, Body&& body) {
  switch (element) {
    case Element::bfloat16:
      return body(BFloat16{});
    case Element::float16:
      return body(Float16{});
    default:
      return body(Float32{});
  }
}

/// Whether the target has no conversion instructions for float16. Highway 1.0.3 truncates there, so
/// the conversions below round themselves.
constexpr bool kSoftFloat16 = HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128 ||
                              HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3;

/// The float32 value of float16 bits (in the low half of each lane).
template <class D>
HWY_INLINE hn::Vec<D> float32_from_float16_bits(D d, hn::Vec<hn::RebindToUnsigned<D>> bits) {
  const hn::RebindToUnsigned<D> du;
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFu));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
  // Exponents of 31 become 255. Others are rebased from 15 to 127, subnormals by an exact float
  // subtraction.
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto normal = hn::Add(shifted, hn::Set(du, 112u << 23));
  const auto nonfinite = hn::Add(shifted, hn::Set(du, 224u << 23));
  const auto one_below = hn::Set(d, 6.103515625e-05f);
  const auto subnormal = hn::BitCast(
      du, hn::Sub(hn::BitCast(d, hn::Add(shifted, hn::Set(du, 113u << 23))), one_below));
  const hn::RebindToSigned<D> di;
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(di, 0x0400)));
  const auto is_nonfinite = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x7BFF)));
  const auto value =
      hn::IfThenElse(is_nonfinite, nonfinite, hn::IfThenElse(is_subnormal, subnormal, normal));
  return hn::BitCast(d, hn::Or(value, sign));
}

/// The bits (in the low half of each lane) of `v` rounded to float16, nearest even; NaN becomes a
/// quiet NaN.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> float16_bits_from_float32(D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(du, v);
  const auto sign = hn::And(bits, hn::Set(du, 0x80000000u));
  const auto magnitude = hn::Xor(bits, sign);
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  // Normal results: rebase the exponent, and add one less than half a unit, plus one if the kept
  // part is odd.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto normal =
      hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, hn::Set(du, 0xC8000FFFu)), odd));
  // Subnormal results: adding 0.5 aligns the last bit of float16 with the last bit of the float32
  // sum, which rounds.
  const auto half = hn::Set(d, 0.5f);
  const auto subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du, half));
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(di, 113 << 23)));
  const auto is_overflow = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x477FEFFF)));
  const auto is_nan = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x7F800000)));
  auto result = hn::IfThenElse(is_subnormal, subnormal, normal);
  result = hn::IfThenElse(is_overflow, hn::Set(du, 0x7C00u), result);
  result = hn::IfThenElse(is_nan, hn::Set(du, 0x7E00u), result);
  return hn::Or(result, hn::ShiftRight<16>(sign));
}

/// `v` rounded to bfloat16, nearest even, as float32 bits whose low half is zero; NaN becomes a
/// quiet NaN with its sign.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> bfloat16_bits_from_float32(D /*d*/, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, v);
  // One less than half of the dropped part, or half if the last kept bit is set.
  const auto odd = hn::TestBit(bits, hn::Set(du, 0x10000u));
  const auto rounded =
      hn::Add(bits, hn::IfThenElse(odd, hn::Set(du, 0x8000u), hn::Set(du, 0x7FFFu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

// AVX512-BF16 rounds as this code does, by one instruction instead of six, except for denormal
// numbers, which it takes for 0. Highway 1.0.3 has no target for it, so it is used if the processor
// has it. It is written in assembler, because the compiler's intrinsic would require all code
// around it to be compiled for such processors alone.
#undef TANDEM_MAY_ROUND_BFLOAT16
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define TANDEM_MAY_ROUND_BFLOAT16 1

/// Whether the processor rounds all lanes correctly.
HWY_INLINE bool rounds_bfloat16(hn::Vec<hn::ScalableTag<float>> v) {
  constexpr int kDenormal = 0x20;
  return has_bfloat16_instructions && _mm512_fpclass_ps_mask(v.raw, kDenormal) == 0;
}

HWY_INLINE hn::Vec<hn::Rebind<uint16_t, hn::ScalableTag<float>>> rounded_bfloat16(
    hn::Vec<hn::ScalableTag<float>> v) {
  hn::Vec<hn::Rebind<uint16_t, hn::ScalableTag<float>>> words;
  asm("vcvtneps2bf16 %1, %0" : "=v"(words.raw) : "v"(v.raw));
  return words;
}

/// The rounded lanes of `low`, then those of `high`.
HWY_INLINE hn::Vec<hn::ScalableTag<uint16_t>> rounded_bfloat16(
    hn::Vec<hn::ScalableTag<float>> low, hn::Vec<hn::ScalableTag<float>> high) {
  hn::Vec<hn::ScalableTag<uint16_t>> words;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(words.raw) : "v"(low.raw), "v"(high.raw));
  return words;
}

#else
#define TANDEM_MAY_ROUND_BFLOAT16 0
#endif

/// Loads Lanes(d) elements from `p`, which needs no alignment, as float32.
template <class D>
HWY_INLINE hn::Vec<D> load(Float32, D d, const float* HWY_RESTRICT p) {
  return hn::LoadU(d, p);
}

template <class D>
HWY_INLINE hn::Vec<D> load(BFloat16, D d, const uint16_t* HWY_RESTRICT p) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> du;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, p))));
}

template <class D>
HWY_INLINE hn::Vec<D> load(Float16, D d, const hwy::float16_t* HWY_RESTRICT p) {
  if constexpr (kSoftFloat16) {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> du;
    return float32_from_float16_bits(
        d, hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p))));
  } else {
    const hn::Rebind<hwy::float16_t, D> d16;
    return hn::PromoteTo(d, hn::LoadU(d16, p));
  }
}

/// Stores `v` to `p`, rounded once to the element, nearest even; NaN stays NaN, overflow becomes
/// infinity.
template <class D>
HWY_INLINE void store(Float32, D d, hn::Vec<D> v, float* HWY_RESTRICT p) {
  hn::StoreU(v, d, p);
}

template <class D>
HWY_INLINE void store(BFloat16, D d, hn::Vec<D> v, uint16_t* HWY_RESTRICT p) {
  const hn::Rebind<uint16_t, D> d16;
#if TANDEM_MAY_ROUND_BFLOAT16
  if constexpr (hn::MaxLanes(D()) == 16) {
    if (rounds_bfloat16(v)) [[likely]] {
      hn::StoreU(rounded_bfloat16(v), d16, p);
      return;
    }
  }
#endif
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(bfloat16_bits_from_float32(d, v))), d16, p);
}

template <class D>
HWY_INLINE void store(Float16, D d, hn::Vec<D> v, hwy::float16_t* HWY_RESTRICT p) {
  if constexpr (kSoftFloat16) {
    const hn::Rebind<uint16_t, D> d16;
    hn::StoreU(hn::TruncateTo(d16, float16_bits_from_float32(d, v)), d16,
               reinterpret_cast<uint16_t*>(p));
  } else {
    const hn::Rebind<hwy::float16_t, D> d16;
    hn::StoreU(hn::DemoteTo(d16, v), d16, p);
  }
}

/// store(first, p) and store(second, p + Lanes(d)); for bfloat16 with fewer instructions.
template <typename E, class D>
HWY_INLINE void store_pair(E element, D d, hn::Vec<D> first, hn::Vec<D> second,
                           typename E::Stored* HWY_RESTRICT p) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (E::kElement == Element::bfloat16) {
    const hn::Repartition<uint16_t, D> d16;
#if TANDEM_MAY_ROUND_BFLOAT16
    if (rounds_bfloat16(first) && rounds_bfloat16(second)) [[likely]] {
      hn::StoreU(rounded_bfloat16(first, second), d16, p);
      return;
    }
#endif
    const auto low = hn::BitCast(d16, bfloat16_bits_from_float32(d, first));
    const auto high = hn::BitCast(d16, bfloat16_bits_from_float32(d, second));
    hn::StoreU(hn::ConcatOdd(d16, high, low), d16, p);
    return;
  }
#endif
  store(element, d, first, p);
  store(element, d, second, p + hn::Lanes(d));
}

/// The value that `load` gives after `store(element, ...)`: `v` rounded to the element.
template <class D>
HWY_INLINE hn::Vec<D> round_to(Float32, D /*d*/, hn::Vec<D> v) {
  return v;
}

template <class D>
HWY_INLINE hn::Vec<D> round_to(BFloat16, D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
#if TANDEM_MAY_ROUND_BFLOAT16
  if constexpr (hn::MaxLanes(D()) == 16) {
    if (rounds_bfloat16(v)) [[likely]]
      return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, rounded_bfloat16(v))));
  }
#endif
  return hn::BitCast(d, hn::And(bfloat16_bits_from_float32(d, v), hn::Set(du, 0xFFFF0000u)));
}

template <class D>
HWY_INLINE hn::Vec<D> round_to(Float16, D d, hn::Vec<D> v) {
  if constexpr (kSoftFloat16) {
    return float32_from_float16_bits(d, float16_bits_from_float32(d, v));
  } else {
    const hn::Rebind<hwy::float16_t, D> d16;
    return hn::PromoteTo(d, hn::DemoteTo(d16, v));
  }
}

/// The first `count` <= Lanes(d) elements from `p`, followed by zeros. Reads nothing beyond them.
template <typename E, class D>
HWY_INLINE hn::Vec<D> load_first(E element, D d, const typename E::Stored* HWY_RESTRICT p,
                                 size_t count) {
  HWY_ALIGN typename E::Stored buffer[HWY_MAX_BYTES / sizeof(float)] = {};
  std::memcpy(static_cast<void*>(buffer), p, count * sizeof(buffer[0]));
  return load(element, d, buffer);
}

/// Stores the first `count` <= Lanes(d) lanes to `p`, rounded as by `store`. Writes nothing beyond
/// them.
template <typename E, class D>
HWY_INLINE void store_first(E element, D d, hn::Vec<D> v, typename E::Stored* HWY_RESTRICT p,
                            size_t count) {
  HWY_ALIGN typename E::Stored buffer[HWY_MAX_BYTES / sizeof(float)];
  store(element, d, v, buffer);
  std::memcpy(static_cast<void*>(p), buffer, count * sizeof(buffer[0]));
}

/// A whole vector, in place of the count of elements of a part.
struct Whole {};

template <typename E, class D>
HWY_INLINE hn::Vec<D> load_part(E element, D d, const typename E::Stored* HWY_RESTRICT p, Whole) {
  return load(element, d, p);
}

template <typename E, class D>
HWY_INLINE hn::Vec<D> load_part(E element, D d, const typename E::Stored* HWY_RESTRICT p,
                                size_t count) {
  return load_first(element, d, p, count);
}

template <typename E, class D>
HWY_INLINE void store_part(E element, D d, hn::Vec<D> v, typename E::Stored* HWY_RESTRICT p,
                           Whole) {
  store(element, d, v, p);
}

template <typename E, class D>
HWY_INLINE void store_part(E element, D d, hn::Vec<D> v, typename E::Stored* HWY_RESTRICT p,
                           size_t count) {
  store_first(element, d, v, p, count);
}

/// Calls `body(i, Whole{})` for each whole vector of float32 in [0, count), then `body(i, rest)` if
/// elements are left.
template <typename Body>
HWY_INLINE void for_each_vector(size_t count, Body&& body) {
  const size_t lanes = hn::Lanes(hn::ScalableTag<float>());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) body(i, Whole{});
  if (i < count) body(i, count - i);
}

/// Stores what `value(i, part)` returns to to[i], `part` as in for_each_vector.
template <typename E, typename Value>
HWY_INLINE void write_row(E element, size_t count, typename E::Stored* HWY_RESTRICT to,
                          Value&& value) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const auto first = value(i, Whole{});
    store_pair(element, d, first, value(i + lanes, Whole{}), to + i);
  }
  for (; i + lanes <= count; i += lanes) store(element, d, value(i, Whole{}), to + i);
  if (i < count) store_first(element, d, value(i, count - i), to + i, count - i);
}

/// to[i] = from[i] as float32.
template <typename E>
HWY_INLINE void widen(E element, const typename E::Stored* HWY_RESTRICT from, size_t count,
                      float* HWY_RESTRICT to) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    store_part(Float32{}, d, load_part(element, d, from + i, part), to + i, part);
  });
}

/// to[i] = from[i] rounded to the element.
template <typename E>
HWY_INLINE void narrow(E element, const float* HWY_RESTRICT from, size_t count,
                       typename E::Stored* HWY_RESTRICT to) {
  const hn::ScalableTag<float> d;
  write_row(element, count, to, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    return load_part(Float32{}, d, from + i, part);
  });
}

/// `vector` as float32: its own memory if it is float32, else converted into `scratch`, which must
/// have room for vector.size floats.
HWY_INLINE const float* as_float32(ConstVector vector, float* scratch) {
  if (vector.element == Element::float32 || !vector) return static_cast<const float*>(vector.data);
  with_element(vector.element, [&](auto element) HWY_ATTR {
    widen(element, decltype(element)::at(vector.data, 0), vector.size, scratch);
  });
  return scratch;
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_ELEMENT_INL_H_
