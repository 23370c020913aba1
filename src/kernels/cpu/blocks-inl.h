// Converts tiles of a matrix to FP8 codes with a scale per block of a row, of a column, or of a
// square, for all formats of blocks. Included once per Highway target; bitwise equal on all of
// them.
//
// A tile is one block high and some whole blocks wide. It is read twice: from memory for the amaxes
// of its blocks in both directions, then from the second-level cache for the codes.

#if defined(TANDEM_KERNELS_CPU_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_BLOCKS_INL_H_
#undef TANDEM_KERNELS_CPU_BLOCKS_INL_H_
#else
#define TANDEM_KERNELS_CPU_BLOCKS_INL_H_
#endif

#include <vector>

#include "hwy/highway.h"
#include "kernels/cpu/quantize-inl.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/source_rows.h"
#include "kernels/parallel.h"

// Whether a block is a whole number of vectors that have more than one lane.
#undef TANDEM_HAS_ELEMENT_PAIRS
#if HWY_TARGET != HWY_SCALAR && HWY_MAX_BYTES <= 64
#define TANDEM_HAS_ELEMENT_PAIRS 1
#else
#define TANDEM_HAS_ELEMENT_PAIRS 0
#endif

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename E>
constexpr uint32_t infinity_bits() {
  return E::kElement == Element::float32    ? 0x7F800000u
         : E::kElement == Element::bfloat16 ? 0x7F80u
                                            : 0x7C00u;
}

/// The values of the amaxes in `bits`, which are as in TileWork::block_amax.
template <typename E, class D>
HWY_INLINE hn::Vec<D> values_of_bits(E, D d, hn::Vec<hn::RebindToUnsigned<D>> bits) {
  if constexpr (E::kElement == Element::float32) return hn::BitCast(d, bits);
  if constexpr (E::kElement == Element::bfloat16) return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  if constexpr (E::kElement == Element::float16) return float32_from_float16_bits(d, bits);
}

#if TANDEM_HAS_ELEMENT_PAIRS

/// Columns of a tile: 64 KiB of 16-bit elements, which fit in the second-level cache.
template <size_t kBlock>
inline constexpr size_t kTileCols = 32768 / kBlock;
template <size_t kBlock>
inline constexpr size_t kTileBlocks = kTileCols<kBlock> / kBlock;

/// The position and size of a tile.
template <size_t kBlock>
struct Tile {
  Tile(ConstRows x, size_t first_row, size_t first_col)
      : row(first_row),
        col(first_col),
        rows(std::min(kBlock, x.rows - first_row)),
        cols(std::min(kTileCols<kBlock>, x.cols - first_col)) {}
  size_t blocks() const { return (cols + kBlock - 1) / kBlock; }
  /// The number of columns in whole blocks.
  size_t whole() const { return cols / kBlock * kBlock; }

  size_t row, col, rows, cols;
};

/// A tile's amaxes, factors and codes: the working memory of a thread.
template <typename E, size_t kBlock>
struct TileWork {
  using Signed = std::conditional_t<E::kElement == Element::float32, int32_t, int16_t>;
  // Amaxes, as bits of the element without a sign.
  HWY_ALIGN uint32_t block_amax[kBlock][kTileBlocks<kBlock>] = {};
  HWY_ALIGN Signed column_amax[kTileCols<kBlock>] = {};
  // The factors of the numbers: per block of each row, and per column in the order of ElementPair.
  HWY_ALIGN float block_factor[kBlock][kTileBlocks<kBlock>] = {};
  HWY_ALIGN float column_factor[kTileCols<kBlock>] = {};
  // For bfloat16 and powers of two: limits_of the factors, for columns in the order of memory.
  HWY_ALIGN uint16_t block_limit[kBlock][kTileBlocks<kBlock>] = {};
  HWY_ALIGN uint16_t column_limit[kTileCols<kBlock>] = {};
  // The part of a row after its last whole block, followed by zeros.
  HWY_ALIGN typename E::Stored rest[kBlock] = {};
  HWY_ALIGN uint8_t codes[2 * kTileCols<kBlock>] = {};
};

/// The largest lane. Lanes must not be negative.
template <class D>
HWY_INLINE uint32_t greatest_lane(D, hn::Vec<D> v) {
  const hn::Repartition<int32_t, D> d32;
  const auto wide = hn::BitCast(d32, v);
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(d32, wide)));
  } else {
    const auto larger = hn::Max(hn::And(wide, hn::Set(d32, 0xFFFF)), hn::ShiftRight<16>(wide));
    return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(d32, larger)));
  }
}

