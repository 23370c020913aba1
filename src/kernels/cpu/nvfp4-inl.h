// Converts tiles of a matrix to NVFP4, and rows of codes back. Included once per Highway target;
// bitwise equal on all of them.
//
// A tile is 16 rows by some blocks of columns. It is held in float32 in the first-level cache, with
// zeros beyond the matrix.

#if defined(TANDEM_KERNELS_CPU_NVFP4_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_NVFP4_INL_H_
#undef TANDEM_KERNELS_CPU_NVFP4_INL_H_
#else
#define TANDEM_KERNELS_CPU_NVFP4_INL_H_
#endif

#include <cfloat>
#include <utility>

#include "hwy/highway.h"
#include "kernels/cpu/blocks-inl.h"
#include "kernels/cpu/stochastic-inl.h"
#include "kernels/nvfp4.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using Vf = hn::Vec<F32>;
using Vu = hn::Vec<U32>;

/// The constants of all codes of a tensor: A and fl(1 / (6 L)).
struct Fp4Decoding {
  float amax, per_scale;
};

/// fl(fl(scale * A) * fl(1 / (6 L))) of E4M3 codes.
HWY_INLINE Vf fp4_dequant_factors(Vu scale, const Fp4Decoding& tensor) {
  const F32 d;
  const auto value = fp8_values<Fp8Format::e4m3>(d, scale);
  return hn::Mul(hn::Mul(value, hn::Set(d, tensor.amax)), hn::Set(d, tensor.per_scale));
}

/// One row of y from column codes. `kHigh`: whether the row is in the high half of each byte.
template <bool kHigh, typename E>
HWY_INLINE void fp4_values_by_column(E element, const uint8_t* HWY_RESTRICT codes,
                                     const uint8_t* HWY_RESTRICT scales, const Fp4Decoding& tensor,
                                     size_t count, typename E::Stored* HWY_RESTRICT y) {
  const F32 d;
  write_row(element, count, y, [&](size_t c, auto part) TANDEM_INLINE_LAMBDA {
    const auto bytes = load_bytes(d, codes + c, part);
    const auto code = kHigh ? hn::ShiftRight<4>(bytes) : bytes;
    const auto factor = fp4_dequant_factors(load_bytes(d, scales + c, part), tensor);
    return hn::Mul(fp8_values<Fp8Format::e2m1>(d, code), factor);
  });
}

/// One row of y from row codes.
template <typename E>
HWY_INLINE void fp4_values_by_row(E element, const uint8_t* HWY_RESTRICT codes,
                                  const uint8_t* HWY_RESTRICT scales, const Fp4Decoding& tensor,
                                  size_t count, typename E::Stored* HWY_RESTRICT y) {
  const F32 d;
  const U32 du;
  const hn::Rebind<uint8_t, F32> d8;
  HWY_ALIGN float values[kFp4Block + HWY_MAX_BYTES / sizeof(float)];
  HWY_ALIGN uint8_t halves[kFp4Block + HWY_MAX_BYTES];
  for (size_t c = 0; c < count; c += kFp4Block) {
    for (size_t k = 0; k < kFp4Block / 2; ++k) {
      halves[2 * k] = codes[c / 2 + k] & 0xF;
      halves[2 * k + 1] = codes[c / 2 + k] >> 4;
    }
    const auto factor = fp4_dequant_factors(hn::Set(du, uint32_t{scales[c / kFp4Block]}), tensor);
    for (size_t k = 0; k < kFp4Block; k += hn::Lanes(d)) {
      const auto code = hn::PromoteTo(du, hn::LoadU(d8, halves + k));
      hn::Store(hn::Mul(fp8_values<Fp8Format::e2m1>(d, code), factor), d, values + k);
    }
    narrow(element, values, std::min(kFp4Block, count - c), y + c);
  }
}

#if TANDEM_HAS_ELEMENT_PAIRS

/// Columns of a tile, in whole blocks.
constexpr size_t kFp4Cols = 256;
constexpr size_t kFp4TileBlocks = kFp4Cols / kFp4Block;

