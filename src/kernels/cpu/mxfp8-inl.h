// What MXFP8 adds to the tiles of blocks-inl.h, and dequantizing rows of its codes. Included once
// per Highway target; bitwise equal on all of them.

#if defined(TANDEM_KERNELS_CPU_MXFP8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_MXFP8_INL_H_
#undef TANDEM_KERNELS_CPU_MXFP8_INL_H_
#else
#define TANDEM_KERNELS_CPU_MXFP8_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/blocks-inl.h"
#include "kernels/mxfp8.h"

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
  write_row(element, count, y, [&](size_t c, auto part) TANDEM_INLINE_LAMBDA {
    return hn::Mul(fp8_values<kFormat>(d, load_bytes(d, codes + c, part)),
                   e8m0_values(d, load_bytes(d, dequant_scale + c, part)));
  });
}

#if TANDEM_HAS_ELEMENT_PAIRS

/// The E8M0 codes of the scales for amaxes that are not NaN: e8m0_from_float(amax * (1 / format
/// max)).
template <Fp8Format kFormat, class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> e8m0_codes(D d, hn::Vec<D> amax) {
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(di, hn::Mul(amax, hn::Set(d, 1.0f / fp8_max(kFormat))));
  const auto up = hn::ShiftRight<23>(hn::Add(bits, hn::Set(di, 0x7FFFFF)));
  const auto code = hn::Min(up, hn::Set(di, int32_t{kE8m0Largest}));
  return hn::BitCast(du, hn::IfThenZeroElse(hn::Lt(bits, hn::Set(di, 0x00400001)), code));
}

/// 2^(127 - code) for codes other than 0xFF.
template <class D>
HWY_INLINE hn::Vec<D> reciprocals_of_e8m0(D d, hn::Vec<hn::RebindToUnsigned<D>> code) {
  return e8m0_values(d, hn::Sub(hn::Set(hn::RebindToUnsigned<D>(), uint32_t{kE8m0Largest}), code));
}

/// Blocks of 32 with E8M0 scales: a Scaling of quantize_tile.
template <Fp8Format kElementFormat>
struct MxTiles {
  static constexpr Fp8Format kFormat = kElementFormat;
  static constexpr size_t kBlock = kMxBlock;
  static constexpr bool power_of_two = true;
  template <typename E>
  using Work = TileWork<E, kBlock>;

  MxTiles(ConstRows x, bool square_blocks, Mxfp8Output row, Mxfp8Output column)
      : is_square(square_blocks),
        row_codes(row.codes),
        column_codes(column.codes),
        row_scale(row.dequant_scale),
        column_scale(column.dequant_scale),
        row_stride(mx_scale_shape(MxDirection::row, x.rows, x.cols).cols),
        column_stride(mx_scale_shape(MxDirection::column, x.rows, x.cols).cols) {}

  /// Computes the scales and factors of the blocks of one row.
  template <typename E>
  HWY_INLINE void scale_row(E element, const Tile<kBlock>& tile, size_t r, Work<E>& work,
                            uint8_t* HWY_RESTRICT scales) const {
    const hn::ScalableTag<float> d;
    const hn::RebindToUnsigned<decltype(d)> du;
    const hn::Rebind<uint8_t, decltype(d)> d8;
    for (size_t b = 0; b < tile.blocks(); b += hn::Lanes(d)) {
      const auto bits = hn::Load(du, work.block_amax[r] + b);
      const auto code = e8m0_codes<kFormat>(d, values_of_bits(element, d, bits));
      const auto factor = reciprocals_of_e8m0(d, code);
      hn::Store(factor, d, work.block_factor[r] + b);
      if constexpr (kInWords<E>) store_block_limits<kFormat>(d, factor, work.block_limit[r] + b);
      hn::Store(hn::TruncateTo(d8, code), d8, scales + b);
    }
  }

  uint8_t* row_scales(const Tile<kBlock>& tile, size_t r) const {
    return row_scale + (tile.row + r) * row_stride + tile.col / kBlock;
  }
  uint8_t* column_scales(const Tile<kBlock>& tile) const {
    return column_scale + tile.row / kBlock * column_stride + tile.col;
  }

  template <typename E>
  HWY_INLINE void scale_rows(E element, const Tile<kBlock>& tile, Work<E>& work) const {
    if (row_codes == nullptr && row_scale == nullptr) return;
    HWY_ALIGN uint8_t scales[kTileBlocks<kBlock>];
    for (size_t r = 0; r < tile.rows; ++r) {
      scale_row(element, tile, r, work, scales);
      if (row_scale != nullptr) std::memcpy(row_scales(tile, r), scales, tile.blocks());
    }
  }

  template <typename E>
  HWY_INLINE void scale_columns(E element, const Tile<kBlock>& tile, Work<E>& work) const {
    if (column_codes == nullptr && column_scale == nullptr) return;
    const hn::ScalableTag<float> d;
    const size_t lanes = hn::Lanes(d);
    const auto* amax = reinterpret_cast<const typename E::Stored*>(work.column_amax);
    for (size_t c = 0; c < tile.cols; c += 2 * lanes) {
      const ElementPair pair = load_pair(element, amax + c);
      const auto first = e8m0_codes<kFormat>(d, pair.first),
                 second = e8m0_codes<kFormat>(d, pair.second);
      const auto first_factor = reciprocals_of_e8m0(d, first),
                 second_factor = reciprocals_of_e8m0(d, second);
      hn::Store(first_factor, d, work.column_factor + c);
      hn::Store(second_factor, d, work.column_factor + c + lanes);
      if constexpr (kInWords<E>)
        store_column_limits<kFormat>(d, first_factor, second_factor, work.column_limit + c);
      store_bytes(join_pair(element, first, second), work.codes + c);
    }
    if (column_scale != nullptr) std::memcpy(column_scales(tile), work.codes, tile.cols);
  }

  template <typename E>
  HWY_INLINE void scale_squares(E element, const Tile<kBlock>& tile, Work<E>& work) const {
    HWY_ALIGN uint8_t scales[kTileBlocks<kBlock>];
    scale_row(element, tile, 0, work, scales);
    for (size_t r = 0; r < tile.rows && row_scale != nullptr; ++r)
      std::memcpy(row_scales(tile, r), scales, tile.blocks());
    for (size_t c = 0; c < tile.cols && column_scale != nullptr; ++c)
      column_scales(tile)[c] = scales[c / kBlock];
  }

  MxTiles behind(size_t rows, size_t cols) const {
    const auto moved = [](uint8_t* from, size_t by) { return from == nullptr ? from : from + by; };
    MxTiles result = *this;
    result.row_codes = moved(row_codes, rows * cols);
    result.column_codes = moved(column_codes, rows * cols);
    result.row_scale = moved(row_scale, rows * row_stride);
    result.column_scale = moved(column_scale, rows / kBlock * column_stride);
    return result;
  }

  bool is_square;
  uint8_t *row_codes, *column_codes, *row_scale, *column_scale;
  size_t row_stride, column_stride;
};

#endif  // TANDEM_HAS_ELEMENT_PAIRS

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_MXFP8_INL_H_