/// The largest lane among those with equal index modulo 4.
template <class D>
HWY_INLINE void store_greatest_by_four(D d, hn::Vec<D> v, hn::TFromD<D>* HWY_RESTRICT to) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    store_greatest_by_four(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), to);
  }
}

/// to[k] = the largest lane of v[k], in a third of the steps of four single searches.
template <class D>
HWY_INLINE void greatest_lanes_of_four(D d, const hn::Vec<D>* v, hn::TFromD<D>* HWY_RESTRICT to) {
  const hn::Repartition<std::conditional_t<sizeof(*to) == 4, int64_t, int32_t>, D> wide;
  const auto both = [&](auto a, auto b) TANDEM_INLINE_LAMBDA {
    return hn::Max(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  const auto first = hn::BitCast(wide, both(v[0], v[1])),
             second = hn::BitCast(wide, both(v[2], v[3]));
  store_greatest_by_four(d,
                         hn::Max(hn::BitCast(d, hn::InterleaveLower(wide, first, second)),
                                 hn::BitCast(d, hn::InterleaveUpper(wide, first, second))),
                         to);
}

/// Finds the amaxes of `blocks` whole blocks in each of kRows rows that lie `distance` apart.
/// Stores those of row k in block_amax[k] and updates column_amax. Several rows at a time are
/// several streams: a single stream waits for memory at each page.
template <bool kSkipNan, size_t kBlock, size_t kRows, typename E>
HWY_NOINLINE void look_at_rows(E, const typename E::Stored* HWY_RESTRICT x, size_t distance,
                               size_t blocks, uint32_t* const* block_amax,
                               typename TileWork<E, kBlock>::Signed* HWY_RESTRICT column_amax) {
  using Signed = typename TileWork<E, kBlock>::Signed;
  const hn::ScalableTag<Signed> d;
  const auto infinity = hn::Set(d, static_cast<Signed>(infinity_bits<E>()));
  const auto magnitude_bits = hn::Set(d, std::numeric_limits<Signed>::max());
  const auto magnitude_at = [&](const typename E::Stored* p) TANDEM_INLINE_LAMBDA {
    auto magnitude = hn::Zero(d);
    if constexpr (E::kElement == Element::float32) {
      magnitude = hn::BitCast(d, hn::LoadU(hn::ScalableTag<float>(), p));
    } else {
      magnitude = hn::LoadU(d, reinterpret_cast<const Signed*>(p));
    }
    magnitude = hn::And(magnitude, magnitude_bits);
    if constexpr (kSkipNan) magnitude = hn::IfThenZeroElse(hn::Gt(magnitude, infinity), magnitude);
    return magnitude;
  };
  for (size_t b = 0; b < blocks; ++b) {
    hn::Vec<decltype(d)> of_row[kRows];
    for (size_t k = 0; k < kRows; ++k) of_row[k] = hn::Zero(d);
    for (size_t c = b * kBlock; c < (b + 1) * kBlock; c += hn::Lanes(d)) {
      auto of_column = hn::Load(d, column_amax + c);
      for (size_t k = 0; k < kRows; ++k) {
        const auto magnitude = magnitude_at(x + k * distance + c);
        of_row[k] = hn::Max(of_row[k], magnitude);
        of_column = hn::Max(of_column, magnitude);
      }
      hn::Store(of_column, d, column_amax + c);
    }
    if constexpr (kRows == 4) {
      Signed greatest[kRows];
      greatest_lanes_of_four(d, of_row, greatest);
      for (size_t k = 0; k < kRows; ++k) block_amax[k][b] = static_cast<uint32_t>(greatest[k]);
    } else {
      for (size_t k = 0; k < kRows; ++k) block_amax[k][b] = greatest_lane(d, of_row[k]);
    }
  }
}

/// Finds all amaxes of a tile.
template <bool kSkipNan, typename E, size_t kBlock>
HWY_INLINE void look_at_tile(E element, ConstRows x, const Tile<kBlock>& tile,
                             TileWork<E, kBlock>& work) {
  constexpr size_t kStreams = 4, kApart = kBlock / kStreams;
  std::fill_n(work.column_amax, tile.blocks() * kBlock, 0);
  const auto* from = E::at(x.data, tile.row * x.stride + tile.col);
  const size_t whole = tile.whole();
  if (tile.rows == kBlock) {
    for (size_t r = 0; r < kApart; ++r) {
      uint32_t* amax[kStreams];
      for (size_t k = 0; k < kStreams; ++k) amax[k] = work.block_amax[r + k * kApart];
      look_at_rows<kSkipNan, kBlock, kStreams>(element, from + r * x.stride, kApart * x.stride,
                                               whole / kBlock, amax, work.column_amax);
    }
  } else {
    for (size_t r = 0; r < tile.rows; ++r) {
      uint32_t* amax = work.block_amax[r];
      look_at_rows<kSkipNan, kBlock, 1>(element, from + r * x.stride, 0, whole / kBlock, &amax,
                                        work.column_amax);
    }
  }
  if (whole == tile.cols) return;
  for (size_t r = 0; r < tile.rows; ++r) {
    uint32_t* amax = work.block_amax[r] + whole / kBlock;
    std::memcpy(static_cast<void*>(work.rest), from + r * x.stride + whole,
                (tile.cols - whole) * sizeof(work.rest[0]));
    look_at_rows<kSkipNan, kBlock, 1>(element, work.rest, 0, 1, &amax, work.column_amax + whole);
  }
}

/// Returns whether every element is finite. If there is a NaN, recomputes the tile's amaxes without
/// it. Adds the tile's amax to `extremes`.
template <typename E, size_t kBlock>
HWY_INLINE bool take_extremes(E element, ConstRows x, const Tile<kBlock>& tile,
                              TileWork<E, kBlock>& work, Extremes& extremes) {
  const auto largest = [&] {
    uint32_t bits = 0;
    for (size_t r = 0; r < tile.rows; ++r)
      bits =
          std::max(bits, *std::max_element(work.block_amax[r], work.block_amax[r] + tile.blocks()));
    return bits;
  };
  uint32_t bits = largest();
  const bool is_finite = bits < infinity_bits<E>();
  if (bits > infinity_bits<E>()) {
    look_at_tile<true>(element, x, tile, work);
    bits = largest();
  }
  extremes.amax_bits = std::max(extremes.amax_bits, bits);
  return is_finite;
}

/// fp8_codes of a pair of any x times factors that are positive and not NaN.
template <Fp8Format kFormat, typename E>
HWY_INLINE void quantize_any_pair(E element, const ElementPair& x,
                                  hn::Vec<hn::ScalableTag<float>> first_factor,
                                  hn::Vec<hn::ScalableTag<float>> second_factor,
                                  uint8_t* HWY_RESTRICT codes) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::ScalableTag<uint16_t> d16;
  const auto largest = hn::Set(di, std::bit_cast<int32_t>(fp8_max(kFormat)));
  const auto codes_of = [&](auto magnitude, auto factor) TANDEM_INLINE_LAMBDA {
    const auto bits = hn::BitCast(di, hn::Mul(magnitude, factor));
    return magnitude_codes<kFormat>(d, hn::BitCast(d, hn::Min(bits, largest)));
  };
  const auto nans_of = [&](auto magnitude) TANDEM_INLINE_LAMBDA {
    const auto is_nan = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7F800000));
    return hn::IfThenElseZero(is_nan, hn::Set(di, 0xFF));
  };
  const auto both =
      join_pair(element, codes_of(x.first, first_factor), codes_of(x.second, second_factor));
  const auto nans = join_pair(element, nans_of(x.first), nans_of(x.second));
  const auto signed_codes =
      select_bits(hn::Set(d16, uint16_t{0x7F}), both, hn::ShiftRight<8>(x.words));
  store_bytes(select_bits(nans, hn::Set(d16, uint16_t{0x7F}), signed_codes), codes);
}