/// The working memory of a thread.
struct Fp4Work {
  HWY_ALIGN float x[kFp4Block][kFp4Cols];
  // Bits of amaxes without a sign, NaN above all others; and the factors and scales that follow
  // from the amaxes.
  HWY_ALIGN int32_t amax[kFp4Block][kFp4TileBlocks];
  HWY_ALIGN float factor[kFp4Block][kFp4TileBlocks];
  HWY_ALIGN uint8_t scale[kFp4Block][kFp4TileBlocks];
  // For one row.
  HWY_ALIGN uint8_t codes[kFp4Cols];
  HWY_ALIGN uint32_t words[kFp4Cols + 4 + 2 * HWY_MAX_BYTES];
};

/// The position and size of a tile, without padding.
struct Fp4Tile {
  size_t row, col, rows, cols;
  size_t blocks() const { return fp4_blocks(cols); }
};

template <typename E>
HWY_INLINE void load_tile(E element, ConstRows x, const Fp4Tile& tile, Fp4Work& work) {
  const size_t padded = tile.blocks() * kFp4Block;
  for (size_t r = 0; r < kFp4Block; ++r) {
    size_t there = 0;
    if (r < tile.rows) {
      there = tile.cols;
      widen(element, E::at(x.data, (tile.row + r) * x.stride + tile.col), there, work.x[r]);
    }
    std::fill(work.x[r] + there, work.x[r] + padded, 0.0f);
  }
}

/// Scales and factors of blocks, one per lane.
struct Fp4Blocks {
  Vu scale;
  Vf factor;
  /// `wanted`: the scales before they are rounded.
  HWY_INLINE Fp4Blocks(Vf wanted, const Fp4TensorScale& tensor) {
    const F32 d;
    scale = fp8_codes<Fp8Format::e4m3>(d, wanted);
    const auto inverse = hn::Mul(fp8_values<Fp8Format::e4m3>(d, scale), hn::Set(d, tensor.inverse));
    const auto quotient = hn::Div(hn::Set(d, 1.0f), inverse);
    factor = hn::IfThenElse(hn::IsNaN(inverse), inverse, hn::Min(quotient, hn::Set(d, FLT_MAX)));
  }
};

HWY_INLINE hn::Vec<I32> magnitude_bits_of(Vf v) {
  const I32 di;
  return hn::And(hn::BitCast(di, v), hn::Set(di, 0x7FFFFFFF));
}

/// E2M1 codes of v, rounded stochastically if there is a `word`.
template <typename... Word>
HWY_INLINE Vu fp4_codes(Vf v, Word... word) {
  const F32 d;
  if constexpr (sizeof...(Word) == 0) {
    return fp8_codes<Fp8Format::e2m1>(d, v);
  } else {
    const I32 di;
    const U32 du;
    const auto magnitude = magnitude_bits_of(v);
    const auto is_nan = hn::RebindMask(du, hn::Gt(magnitude, hn::Set(di, 0x7F800000)));
    const auto bounded = hn::Min(magnitude, hn::BitCast(di, hn::Set(d, 6.0f)));
    const auto code = stochastic_codes<Fp8Format::e2m1>(d, hn::BitCast(d, bounded), word...);
    const auto sign = hn::And(hn::ShiftRight<28>(hn::BitCast(du, v)), hn::Set(du, 8u));
    return hn::IfThenElse(is_nan, hn::Set(du, 7u), hn::Or(code, sign));
  }
}

HWY_INLINE Fp4Blocks blocks_to_six(Vf amax, const Fp4TensorScale& tensor) {
  const F32 d;
  return {hn::Mul(amax, hn::Set(d, tensor.per_amax)), tensor};
}

