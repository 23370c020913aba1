#include "kernels/fp8_block.h"

#include "kernels/cpu/padding.h"
#include "kernels/cpu/targets.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fp8_block.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if TANDEM_HAS_ELEMENT_PAIRS

/// Blocks of 128 with float32 scales: a Scaling of quantize_tile.
template <Fp8Format kElementFormat>
struct Fp8Tiles {
  static constexpr Fp8Format kFormat = kElementFormat;
  static constexpr size_t kBlock = kFp8Block;
  static constexpr size_t kBlocks = kTileBlocks<kBlock>;
  template <typename E>
  using Work = TileWork<E, kBlock>;

  Fp8Tiles(ConstRows x, const Fp8Scaling& scaling, Fp8BlockOutput row, Fp8BlockOutput column,
           Fp8BlockOutput square)
      : is_square(static_cast<bool>(square)),
        row_codes(is_square ? square.codes : row.codes),
        column_codes(column.codes),
        row_scale(is_square ? square.dequant_scale : row.dequant_scale),
        column_scale(column.dequant_scale),
        row_stride(
            fp8_block_scales(is_square ? Fp8BlockShape::square : Fp8BlockShape::row, x.rows, x.cols)
                .cols),
        column_stride(fp8_block_scales(Fp8BlockShape::column, x.rows, x.cols).cols),
        eps(rounded(scaling.options.amax_epsilon)),
        big(largest_of(x.element)),
        power_of_two(scaling.options.power_of_two) {}

  /// scale_from_amax of every lane; no lane may be NaN.
  template <class D>
  HWY_INLINE hn::Vec<D> scales(D d, hn::Vec<D> amax) const {
    const hn::RebindToSigned<D> di;
    const auto infinity = hn::Set(di, 0x7F800000);
    const auto divisor = hn::Max(hn::BitCast(di, amax), hn::BitCast(di, hn::Set(d, eps)));
    const auto quotient = hn::Div(hn::Set(d, fp8_max(kFormat)), hn::BitCast(d, divisor));
    const auto overflows = hn::RebindMask(d, hn::Eq(hn::BitCast(di, quotient), infinity));
    auto scale = hn::IfThenElse(overflows, hn::Set(d, big), quotient);
    if (power_of_two) scale = hn::And(scale, hn::BitCast(d, infinity));
    const auto is_zero = hn::RebindMask(d, hn::Eq(divisor, hn::Zero(di))),
               is_infinite = hn::RebindMask(d, hn::Eq(divisor, infinity));
    const auto one = hn::Set(d, 1.0f);
    return hn::IfThenElse(is_zero, one, hn::IfThenElse(is_infinite, one, scale));
  }

  /// The factors of the blocks of `rows` rows, and their inverses.
  template <typename E>
  HWY_INLINE void scale_blocks(E element, size_t rows, Work<E>& work,
                               float* HWY_RESTRICT inverse) const {
    const hn::ScalableTag<float> d;
    const hn::RebindToUnsigned<decltype(d)> du;
    for (size_t i = 0; i < rows * kBlocks; i += hn::Lanes(d)) {
      const auto bits = hn::Load(du, &work.block_amax[0][0] + i);
      const auto scale = scales(d, values_of_bits(element, d, bits));
      hn::Store(scale, d, &work.block_factor[0][0] + i);
      if constexpr (kInWords<E>) store_block_limits<kFormat>(d, scale, &work.block_limit[0][0] + i);
      hn::Store(hn::Div(hn::Set(d, 1.0f), scale), d, inverse + i);
    }
  }

  template <typename E>
  HWY_INLINE void scale_rows(E element, const Tile<kBlock>& tile, Work<E>& work) const {
    if (row_codes == nullptr && row_scale == nullptr) return;
    HWY_ALIGN float inverse[kBlock * kBlocks];
    scale_blocks(element, tile.rows, work, inverse);
    for (size_t b = 0; b < tile.blocks() && row_scale != nullptr; ++b) {
      float* to = row_scale + (tile.col / kBlock + b) * row_stride + tile.row;
      for (size_t r = 0; r < tile.rows; ++r) to[r] = inverse[r * kBlocks + b];
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
      const auto first = scales(d, pair.first), second = scales(d, pair.second);
      hn::Store(first, d, work.column_factor + c);
      hn::Store(second, d, work.column_factor + c + lanes);
      if constexpr (kInWords<E>)
        store_column_limits<kFormat>(d, first, second, work.column_limit + c);
    }
    if (column_scale == nullptr) return;
    float* to = column_scale + tile.row / kBlock * column_stride + tile.col;
    for_each_vector(tile.cols, [&](size_t c, auto part) TANDEM_INLINE_LAMBDA {
      const auto scale = scales(d, load_part(element, d, amax + c, part));
      store_part(Float32{}, d, hn::Div(hn::Set(d, 1.0f), scale), to + c, part);
    });
  }