/// The factors of some columns of a row, and where their codes go. By row there is one factor per
/// block; by column one per column, in the order of ElementPair.
struct RowFactors {
  const float* by_row;
  const float* by_column;
};
struct RowCodes {
  uint8_t* by_row;
  uint8_t* by_column;
};

/// Whether elements times powers of two are converted in integers, two elements per lane of
/// float32.
template <typename E>
inline constexpr bool kInWords = E::kElement == Element::bfloat16;

/// The largest magnitude, except 0, whose product with a power of two is not a normal number of the
/// format; argument and result are bits of bfloat16.
template <Fp8Format kFormat, class D>
HWY_INLINE hn::Vec<D> limits_of(D d16, hn::Vec<D> factor) {
  constexpr auto kLargest = static_cast<uint16_t>((254 - traits_of(kFormat).bias) << 7);
  const hn::RebindToSigned<D> di;
  const auto limit = hn::Sub(hn::Set(d16, kLargest + 0x7F), factor);
  const auto is_larger = hn::Gt(hn::BitCast(di, factor), hn::BitCast(di, hn::Set(d16, kLargest)));
  return hn::IfThenElse(hn::RebindMask(d16, is_larger), hn::Set(d16, uint16_t{0x7FFF}), limit);
}

/// Stores limits_of the factors of blocks.
template <Fp8Format kFormat, class D>
HWY_INLINE void store_block_limits(D /*d*/, hn::Vec<D> factor, uint16_t* HWY_RESTRICT to) {
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(hn::RebindToUnsigned<D>(), factor);
  hn::Store(limits_of<kFormat>(d16, hn::TruncateTo(d16, hn::ShiftRight<16>(bits))), d16, to);
}