/// `fp4_error` of each lane's block, whose numbers are x.
HWY_INLINE Vf fp4_errors(const Vf* x, const Fp4Blocks& blocks, const Fp4TensorScale& tensor,
                         FourOverSix metric) {
  const F32 d;
  const auto scale = fp8_values<Fp8Format::e4m3>(d, blocks.scale), amax = hn::Set(d, tensor.amax),
             divisor = hn::Set(d, tensor.divisor);
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < kFp4Block; ++i) {
    const auto code = fp4_codes(hn::Mul(x[i], blocks.factor));
    const auto value = hn::Mul(hn::Mul(fp8_values<Fp8Format::e2m1>(d, code), scale), amax);
    const auto difference = hn::Sub(hn::Div(value, divisor), x[i]);
    sum = hn::Add(
        sum, metric == FourOverSix::mse ? hn::Mul(difference, difference) : hn::Abs(difference));
  }
  return sum;
}

/// The two candidates of four over six for each lane's block.
struct Fp4BlockCandidates {
  Fp4Blocks six, four;
  Vf error_of_six, error_of_four;

  HWY_INLINE Fp4BlockCandidates(const Vf* x, Vf amax, const Fp4TensorScale& tensor,
                                FourOverSix metric)
      : Fp4BlockCandidates(x, base_of(amax, tensor), metric, tensor) {}

  HWY_INLINE Fp4Blocks chosen() const {
    const U32 du;
    const auto is_four = hn::Lt(error_of_four, error_of_six);
    Fp4Blocks result = six;
    result.scale = hn::IfThenElse(hn::RebindMask(du, is_four), four.scale, six.scale);
    result.factor = hn::IfThenElse(is_four, four.factor, six.factor);
    return result;
  }

 private:
  HWY_INLINE Fp4BlockCandidates(const Vf* x, Vf base, FourOverSix metric,
                                const Fp4TensorScale& tensor)
      : six(base, tensor),
        four(hn::Mul(base, hn::Set(F32(), 1.5f)), tensor),
        error_of_six(fp4_errors(x, six, tensor, metric)),
        error_of_four(fp4_errors(x, four, tensor, metric)) {}

  static HWY_INLINE Vf base_of(Vf amax, const Fp4TensorScale& tensor) {
    const F32 d;
    return hn::Mul(hn::Div(amax, hn::Set(d, 6.0f)), hn::Set(d, tensor.scale));
  }
};

/// Computes all of work.amax; for square blocks it is equal in all rows.
HWY_INLINE void look_at_rows(const Fp4Tile& tile, bool square_blocks, Fp4Work& work) {
  const F32 d;
  const I32 di;
  constexpr size_t kAtOnce = 4;
  for (size_t r = 0; r < tile.rows; ++r) {
    for (size_t b = 0; b < tile.blocks(); b += kAtOnce) {
      hn::Vec<I32> largest[kAtOnce];
      for (size_t k = 0; k < kAtOnce; ++k) {
        const float* block = work.x[r] + (b + k) * kFp4Block;
        largest[k] = magnitude_bits_of(hn::Load(d, block));
        for (size_t c = hn::Lanes(d); c < kFp4Block; c += hn::Lanes(d))
          largest[k] = hn::Max(largest[k], magnitude_bits_of(hn::Load(d, block + c)));
      }
      greatest_lanes_of_four(di, largest, work.amax[r] + b);
    }
  }
  if (!square_blocks) return;
  for (size_t r = 1; r < tile.rows; ++r)
    for (size_t b = 0; b < tile.blocks(); ++b)
      work.amax[0][b] = std::max(work.amax[0][b], work.amax[r][b]);
  for (size_t r = 1; r < tile.rows; ++r) std::copy_n(work.amax[0], tile.blocks(), work.amax[r]);
}

/// Computes scales and factors of all rows' blocks.
HWY_INLINE void scale_rows(const Fp4Tile& tile, const Fp4TensorScale& tensor, Fp4Work& work) {
  const F32 d;
  const I32 di;
  const hn::Rebind<uint8_t, F32> d8;
  for (size_t r = 0; r < tile.rows; ++r) {
    for (size_t b = 0; b < tile.blocks(); b += hn::Lanes(d)) {
      const Fp4Blocks blocks =
          blocks_to_six(hn::BitCast(d, hn::Load(di, work.amax[r] + b)), tensor);
      hn::Store(blocks.factor, d, work.factor[r] + b);
      hn::Store(hn::TruncateTo(d8, blocks.scale), d8, work.scale[r] + b);
    }
  }
}

