// Tiles of a matrix to MXFP8, and rows of codes back. Included once per Highway target; bitwise
// equal on all of them.
//
// A tile is 32 rows by some whole blocks of columns. It is read twice: from memory for the amaxes
// of its blocks in both directions, then from the second-level cache for the codes.

#if defined(TANDEM_KERNELS_CPU_MXFP8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_MXFP8_INL_H_
#undef TANDEM_KERNELS_CPU_MXFP8_INL_H_
#else
#define TANDEM_KERNELS_CPU_MXFP8_INL_H_
#endif

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/quantize-inl.h"
#include "kernels/mxfp8.h"

// Whether a block is a whole number of vectors of more than one lane.
#undef TANDEM_HAS_ELEMENT_PAIRS
#if HWY_TARGET != HWY_SCALAR && HWY_MAX_BYTES <= 64
#define TANDEM_HAS_ELEMENT_PAIRS 1
#else
#define TANDEM_HAS_ELEMENT_PAIRS 0
#endif

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// 2^(code - 127) of the E8M0 code in every lane; NaN for 0xFF.
template <class D>
HWY_INLINE hn::Vec<D> e8m0_values(D d, hn::Vec<hn::RebindToUnsigned<D>> code) {
  const hn::RebindToUnsigned<D> du;
  const auto nan = hn::IfThenElse(hn::Eq(code, hn::Set(du, uint32_t{kE8m0Nan})),
                                  hn::Set(du, 0x7FC00000u), hn::ShiftLeft<23>(code));
  const auto is_least = hn::Eq(code, hn::Zero(du));
  return hn::BitCast(d, hn::IfThenElse(is_least, hn::Set(du, 0x00400000u), nan));
}

/// y[c] = float_from_fp8(codes[c]) * 2^(dequant_scale[c] - 127).
template <Fp8Format kFormat, typename E>
HWY_INLINE void dequantize_columns(E element, const uint8_t* HWY_RESTRICT codes, size_t count,
                                   const uint8_t* HWY_RESTRICT dequant_scale,
                                   typename E::Stored* HWY_RESTRICT y) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto value = [&](const uint8_t* code, const uint8_t* scale) TANDEM_INLINE_LAMBDA {
    return hn::Mul(fp8_values<kFormat>(d, hn::PromoteTo(du, hn::LoadU(d8, code))),
                   e8m0_values(d, hn::PromoteTo(du, hn::LoadU(d8, scale))));
  };
  const size_t lanes = hn::Lanes(d);
  size_t c = 0;
  for (; c + lanes <= count; c += lanes)
    store(element, d, value(codes + c, dequant_scale + c), y + c);
  if (c < count) {
    HWY_ALIGN uint8_t code[HWY_MAX_BYTES] = {}, scale[HWY_MAX_BYTES] = {};
    std::memcpy(code, codes + c, count - c);
    std::memcpy(scale, dequant_scale + c, count - c);
    store_first(element, d, value(code, scale), y + c, count - c);
  }
}

#if TANDEM_HAS_ELEMENT_PAIRS

/// Columns of a tile: 64 KiB of 16-bit elements, which the second-level cache keeps.
constexpr size_t kTileCols = 1024;
constexpr size_t kTileBlocks = kTileCols / kMxBlock;

/// Where a tile lies.
struct Tile {
  Tile(ConstRows x, size_t first_row, size_t first_col)
      : row(first_row),
        col(first_col),
        rows(std::min(kMxBlock, x.rows - first_row)),
        cols(std::min(kTileCols, x.cols - first_col)) {}
  size_t blocks() const { return (cols + kMxBlock - 1) / kMxBlock; }
  /// Columns of whole blocks.
  size_t whole() const { return cols / kMxBlock * kMxBlock; }

  size_t row, col, rows, cols;
};

/// What a tile's scales are made from, and they: the working memory of a thread.
template <typename E>
struct TileWork {
  using Signed = std::conditional_t<E::kElement == Element::float32, int32_t, int16_t>;
  // Amaxes, as bits of the element without a sign.
  HWY_ALIGN uint32_t block_amax[kMxBlock][kTileBlocks] = {};
  HWY_ALIGN Signed column_amax[kTileCols] = {};
  // 2^(127 - dequant_scale): of each row's blocks, and of the columns in the order of ElementPair.
  HWY_ALIGN float block_factor[kMxBlock][kTileBlocks] = {};
  HWY_ALIGN float column_factor[kTileCols] = {};
  // The part of a row behind the last whole block, zeros behind it.
  HWY_ALIGN typename E::Stored rest[kMxBlock] = {};
  HWY_ALIGN uint8_t codes[kTileCols] = {};
};