/// Stores limits_of the factors of columns, which are in the order of ElementPair of bfloat16.
template <Fp8Format kFormat, class D>
HWY_INLINE void store_column_limits(D /*d*/, hn::Vec<D> first, hn::Vec<D> second,
                                    uint16_t* HWY_RESTRICT to) {
  const hn::ScalableTag<uint16_t> d16;
  const auto even = hn::ShiftRight<16>(hn::BitCast(hn::RebindToUnsigned<D>(), first));
  const auto words = hn::OddEven(hn::BitCast(d16, second), hn::BitCast(d16, even));
  hn::Store(limits_of<kFormat>(d16, words), d16, to);
}

/// Codes of a vector of bfloat16 times powers of two: one factor by row, one for each column.
/// Returns whether they are right: they are not if a product is a subnormal number of the format.
///
/// A power of two changes only the exponent. So the rounded magnitude is one integer for all
/// factors, and each factor's exponent is subtracted from it.
template <Fp8Format kFormat, bool kByRow, bool kByColumn>
HWY_INLINE bool quantize_words(const uint16_t* HWY_RESTRICT x,
                               const uint16_t* HWY_RESTRICT row_limit,
                               const uint16_t* HWY_RESTRICT column_limits, RowCodes codes) {
  const hn::ScalableTag<uint16_t> d;
  constexpr int kDropped = 7 - traits_of(kFormat).mantissa_bits;
  constexpr uint16_t kBelowHalf = (1 << (kDropped - 1)) - 1;
  const auto words = hn::LoadU(d, x);
  const auto magnitude = hn::And(words, hn::Set(d, uint16_t{0x7FFF}));
  const auto odd = hn::And(hn::ShiftRight<kDropped>(magnitude), hn::Set(d, uint16_t{1}));
  // A limit is 0x7F above the number to subtract; a magnitude of 0 saturates at 0.
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(d, uint16_t{0x7F + kBelowHalf})), odd);
  const auto below = hn::Sub(magnitude, hn::Set(d, uint16_t{1}));  // becomes the largest if it is 0
  const auto signs = hn::ShiftRight<8>(words);
  const auto convert = [&](auto limit, uint8_t* to) TANDEM_INLINE_LAMBDA {
    const auto code = hn::ShiftRight<kDropped>(hn::SaturatedSub(rounded, limit));
    store_bytes(select_bits(hn::Set(d, uint16_t{0x7F}), code, signs), to);
    return hn::AllFalse(d, hn::Lt(below, limit));
  };
  bool are_right = true;
  if constexpr (kByRow) are_right &= convert(hn::Set(d, *row_limit), codes.by_row);
  if constexpr (kByColumn) are_right &= convert(hn::Load(d, column_limits), codes.by_column);
  return are_right;
}

/// How a row is converted. `any`: x may be NaN or infinite. Otherwise no x is, and x times its
/// factor is below the format's overflow_from; the two cases are whether all factors are powers of
/// two.
enum class Conversion : uint8_t { any, finite, by_powers_of_two };

/// Codes of whole blocks of a row, in one direction or in both.
template <Fp8Format kFormat, size_t kBlock, bool kByRow, bool kByColumn, Conversion kConversion,
          typename E>