/// Sums 16 numbers by halves; each is replaced by the sum.
HWY_INLINE void sum_by_halves(float* sums) {
  for (size_t half = kFp4Block / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  std::fill_n(sums, kFp4Block, sums[0]);
}

/// scale_rows with four over six. A lane is a row, because the errors of a block are added one by
/// one.
HWY_INLINE void choose_for_rows(const Fp4Tile& tile, const Fp4TensorScale& tensor,
                                const Fp4Scaling& scaling, Fp4Work& work) {
  const F32 d;
  const U32 du;
  const I32 di;
  HWY_ALIGN float x[kFp4Block][kFp4Block];
  HWY_ALIGN int32_t amax[kFp4Block] = {};
  HWY_ALIGN uint32_t scale[2][kFp4Block];
  HWY_ALIGN float factor[2][kFp4Block], error[2][kFp4Block];
  for (size_t b = 0; b < tile.blocks(); ++b) {
    for (size_t r = 0; r < kFp4Block; ++r)
      for (size_t k = 0; k < kFp4Block; ++k) x[k][r] = work.x[r][b * kFp4Block + k];
    for (size_t r = 0; r < tile.rows; ++r) amax[r] = work.amax[r][b];
    for (size_t r = 0; r < kFp4Block; r += hn::Lanes(d)) {
      Vf lanes[kFp4Block];
      for (size_t k = 0; k < kFp4Block; ++k) lanes[k] = hn::Load(d, x[k] + r);
      const Fp4BlockCandidates of(lanes, hn::BitCast(d, hn::Load(di, amax + r)), tensor,
                                  scaling.options.four_over_six);
      hn::Store(of.six.scale, du, scale[0] + r);
      hn::Store(of.four.scale, du, scale[1] + r);
      hn::Store(of.six.factor, d, factor[0] + r);
      hn::Store(of.four.factor, d, factor[1] + r);
      hn::Store(of.error_of_six, d, error[0] + r);
      hn::Store(of.error_of_four, d, error[1] + r);
    }
    if (scaling.options.square_blocks)
      for (float* errors : error) sum_by_halves(errors);
    for (size_t r = 0; r < tile.rows; ++r) {
      const size_t chosen = error[1][r] < error[0][r] ? 1 : 0;
      work.scale[r][b] = static_cast<uint8_t>(scale[chosen][r]);
      work.factor[r][b] = factor[chosen][r];
    }
  }
}

HWY_INLINE bool is_chosen_by_rows(const Fp4Scaling& scaling) {
  return scaling.options.square_blocks && scaling.options.four_over_six != FourOverSix::off;
}

/// Writes the packed codes of row `r` of a tile.
template <bool kStochastic>
HWY_INLINE void quantize_fp4_row(const Fp4Tile& tile, size_t r, const Fp4Scaling& scaling,
                                 size_t padded_cols, Fp4Work& work, uint8_t* HWY_RESTRICT to) {
  const F32 d;
  const U32 du;
  const hn::Rebind<uint8_t, F32> d8;
  const size_t count = tile.blocks() * kFp4Block;
  if constexpr (kStochastic)
    fill_words(scaling.seed, ((tile.row + r) * padded_cols + tile.col) / 4, count, work.words,
               {scaling.offset, 0});
  for (size_t b = 0; b < tile.blocks(); ++b) {
    const auto factor = hn::Set(d, work.factor[r][b]);
    for (size_t c = b * kFp4Block; c < (b + 1) * kFp4Block; c += hn::Lanes(d)) {
      const auto v = hn::Mul(hn::Load(d, work.x[r] + c), factor);
      if constexpr (kStochastic) {
        hn::StoreU(hn::TruncateTo(d8, fp4_codes(v, hn::LoadU(du, work.words + c))), d8,
                   work.codes + c);
      } else {
        hn::StoreU(hn::TruncateTo(d8, fp4_codes(v)), d8, work.codes + c);
      }
    }
  }
  for (size_t i = 0; i < count / 2; ++i)
    to[i] = static_cast<uint8_t>(work.codes[2 * i] | work.codes[2 * i + 1] << 4);
}

template <size_t kI, size_t... kJ, class D>
HWY_INLINE void add_terms(D, hn::Vec<D> x, hn::Vec<D>* sums, std::index_sequence<kJ...>) {
  ((sums[kJ] = hadamard_is_negative(kI, kJ) ? hn::Sub(sums[kJ], x) : hn::Add(sums[kJ], x)), ...);
}
template <size_t... kI, class D>
HWY_INLINE void add_all_terms(D d, const hn::Vec<D>* x, hn::Vec<D>* sums,
                              std::index_sequence<kI...>) {
  (add_terms<kI>(d, x[kI], sums, std::make_index_sequence<kFp4Block>()), ...);
}

/// `hadamard` of each lane's group, for the columns of the tile from `c` on.
HWY_NOINLINE void rotate_columns(const Fp4Work& work, size_t c, Vf* HWY_RESTRICT rotated) {
  const F32 d;
  const hn::Half<F32> half;
  const hn::Rebind<double, hn::Half<F32>> wide;
  constexpr auto kAll = std::make_index_sequence<kFp4Block>();
  hn::Vec<decltype(wide)> x[kFp4Block], sums[2][kFp4Block];
  for (size_t part = 0; part < 2; ++part) {
    const size_t first = c + part * hn::Lanes(half);
    for (size_t i = 0; i < kFp4Block; ++i) {
      const auto v = hn::Load(half, work.x[i] + first);
      x[i] = hn::PromoteTo(wide, round_to(BFloat16{}, half, v));
      sums[part][i] = hn::Zero(wide);
    }
    add_all_terms(wide, x, sums[part], kAll);
  }
  const auto quarter = hn::Set(wide, 0.25);
  for (size_t j = 0; j < kFp4Block; ++j) {
    const auto low = hn::DemoteTo(half, hn::Mul(sums[0][j], quarter)),
               high = hn::DemoteTo(half, hn::Mul(sums[1][j], quarter));
    rotated[j] = round_to(BFloat16{}, d, hn::Combine(d, high, low));
  }
}

/// The numbers behind column codes, for the columns of the tile from `c` on: rotated if `rotates`.
HWY_INLINE void columns_at(const Fp4Work& work, size_t c, bool rotates, Vf* HWY_RESTRICT x) {
  const F32 d;
  if (rotates) return rotate_columns(work, c, x);
  for (size_t i = 0; i < kFp4Block; ++i) x[i] = hn::Load(d, work.x[i] + c);
}

/// The largest bits of rotated columns, ignoring NaN.
HWY_INLINE int32_t rotated_amax(const Fp4Tile& tile, const Fp4Work& work) {
  const I32 di;
  const auto infinity = hn::Set(di, 0x7F800000);
  auto largest = hn::Zero(di);
  Vf x[kFp4Block];
  for (size_t c = 0; c < tile.cols; c += hn::Lanes(di)) {
    rotate_columns(work, c, x);
    for (const Vf& v : x) {
      const auto bits = magnitude_bits_of(v);
      largest = hn::Max(largest, hn::IfThenZeroElse(hn::Gt(bits, infinity), bits));
    }
  }
  return hn::GetLane(hn::MaxOfLanes(di, largest));
}

/// The low words of two vectors of 64-bit lanes.
HWY_INLINE Vu low_words(PhiloxLanes::V first, PhiloxLanes::V second) {
  const U32 du;
  return hn::ConcatEven(du, hn::BitCast(du, second), hn::BitCast(du, first));
}

/// Scales and factors of the columns from `c` on, whose numbers are x.
HWY_INLINE Fp4Blocks column_blocks(const Fp4Work& work, size_t c, const Vf* x,
                                   const Fp4Scaling& scaling, const Fp4TensorScale& tensor) {
  const F32 d;
  const U32 du;
  const I32 di;
  auto amax = hn::Set(di, work.amax[0][c / kFp4Block]);
  if (!scaling.options.square_blocks) {
    amax = magnitude_bits_of(x[0]);
    for (size_t i = 1; i < kFp4Block; ++i) amax = hn::Max(amax, magnitude_bits_of(x[i]));
  }
  if (scaling.options.four_over_six == FourOverSix::off)
    return blocks_to_six(hn::BitCast(d, amax), tensor);
  if (!scaling.options.square_blocks)
    return Fp4BlockCandidates(x, hn::BitCast(d, amax), tensor, scaling.options.four_over_six)
        .chosen();
  Fp4Blocks of_rows = blocks_to_six(hn::BitCast(d, amax), tensor);
  of_rows.scale = hn::Set(du, uint32_t{work.scale[0][c / kFp4Block]});
  of_rows.factor = hn::Set(d, work.factor[0][c / kFp4Block]);
  return of_rows;
}

/// Writes codes and scales of the columns of a tile.
template <bool kStochastic>
HWY_INLINE void quantize_fp4_columns(const Fp4Tile& tile, const Fp4Scaling& scaling,
                                     const Fp4TensorScale& tensor, size_t padded_rows,
                                     const Fp4Work& work, size_t stride, uint8_t* codes,
                                     uint8_t* scales) {
  const F32 d;
  const hn::ScalableTag<uint64_t> d64;
  const hn::Rebind<uint8_t, F32> d8;
  const size_t lanes = hn::Lanes(d);
  Vf x[kFp4Block];
  HWY_ALIGN uint8_t buffer[HWY_MAX_BYTES];
  for (size_t c = 0; c < tile.cols; c += lanes) {
    const size_t there = std::min(lanes, tile.cols - c);
    const auto put = [&](Vu bytes, uint8_t* to) TANDEM_INLINE_LAMBDA {
      if (there == lanes) {
        hn::StoreU(hn::TruncateTo(d8, bytes), d8, to);
      } else {
        hn::StoreU(hn::TruncateTo(d8, bytes), d8, buffer);
        std::memcpy(to, buffer, there);
      }
    };
    columns_at(work, c, scaling.options.hadamard, x);
    const Fp4Blocks blocks = column_blocks(work, c, x, scaling, tensor);
    put(blocks.scale, scales + c);
    Vu words[kFp4Block];
    if constexpr (kStochastic) {
      HWY_ALIGN uint64_t counters[2 * HWY_MAX_BYTES / sizeof(uint64_t)];
      for (size_t i = 0; i < lanes; ++i)
        counters[i] = ((tile.col + c + i) * padded_rows + tile.row) / 4;
      for (size_t four = 0; four < kFp4Block / 4; ++four) {
        const auto lanes_at = [&](size_t first) TANDEM_INLINE_LAMBDA {
          const auto counter =
              hn::Add(hn::Load(d64, counters + first), hn::Set(d64, uint64_t{four}));
          return PhiloxLanes(counter, {scaling.offset, 1}, scaling.seed);
        };
        const PhiloxLanes a = lanes_at(0), b = lanes_at(hn::Lanes(d64));
        words[4 * four] = low_words(a.c0, b.c0);
        words[4 * four + 1] = low_words(a.c1, b.c1);
        words[4 * four + 2] = low_words(a.c2, b.c2);
        words[4 * four + 3] = low_words(a.c3, b.c3);
      }
    }
    const auto code = [&](size_t i) TANDEM_INLINE_LAMBDA {
      const auto v = hn::Mul(x[i], blocks.factor);
      if constexpr (kStochastic) {
        return fp4_codes(v, words[i]);
      } else {
        return fp4_codes(v);
      }
    };
    for (size_t i = 0; i < kFp4Block; i += 2)
      put(hn::Or(code(i), hn::ShiftLeft<4>(code(i + 1))), codes + i / 2 * stride + c);
  }
}

#endif  // TANDEM_HAS_ELEMENT_PAIRS

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_NVFP4_INL_H_