template <typename E>
constexpr uint32_t infinity_bits() {
  return E::kElement == Element::float32    ? 0x7F800000u
         : E::kElement == Element::bfloat16 ? 0x7F80u
                                            : 0x7C00u;
}

/// The greatest lane; lanes are not negative.
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

/// The greatest lane at each place modulo 4.
template <class D>
HWY_INLINE void store_greatest_by_four(D d, hn::Vec<D> v, hn::TFromD<D>* HWY_RESTRICT to) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    store_greatest_by_four(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), to);
  }
}

/// to[k] = the greatest lane of v[k], with a third of the steps of four single searches.
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

/// The amaxes of `blocks` whole blocks in each of kRows rows that lie `distance` apart;
/// block_amax[k] is where those of the k-th go, and column_amax grows by them. Several rows at a
/// time are several streams: one alone waits for memory at each page.
template <bool kSkipNan, size_t kRows, typename E>
HWY_NOINLINE void look_at_rows(E, const typename E::Stored* HWY_RESTRICT x, size_t distance,
                               size_t blocks, uint32_t* const* block_amax,
                               typename TileWork<E>::Signed* HWY_RESTRICT column_amax) {
  using Signed = typename TileWork<E>::Signed;
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
    for (size_t c = b * kMxBlock; c < (b + 1) * kMxBlock; c += hn::Lanes(d)) {
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

/// All amaxes of a tile.
template <bool kSkipNan, typename E>
HWY_INLINE void look_at_tile(E element, ConstRows x, const Tile& tile, TileWork<E>& work) {
  constexpr size_t kStreams = 4, kApart = kMxBlock / kStreams;
  std::fill_n(work.column_amax, tile.blocks() * kMxBlock, 0);
  const auto* from = E::at(x.data, tile.row * x.stride + tile.col);
  const size_t whole = tile.whole();
  if (tile.rows == kMxBlock) {
    for (size_t r = 0; r < kApart; ++r) {
      uint32_t* amax[kStreams];
      for (size_t k = 0; k < kStreams; ++k) amax[k] = work.block_amax[r + k * kApart];
      look_at_rows<kSkipNan, kStreams>(element, from + r * x.stride, kApart * x.stride,
                                       whole / kMxBlock, amax, work.column_amax);
    }
  } else {
    for (size_t r = 0; r < tile.rows; ++r) {
      uint32_t* amax = work.block_amax[r];
      look_at_rows<kSkipNan, 1>(element, from + r * x.stride, 0, whole / kMxBlock, &amax,
                                work.column_amax);
    }
  }
  if (whole == tile.cols) return;
  for (size_t r = 0; r < tile.rows; ++r) {
    uint32_t* amax = work.block_amax[r] + whole / kMxBlock;
    std::memcpy(static_cast<void*>(work.rest), from + r * x.stride + whole,
                (tile.cols - whole) * sizeof(work.rest[0]));
    look_at_rows<kSkipNan, 1>(element, work.rest, 0, 1, &amax, work.column_amax + whole);
  }
}

/// The E8M0 codes of the scales for these amaxes, none of them NaN: e8m0_from_float(amax * (1 /
/// format max)).
template <Fp8Format kFormat, class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> e8m0_codes(D d, hn::Vec<D> amax) {
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(di, hn::Mul(amax, hn::Set(d, 1.0f / fp8_max(kFormat))));
  const auto up = hn::ShiftRight<23>(hn::Add(bits, hn::Set(di, 0x7FFFFF)));
  const auto code = hn::Min(up, hn::Set(di, int32_t{kE8m0Largest}));
  return hn::BitCast(du, hn::IfThenZeroElse(hn::Lt(bits, hn::Set(di, 0x00400001)), code));
}

/// 2^(127 - code), the codes not 0xFF.
template <class D>
HWY_INLINE hn::Vec<D> reciprocals_of_e8m0(D d, hn::Vec<hn::RebindToUnsigned<D>> code) {
  return e8m0_values(d, hn::Sub(hn::Set(hn::RebindToUnsigned<D>(), uint32_t{kE8m0Largest}), code));
}

/// The value of every amax in `bits`, as in TileWork::block_amax.
template <typename E, class D>
HWY_INLINE hn::Vec<D> values_of_bits(E, D d, hn::Vec<hn::RebindToUnsigned<D>> bits) {
  if constexpr (E::kElement == Element::float32) return hn::BitCast(d, bits);
  if constexpr (E::kElement == Element::bfloat16) return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  if constexpr (E::kElement == Element::float16) return float32_from_float16_bits(d, bits);
}

/// The scales and factors of `blocks` blocks of one row.
template <Fp8Format kFormat, typename E>
HWY_INLINE void scale_blocks(E element, const uint32_t* HWY_RESTRICT amax, size_t blocks,
                             float* HWY_RESTRICT factor, uint8_t* HWY_RESTRICT dequant_scale) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  HWY_ALIGN uint8_t scales[kTileBlocks];
  for (size_t b = 0; b < blocks; b += hn::Lanes(d)) {
    const auto code = e8m0_codes<kFormat>(d, values_of_bits(element, d, hn::Load(du, amax + b)));
    hn::Store(reciprocals_of_e8m0(d, code), d, factor + b);
    hn::Store(hn::TruncateTo(d8, code), d8, scales + b);
  }
  if (dequant_scale != nullptr) std::memcpy(dequant_scale, scales, blocks);
}

/// The scales of the columns of a tile, and their factors in the order of ElementPair.
template <Fp8Format kFormat, typename E>
HWY_INLINE void scale_columns(E element, size_t cols, TileWork<E>& work, uint8_t* dequant_scale) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto* amax = reinterpret_cast<const typename E::Stored*>(work.column_amax);
  for (size_t c = 0; c < cols; c += 2 * lanes) {
    const ElementPair pair = load_pair(element, amax + c);
    const auto first = e8m0_codes<kFormat>(d, pair.first),
               second = e8m0_codes<kFormat>(d, pair.second);
    hn::Store(reciprocals_of_e8m0(d, first), d, work.column_factor + c);
    hn::Store(reciprocals_of_e8m0(d, second), d, work.column_factor + c + lanes);
    store_bytes(join_pair(element, first, second), work.codes + c);
  }
  if (dequant_scale != nullptr) std::memcpy(dequant_scale, work.codes, cols);
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

/// What some columns of a row are multiplied by, and where their codes go: by row, one factor per
/// block; by column, one per column, in the order of ElementPair.
struct RowFactors {
  const float* by_row;
  const float* by_column;
};
struct RowCodes {
  uint8_t* by_row;
  uint8_t* by_column;
};

/// Codes of whole blocks of a row, in one direction or both. `kIsFinite` says that no x is NaN or
/// infinite: then x times its factor is below the format's overflow_from.
template <Fp8Format kFormat, bool kByRow, bool kByColumn, bool kIsFinite, typename E>
HWY_NOINLINE void quantize_blocks(E element, const typename E::Stored* HWY_RESTRICT x,
                                  size_t blocks, RowFactors factors, RowCodes codes) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto convert = [&](const ElementPair& pair, auto first, auto second, uint8_t* to)
                           TANDEM_INLINE_LAMBDA {
                             if constexpr (kIsFinite) {
                               quantize_ordinary_pair<kFormat>(element, pair, first, second, to);
                             } else {
                               quantize_any_pair<kFormat>(element, pair, first, second, to);
                             }
                           };
  for (size_t b = 0; b < blocks; ++b) {
    auto of_block = hn::Zero(d);
    if constexpr (kByRow) of_block = hn::Set(d, factors.by_row[b]);
    for (size_t c = b * kMxBlock; c < (b + 1) * kMxBlock; c += 2 * lanes) {
      const ElementPair pair = load_pair(element, x + c);
      if constexpr (kByRow) convert(pair, of_block, of_block, codes.by_row + c);
      if constexpr (kByColumn) {
        convert(pair, hn::Load(d, factors.by_column + c),
                hn::Load(d, factors.by_column + c + lanes), codes.by_column + c);
      }
    }
  }
}