HWY_NOINLINE void quantize_blocks(E element, const typename E::Stored* HWY_RESTRICT x,
                                  size_t blocks, RowFactors factors, RowCodes codes,
                                  const uint16_t* HWY_RESTRICT row_limits,
                                  const uint16_t* HWY_RESTRICT column_limits) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto convert = [&](const ElementPair& pair, auto first, auto second, uint8_t* to)
                           TANDEM_INLINE_LAMBDA {
                             if constexpr (kConversion == Conversion::any) {
                               quantize_any_pair<kFormat>(element, pair, first, second, to);
                             } else {
                               quantize_ordinary_pair<kFormat>(element, pair, first, second, to);
                             }
                           };
  for (size_t b = 0; b < blocks; ++b) {
    auto of_block = hn::Zero(d);
    if constexpr (kByRow) of_block = hn::Set(d, factors.by_row[b]);
    for (size_t c = b * kBlock; c < (b + 1) * kBlock; c += 2 * lanes) {
      if constexpr (kConversion == Conversion::by_powers_of_two) {
        if (quantize_words<kFormat, kByRow, kByColumn>(x + c, row_limits + b, column_limits + c,
                                                       {codes.by_row + c, codes.by_column + c}))
            [[likely]]
          continue;
      }
      const ElementPair pair = load_pair(element, x + c);
      if constexpr (kByRow) convert(pair, of_block, of_block, codes.by_row + c);
      if constexpr (kByColumn) {
        convert(pair, hn::Load(d, factors.by_column + c),
                hn::Load(d, factors.by_column + c + lanes), codes.by_column + c);
      }
    }
  }
}

/// Writes the codes of row `r` of a tile, whose first element is at `x`. `codes`: the addresses for
/// the row's first column.
template <Fp8Format kFormat, bool kByRow, bool kByColumn, typename E, size_t kBlock>
HWY_INLINE void quantize_tile_row(E element, const typename E::Stored* HWY_RESTRICT x,
                                  const Tile<kBlock>& tile, size_t r, Conversion conversion,
                                  TileWork<E, kBlock>& work, RowCodes codes) {
  using enum Conversion;
  auto run = &quantize_blocks<kFormat, kBlock, kByRow, kByColumn, any, E>;
  if (conversion == finite) run = &quantize_blocks<kFormat, kBlock, kByRow, kByColumn, finite, E>;
  if constexpr (kInWords<E>) {
    if (conversion == by_powers_of_two)
      run = &quantize_blocks<kFormat, kBlock, kByRow, kByColumn, by_powers_of_two, E>;
  }
  const size_t whole = tile.whole(), rest = tile.cols - whole;
  const float *row_factors = work.block_factor[r], *column_factors = work.column_factor;
  const uint16_t *row_limits = work.block_limit[r], *column_limits = work.column_limit;
  run(element, x, whole / kBlock, {row_factors, column_factors}, codes, row_limits, column_limits);
  if (rest == 0) return;
  std::memcpy(static_cast<void*>(work.rest), x + whole, rest * sizeof(work.rest[0]));
  uint8_t *by_row = work.codes, *by_column = work.codes + kBlock;
  run(element, work.rest, 1, {row_factors + whole / kBlock, column_factors + whole},
      {by_row, by_column}, row_limits + whole / kBlock, column_limits + whole);
  if constexpr (kByRow) std::memcpy(codes.by_row + whole, by_row, rest);
  if constexpr (kByColumn) std::memcpy(codes.by_column + whole, by_column, rest);
}

/// Replaces the amaxes of the first row's blocks by those of square blocks.
template <typename E, size_t kBlock>
HWY_INLINE void join_rows(E, const Tile<kBlock>& tile, TileWork<E, kBlock>& work) {
  for (size_t r = 1; r < tile.rows; ++r)
    for (size_t b = 0; b < tile.blocks(); ++b)
      work.block_amax[0][b] = std::max(work.block_amax[0][b], work.block_amax[r][b]);
}

/// Copies the factors of the first row's blocks to all rows.
template <typename E, size_t kBlock>
HWY_INLINE void share_factors(E, const Tile<kBlock>& tile, TileWork<E, kBlock>& work) {
  for (size_t r = 1; r < tile.rows; ++r) {
    std::copy_n(work.block_factor[0], tile.blocks(), work.block_factor[r]);
    std::copy_n(work.block_limit[0], tile.blocks(), work.block_limit[r]);
  }
}

