#include "kernels/cast.h"

#include "kernels/cpu/targets.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cast.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/stochastic-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using Codes = hn::Vec<hn::RebindToUnsigned<F>>;

/// Elements whose random words are computed at once.
constexpr size_t kPiece = 1024;

/// e8m0_from_float of every lane; zero for negative lanes.
HWY_INLINE Codes e8m0_codes_of(hn::Vec<F> v) {
  const hn::RebindToSigned<F> di;
  const hn::RebindToUnsigned<F> du;
  const auto bits = hn::BitCast(di, v), magnitude = hn::And(bits, hn::Set(di, 0x7FFFFFFF));
  const auto up = hn::ShiftRight<23>(hn::BitCast(du, hn::Add(magnitude, hn::Set(di, 0x7FFFFF))));
  const auto code = hn::Min(hn::BitCast(di, up), hn::Set(di, int32_t{kE8m0Largest}));
  const auto is_zero =
      hn::Or(hn::Lt(bits, hn::Zero(di)), hn::Lt(magnitude, hn::Set(di, 0x00400001)));
  const auto is_nan = hn::Gt(magnitude, hn::Set(di, 0x7F800000));
  return hn::BitCast(du, hn::IfThenElse(is_nan, hn::Set(di, int32_t{kE8m0Nan}),
                                        hn::IfThenZeroElse(is_zero, code)));
}

/// cast_reference of every lane. Without a word it rounds to nearest.
template <Fp8Format kFormat, typename... Word>
HWY_INLINE Codes codes_of(hn::Vec<F> v, bool saturates, Word... word) {
  constexpr Fp8Traits kTraits = traits_of(kFormat);
  const F d;
  const hn::RebindToSigned<F> di;
  const hn::RebindToUnsigned<F> du;
  const auto bits = hn::BitCast(du, v);
  const auto sign = hn::And(hn::ShiftRight<32 - kTraits.bits>(bits), hn::Set(du, kTraits.sign()));
  const auto magnitude = hn::And(hn::BitCast(di, bits), hn::Set(di, 0x7FFFFFFF));
  const auto is_nan = hn::RebindMask(du, hn::Gt(magnitude, hn::Set(di, 0x7F800000)));
  auto code = hn::Zero(du);
  if constexpr (sizeof...(Word) == 0) {
    code = hn::And(fp8_codes<kFormat>(d, v), hn::Set(du, kTraits.nan_code()));
  } else {
    const float limit = saturates ? kTraits.max : 2 * kTraits.max;
    const auto bounded = hn::Min(magnitude, hn::Set(di, std::bit_cast<int32_t>(limit)));
    code = hn::And(stochastic_codes<kFormat>(d, hn::BitCast(d, bounded), word...),
                   hn::Set(du, 2 * kTraits.sign() - 1));
  }
  if (!saturates) {
    const auto largest = hn::Set(di, static_cast<int32_t>(kTraits.largest));
    auto is_above = hn::Gt(hn::BitCast(di, code), largest);
    if constexpr (sizeof...(Word) == 0) {
      // A tie goes to the even one of the largest number and the number that would follow it.
      constexpr int32_t kFrom = std::bit_cast<int32_t>(kTraits.overflow_from) - kTraits.largest % 2;
      is_above = hn::Gt(magnitude, hn::Set(di, kFrom));
    }
    code = hn::IfThenElse(hn::RebindMask(du, is_above), hn::Set(du, kTraits.above), code);
  }
  return hn::IfThenElse(is_nan, hn::Set(du, kTraits.nan_code()), hn::Or(code, sign));
}

/// codes[i] = codes_at(x[i], i), in the low byte.
template <typename E, typename CodesAt>
HWY_INLINE void write_codes(E element, const typename E::Stored* HWY_RESTRICT x, size_t count,
                            uint8_t* HWY_RESTRICT codes, CodesAt&& codes_at) {
  const F d;
  const hn::Rebind<uint8_t, F> d8;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto bytes = hn::TruncateTo(d8, codes_at(load_part(element, d, x + i, part), i));
    if constexpr (std::is_same_v<decltype(part), Whole>) {
      hn::StoreU(bytes, d8, codes + i);
    } else {
      HWY_ALIGN uint8_t buffer[HWY_MAX_BYTES];
      hn::StoreU(bytes, d8, buffer);
      std::memcpy(codes + i, buffer, part);
    }
  });
}

template <Fp8Format kFormat, typename E>
HWY_INLINE void cast_row(E element, const typename E::Stored* x, size_t count, const Cast& cast,
                         uint64_t index, uint8_t* codes) {
  const bool saturates = cast.saturates || traits_of(kFormat).above == traits_of(kFormat).sign();
  if (cast.rounding == Rounding::nearest) {
    write_codes(element, x, count, codes, [&](auto v, size_t) TANDEM_INLINE_LAMBDA {
      return codes_of<kFormat>(v, saturates);
    });
    return;
  }
  HWY_ALIGN uint32_t words[kPiece + 4 + 2 * HWY_MAX_BYTES];
  const hn::RebindToUnsigned<F> du;
  for (size_t first = 0; first < count; first += kPiece) {
    const size_t piece = std::min(kPiece, count - first), skipped = (index + first) % 4;
    fill_words(cast.seed, (index + first) / 4, skipped + piece, words, {cast.offset, 0});
    write_codes(element, x + first, piece, codes + first,
                [&](auto v, size_t i) TANDEM_INLINE_LAMBDA {
                  return codes_of<kFormat>(v, saturates, hn::LoadU(du, words + skipped + i));
                });
  }
}

void cast_rows(ConstRows x, const Cast& cast, uint8_t* codes) {
  for_each_row(x, [&](auto element, const auto* row, size_t r) HWY_ATTR {
    const size_t at = r * x.cols;
    switch (cast.format) {
      case CastFormat::e4m3:
        return cast_row<Fp8Format::e4m3>(element, row, x.cols, cast, at, codes + at);
      case CastFormat::e5m2:
        return cast_row<Fp8Format::e5m2>(element, row, x.cols, cast, at, codes + at);
      case CastFormat::e2m1:
        return cast_row<Fp8Format::e2m1>(element, row, x.cols, cast, at, codes + at);
      case CastFormat::e8m0:
        write_codes(element, row, x.cols, codes + at,
                    [](auto v, size_t) TANDEM_INLINE_LAMBDA { return e8m0_codes_of(v); });
    }
  });
}

void values_of_rows(const uint8_t* codes, CastFormat format, Rows y) {
  float table[256];
  for (size_t code = 0; code < 256; ++code)
    table[code] = float_from_code(static_cast<uint8_t>(code), format);
  for_each_row(y, [&](auto element, auto* row, size_t r) HWY_ATTR {
    const F d;
    write_row(element, y.cols, row, [&](size_t i, auto part) HWY_ATTR {
      HWY_ALIGN float values[HWY_MAX_BYTES / sizeof(float)] = {};
      size_t count = hn::Lanes(d);
      if constexpr (!std::is_same_v<decltype(part), Whole>) count = part;
      for (size_t k = 0; k < count; ++k) values[k] = table[codes[r * y.cols + i + k]];
      return hn::Load(d, values);
    });
  });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(cast_rows);
HWY_EXPORT(values_of_rows);

void cast_to_codes(ConstRows x, const Cast& cast, uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(cast_rows)(x, cast, codes);
}

void cast_from_codes(const uint8_t* codes, CastFormat format, Rows y) {
  HWY_DYNAMIC_DISPATCH(values_of_rows)(codes, format, y);
}

}  // namespace tandem::kernels::cpu
#endif