  template <typename E>
  HWY_INLINE void scale_squares(E element, const Tile<kBlock>& tile, Work<E>& work) const {
    HWY_ALIGN float inverse[kBlock * kBlocks];
    scale_blocks(element, 1, work, inverse);
    if (row_scale != nullptr)
      std::copy_n(inverse, tile.blocks(),
                  row_scale + tile.row / kBlock * row_stride + tile.col / kBlock);
  }

  Fp8Tiles behind(size_t rows, size_t cols) const {
    const auto moved = [](auto* from, size_t by) { return from == nullptr ? from : from + by; };
    Fp8Tiles result = *this;
    result.row_codes = moved(row_codes, rows * cols);
    result.column_codes = moved(column_codes, rows * cols);
    result.row_scale = moved(row_scale, is_square ? rows / kBlock * row_stride : rows);
    result.column_scale = moved(column_scale, rows / kBlock * column_stride);
    return result;
  }

  bool is_square;
  uint8_t *row_codes, *column_codes;
  float *row_scale, *column_scale;
  size_t row_stride, column_stride;
  float eps, big;
  bool power_of_two;
};

#endif  // TANDEM_HAS_ELEMENT_PAIRS

void quantize(const Input& x, const Fp8Scaling& scaling, Fp8BlockOutput row, Fp8BlockOutput column,
              Fp8BlockOutput square, float* amax) {
#if TANDEM_HAS_ELEMENT_PAIRS
  const ConstRows whole = whole_of(x);
  with_element(whole.element, [&](auto element) HWY_ATTR {
    with_format(scaling.format, [&](auto format) HWY_ATTR {
      const float largest =
          quantize_input(element, x, Fp8Tiles<format()>(whole, scaling, row, column, square));
      if (amax != nullptr) *amax = largest;
    });
  });
#else
  // Pairs of vectors need more than one lane. Without them the reference is as fast.
  with_whole(x, [&](ConstRows whole) {
    fp8_block_quantize_reference(whole, scaling, row, column, square, amax);
  });
#endif
}

/// y[c] = float_from_fp8(codes[c]) * dequant_scale[c].
template <Fp8Format kFormat, typename E>
HWY_INLINE void dequantize_by_column(E element, const uint8_t* HWY_RESTRICT codes, size_t count,
                                     const float* HWY_RESTRICT dequant_scale,
                                     typename E::Stored* HWY_RESTRICT y) {
  const hn::ScalableTag<float> d;
  write_row(element, count, y, [&](size_t c, auto part) TANDEM_INLINE_LAMBDA {
    return hn::Mul(fp8_values<kFormat>(d, load_bytes(d, codes + c, part)),
                   load_part(Float32{}, d, dequant_scale + c, part));
  });
}

void dequantize_blocks(const uint8_t* codes, const float* dequant_scale, Fp8Format format,
                       Fp8BlockShape shape, Rows y) {
  const size_t stride = fp8_block_scales(shape, y.rows, y.cols).cols;
  with_format(format, [&](auto kind) HWY_ATTR {
    for_each_row(y, [&](auto element, auto* to, size_t r) HWY_ATTR {
      const uint8_t* from = codes + r * y.cols;
      if (shape == Fp8BlockShape::column)
        return dequantize_by_column<kind()>(element, from, y.cols,
                                            dequant_scale + r / kFp8Block * stride, to);
      for (size_t c = 0; c < y.cols; c += kFp8Block) {
        const size_t b = c / kFp8Block,
                     at = shape == Fp8BlockShape::row ? b * stride + r : r / kFp8Block * stride + b;
        dequantize_row<kind()>(element, from + c, std::min(kFp8Block, y.cols - c),
                               dequant_scale[at], to + c);
      }
    });
  });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {
HWY_EXPORT(quantize);
HWY_EXPORT(dequantize_blocks);

namespace {

void clear_paddings(ConstRows x, const Fp8BlockOutput& row, const Fp8BlockOutput& column,
                    const Fp8BlockOutput& square) {
  const auto clear = [&](Fp8BlockShape shape, const Fp8BlockOutput& out, size_t cols) {
    const MatrixShape scales = fp8_block_scales(shape, x.rows, x.cols);
    clear_padding(out.dequant_scale, scales, scales.rows, cols);
  };
  clear(Fp8BlockShape::row, row, x.rows);
  clear(Fp8BlockShape::column, column, x.cols);
  clear(Fp8BlockShape::square, square, (x.cols + kFp8Block - 1) / kFp8Block);
}

}  // namespace

void fp8_block_quantize(const Input& x, const Fp8Scaling& scaling, Fp8BlockOutput row,
                        Fp8BlockOutput column, Fp8BlockOutput square, float* amax) {
  if (has_first_rows(x)) clear_paddings(whole_of(x), row, column, square);
  HWY_DYNAMIC_DISPATCH(quantize)(x, scaling, row, column, square, amax);
}

void fp8_block_dequantize(const uint8_t* codes, const float* dequant_scale, Fp8Format format,
                          Fp8BlockShape shape, Rows y) {
  HWY_DYNAMIC_DISPATCH(dequantize_blocks)(codes, dequant_scale, format, shape, y);
}

}  // namespace tandem::kernels::cpu
#endif