/// Starts to bring row `r` of a tile into the cache.
template <typename E, size_t kBlock>
HWY_INLINE void fetch_row(E, ConstRows x, const Tile<kBlock>& tile, size_t r) {
  if (r >= tile.rows) return;
  constexpr size_t kLine = 64 / sizeof(typename E::Stored);
  const auto* from = E::at(x.data, (tile.row + r) * x.stride + tile.col);
  for (size_t c = 0; c < tile.cols; c += kLine) fetch_line(from + c);
}

/// Writes all outputs of a tile and adds its amax to `extremes`. Conversion leaves memory idle, so
/// `fetch(row)`, called for each row, may prefetch what comes next.
///
/// A Scaling has kFormat, kBlock, is_square, power_of_two (whether all factors are), row_codes and
/// column_codes (nullptr if not wanted). It computes scales, factors and limits from the amaxes in
/// `work`: scale_rows, scale_columns, or scale_squares for square blocks.
template <class Scaling, typename E, typename Fetch, size_t kBlock = Scaling::kBlock>
HWY_INLINE void quantize_tile(E element, ConstRows x, const Tile<kBlock>& tile, const Fetch& fetch,
                              const Scaling& scaling, TileWork<E, kBlock>& work,
                              Extremes& extremes) {
  look_at_tile<false>(element, x, tile, work);
  const bool is_finite = take_extremes(element, x, tile, work, extremes),
             by_powers = kInWords<E> && scaling.power_of_two;
  const auto conversion = !is_finite  ? Conversion::any
                          : by_powers ? Conversion::by_powers_of_two
                                      : Conversion::finite;
  if (scaling.is_square) {
    join_rows(element, tile, work);
    scaling.scale_squares(element, tile, work);
    share_factors(element, tile, work);
  } else {
    scaling.scale_rows(element, tile, work);
    scaling.scale_columns(element, tile, work);
  }
  for (size_t r = 0; r < tile.rows; ++r) {
    fetch(r);
    const auto* from = E::at(x.data, (tile.row + r) * x.stride + tile.col);
    const size_t to = (tile.row + r) * x.cols + tile.col;
    const auto convert = [&](auto by_row, auto by_column, RowCodes codes) HWY_ATTR {
      quantize_tile_row<Scaling::kFormat, by_row(), by_column()>(element, from, tile, r, conversion,
                                                                 work, codes);
    };
    constexpr std::true_type kYes;
    constexpr std::false_type kNo;
    uint8_t* const row_codes = scaling.row_codes == nullptr ? nullptr : scaling.row_codes + to;
    uint8_t* const column_codes =
        scaling.column_codes == nullptr ? nullptr : scaling.column_codes + to;
    if (row_codes != nullptr && column_codes != nullptr && !scaling.is_square) {
      convert(kYes, kYes, {row_codes, column_codes});
      continue;
    }
    if (row_codes != nullptr) convert(kYes, kNo, {row_codes, nullptr});
    if (column_codes == nullptr) continue;
    if (scaling.is_square) {
      convert(kYes, kNo, {column_codes, nullptr});
    } else {
      convert(kNo, kYes, {nullptr, column_codes});
    }
  }
}

/// Applies quantize_tile to all of x; returns the amax of x.
template <class Scaling, typename E>
HWY_INLINE float quantize_tiles(E element, ConstRows x, const Scaling& scaling) {
  constexpr size_t kBlock = Scaling::kBlock, kCols = kTileCols<kBlock>;
  const size_t bands = (x.rows + kBlock - 1) / kBlock, chunks = (x.cols + kCols - 1) / kCols;
  // Threads get several narrow tiles at a time.
  const auto grain = static_cast<int64_t>(std::max<size_t>(1, kCols / std::max<size_t>(1, x.cols)));
  SharedExtremes shared;
  parallel_for(0, static_cast<int64_t>(bands * chunks), grain,
               [&](int64_t first, int64_t last) HWY_ATTR {
                 const ScopedFloatMode mode;
                 Extremes extremes;
                 TileWork<E, kBlock> work;
                 const auto tile_at = [&](int64_t i) {
                   const auto at = static_cast<size_t>(i);
                   return Tile<kBlock>(x, at / chunks * kBlock, at % chunks * kCols);
                 };
                 for (int64_t i = first; i < last; ++i) {
                   const auto tile = tile_at(i), next = tile_at(std::min(i + 1, last - 1));
                   const auto fetch = [&](size_t r) TANDEM_INLINE_LAMBDA {
                     if (i + 1 < last) fetch_row(element, x, next, r);
                   };
                   quantize_tile(element, x, tile, fetch, scaling, work, extremes);
                 }
                 shared.add(extremes);
               });
  return value_of_bits(element, shared.get().amax_bits);
}