/// The codes of a row of a tile, to where those of its first column go.
template <Fp8Format kFormat, bool kByRow, bool kByColumn, typename E>
HWY_INLINE void quantize_tile_row(E element, const typename E::Stored* HWY_RESTRICT x,
                                  const Tile& tile, bool is_finite, RowFactors factors,
                                  TileWork<E>& work, RowCodes codes) {
  const auto run = is_finite ? &quantize_blocks<kFormat, kByRow, kByColumn, true, E>
                             : &quantize_blocks<kFormat, kByRow, kByColumn, false, E>;
  const size_t whole = tile.whole(), rest = tile.cols - whole;
  run(element, x, whole / kMxBlock, factors, codes);
  if (rest == 0) return;
  std::memcpy(static_cast<void*>(work.rest), x + whole, rest * sizeof(work.rest[0]));
  uint8_t *by_row = work.codes, *by_column = work.codes + kMxBlock;
  run(element, work.rest, 1, {factors.by_row + whole / kMxBlock, factors.by_column + whole},
      {by_row, by_column});
  if constexpr (kByRow) std::memcpy(codes.by_row + whole, by_row, rest);
  if constexpr (kByColumn) std::memcpy(codes.by_column + whole, by_column, rest);
}

/// The scales of a tile of square blocks: the amax of a block is that of all its rows.
template <Fp8Format kFormat, typename E>
HWY_INLINE void scale_squares(E element, const Tile& tile, TileWork<E>& work, uint8_t* scales) {
  for (size_t b = 0; b < tile.blocks(); ++b) {
    for (size_t r = 1; r < tile.rows; ++r)
      work.block_amax[0][b] = std::max(work.block_amax[0][b], work.block_amax[r][b]);
  }
  scale_blocks<kFormat>(element, work.block_amax[0], tile.blocks(), work.block_factor[0], scales);
  for (size_t r = 1; r < tile.rows; ++r)
    std::copy_n(work.block_factor[0], tile.blocks(), work.block_factor[r]);
}

/// Whether every element is finite; adds the tile's amaxes to `extremes`, and takes NaN out of
/// them.
template <typename E>
HWY_INLINE bool take_extremes(E element, ConstRows x, const Tile& tile, TileWork<E>& work,
                              Extremes& extremes) {
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

/// Starts to bring row `r` of a tile into the cache.
template <typename E>
HWY_INLINE void fetch_row(E, ConstRows x, const Tile& tile, size_t r) {
  if (r >= tile.rows) return;
  constexpr size_t kLine = 64 / sizeof(typename E::Stored);
  const auto* from = E::at(x.data, (tile.row + r) * x.stride + tile.col);
  for (size_t c = 0; c < tile.cols; c += kLine) hwy::Prefetch(from + c);
}

/// All of a tile's outputs; `extremes` grows by its amax. Converting leaves memory idle: meanwhile
/// `next`, if there is one, is fetched.
template <Fp8Format kFormat, typename E>
HWY_INLINE void quantize_tile(E element, ConstRows x, const Tile& tile, const Tile* next,
                              bool square_blocks, Mxfp8Output row, Mxfp8Output column,
                              TileWork<E>& work, Extremes& extremes) {
  look_at_tile<false>(element, x, tile, work);
  const bool is_finite = take_extremes(element, x, tile, work, extremes);
  const size_t row_stride = mx_scale_shape(MxDirection::row, x.rows, x.cols).cols,
               column_stride = mx_scale_shape(MxDirection::column, x.rows, x.cols).cols;
  const auto row_scales = [&](size_t r) {
    return row.dequant_scale == nullptr
               ? nullptr
               : row.dequant_scale + (tile.row + r) * row_stride + tile.col / kMxBlock;
  };
  uint8_t* const column_scales =
      column.dequant_scale == nullptr
          ? nullptr
          : column.dequant_scale + tile.row / kMxBlock * column_stride + tile.col;
  if (square_blocks) {
    HWY_ALIGN uint8_t scales[kTileBlocks];
    scale_squares<kFormat>(element, tile, work, scales);
    for (size_t r = 0; r < tile.rows && row.dequant_scale != nullptr; ++r)
      std::memcpy(row_scales(r), scales, tile.blocks());
    for (size_t c = 0; c < tile.cols && column_scales != nullptr; ++c)
      column_scales[c] = scales[c / kMxBlock];
  } else {
    for (size_t r = 0; r < tile.rows && row; ++r)
      scale_blocks<kFormat>(element, work.block_amax[r], tile.blocks(), work.block_factor[r],
                            row_scales(r));
    if (column) scale_columns<kFormat>(element, tile.cols, work, column_scales);
  }
  for (size_t r = 0; r < tile.rows; ++r) {
    if (next != nullptr) fetch_row(element, x, *next, r);
    const auto* from = E::at(x.data, (tile.row + r) * x.stride + tile.col);
    const size_t to = (tile.row + r) * x.cols + tile.col;
    const auto convert = [&](auto by_row, auto by_column, RowCodes codes) HWY_ATTR {
      quantize_tile_row<kFormat, by_row(), by_column()>(
          element, from, tile, is_finite, {work.block_factor[r], work.column_factor}, work, codes);
    };
    constexpr std::true_type kYes;
    constexpr std::false_type kNo;
    uint8_t* const row_codes = row.codes == nullptr ? nullptr : row.codes + to;
    uint8_t* const column_codes = column.codes == nullptr ? nullptr : column.codes + to;
    if (row_codes != nullptr && column_codes != nullptr && !square_blocks) {
      convert(kYes, kYes, {row_codes, column_codes});
      continue;
    }
    if (row_codes != nullptr) convert(kYes, kNo, {row_codes, nullptr});
    if (column_codes == nullptr) continue;
    if (square_blocks) {
      convert(kYes, kNo, {column_codes, nullptr});
    } else {
      convert(kNo, kYes, {nullptr, column_codes});
    }
  }
}

#endif  // TANDEM_HAS_ELEMENT_PAIRS

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_MXFP8_INL_H_