/// Applies quantize_tile to a band. `fetch(r, col, cols)` may prefetch what comes next.
template <class Scaling, typename E, typename Fetch>
HWY_INLINE void quantize_band(E element, ConstRows band, const Fetch& fetch, const Scaling& scaling,
                              TileWork<E, Scaling::kBlock>& work, Extremes& extremes) {
  constexpr size_t kBlock = Scaling::kBlock;
  for (size_t r = 0; r < band.rows; r += kBlock)
    for (size_t c = 0; c < band.cols; c += kTileCols<kBlock>) {
      const Tile<kBlock> tile(band, r, c);
      const auto fetch_rows = [&](size_t of_tile)
                                  TANDEM_INLINE_LAMBDA { fetch(r + of_tile, tile.col, tile.cols); };
      quantize_tile(element, band, tile, fetch_rows, scaling, work, extremes);
    }
}

/// quantize_tiles for a matrix that is being computed, in bands of whole blocks that stay in the
/// cache. `scaling.behind(rows, cols)` writes after `rows` rows of `cols` numbers.
template <class Scaling, typename E>
HWY_INLINE float quantize_tiles_made(E element, const MadeRows& made, const Scaling& scaling) {
  constexpr size_t kBlock = Scaling::kBlock, kCols = kTileCols<kBlock>;
  using Stored = typename E::Stored;
  const Rows& y = made.y;
  const size_t cols = y.cols;
  const MadeBands bands(made, kBlock * std::max<size_t>(1, kCols / std::max<size_t>(1, cols)));
  const size_t height = bands.height;
  SharedExtremes shared;
  parallel_for(0, static_cast<int64_t>(bands.count), 1, [&](int64_t first, int64_t last) HWY_ATTR {
    Extremes extremes;
    TileWork<E, kBlock> work;
    const size_t end = std::min(y.rows, static_cast<size_t>(last) * bands.together);
    for (size_t row = static_cast<size_t>(first) * bands.together; row < end; row += height) {
      const size_t count = std::min(height, end - row);
      Stored* rows = y ? E::at(y.data, row * cols)
                       : reinterpret_cast<Stored*>(scratch(ScratchUse::made, height * cols));
      made.make(row, count, rows);
      const ScopedFloatMode mode;
      const SourceRows next(made, row + count, end);
      const auto fetch = [&](size_t r, size_t col, size_t width)
                             TANDEM_INLINE_LAMBDA { next.fetch(r, col, width); };
      quantize_band(element, ConstRows{rows, E::kElement, count, cols, cols}, fetch,
                    scaling.behind(row, cols), work, extremes);
    }
    shared.add(extremes);
  });
  return value_of_bits(element, shared.get().amax_bits);
}

/// Applies quantize_tile to all that is read; returns its amax.
template <class Scaling, typename E>
HWY_INLINE float quantize_input(E element, const Input& x, const Scaling& scaling) {
  if (const auto* made = std::get_if<const MadeRows*>(&x))
    return quantize_tiles_made(element, **made, scaling);
  if (const auto* band = std::get_if<Band>(&x))
    return quantize_tiles(element, band->rows, scaling.behind(band->first, band->rows.cols));
  return quantize_tiles(element, *std::get_if<ConstRows>(&x), scaling);
}

#else  // !TANDEM_HAS_ELEMENT_PAIRS

/// Calls `body` with all of x, which is no band. If x is made and has no memory, it gets some.
template <typename Body>
void with_whole(const Input& x, const Body& body) {
  const auto* const input = std::get_if<const MadeRows*>(&x);
  if (input == nullptr) return body(whole_of(x));
  const MadeRows& made = **input;
  Rows y = made.y;
  std::vector<uint8_t> memory;
  if (!y) {
    memory.resize(y.rows * y.cols * bytes_per_element(y.element) + 1);
    y.data = memory.data();
  }
  if (y.cols != 0) made.make(0, y.rows, y.data);
  body(ConstRows(y));
}

#endif  // TANDEM_HAS_ELEMENT_PAIRS

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_BLOCKS_INL_H_
