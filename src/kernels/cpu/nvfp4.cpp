#include "kernels/nvfp4.h"

#include "kernels/cpu/padding.h"
#include "kernels/cpu/targets.h"
#include "kernels/parallel.h"
#include "kernels/quantize.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/nvfp4.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/nvfp4-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {

#if TANDEM_HAS_ELEMENT_PAIRS

/// Calls `body(tile, work)` for every tile of x, loaded.
template <typename Body>
HWY_INLINE void for_each_tile(ConstRows x, Body&& body) {
  const size_t bands = fp4_blocks(x.rows), chunks = (x.cols + kFp4Cols - 1) / kFp4Cols;
  const int64_t grain =
      static_cast<int64_t>(std::max<size_t>(1, 2048 / std::max<size_t>(1, x.cols)));
  with_element(x.element, [&](auto element) HWY_ATTR {
    parallel_for(0, static_cast<int64_t>(bands * chunks), grain,
                 [&](int64_t first, int64_t last) HWY_ATTR {
                   const ScopedFloatMode mode;
                   Fp4Work work;
                   for (int64_t i = first; i < last; ++i) {
                     const size_t at = static_cast<size_t>(i), row = at / chunks * kFp4Block,
                                  col = at % chunks * kFp4Cols;
                     const Fp4Tile tile{row, col, std::min(kFp4Block, x.rows - row),
                                        std::min(kFp4Cols, x.cols - col)};
                     load_tile(element, x, tile, work);
                     body(tile, work);
                   }
                 });
  });
}

float amax_of_rotated(ConstRows x) {
  std::atomic<int32_t> largest{0};
  for_each_tile(x, [&](const Fp4Tile& tile, Fp4Work& work) HWY_ATTR {
    const int32_t bits = rotated_amax(tile, work);
    int32_t seen = largest.load();
    while (seen < bits && !largest.compare_exchange_weak(seen, bits)) {
    }
  });
  return std::bit_cast<float>(largest.load());
}

template <bool kStochastic>
void quantize_tiles(ConstRows x, const Fp4Scaling& scaling, Fp4Output row, float row_amax,
                    Fp4Output column, float column_amax) {
  const Fp4TensorScale row_tensor(row_amax, scaling), column_tensor(column_amax, scaling);
  if (row.amax != nullptr) *row.amax = row_tensor.amax;
  if (column.amax != nullptr) *column.amax = column_tensor.amax;
  const size_t padded_rows = fp4_blocks(x.rows) * kFp4Block,
               padded_cols = fp4_blocks(x.cols) * kFp4Block;
  const size_t row_stride = fp4_code_shape(Fp4Direction::row, x.rows, x.cols).cols;
  const size_t row_scales = fp4_scale_shape(Fp4Direction::row, x.rows, x.cols).cols,
               column_scales = fp4_scale_shape(Fp4Direction::column, x.rows, x.cols).cols;
  for_each_tile(x, [&](const Fp4Tile& tile, Fp4Work& work) HWY_ATTR {
    if (row || scaling.options.square_blocks)
      look_at_rows(tile, scaling.options.square_blocks, work);
    if (is_chosen_by_rows(scaling) || (row && scaling.options.four_over_six != FourOverSix::off)) {
      choose_for_rows(tile, row_tensor, scaling, work);
    } else if (row) {
      scale_rows(tile, row_tensor, work);
    }
    if (row) {
      for (size_t r = 0; r < tile.rows; ++r) {
        std::memcpy(row.dequant_scale + (tile.row + r) * row_scales + tile.col / kFp4Block,
                    work.scale[r], tile.blocks());
        quantize_fp4_row<kStochastic>(tile, r, scaling, padded_cols, work,
                                      row.codes + (tile.row + r) * row_stride + tile.col / 2);
      }
    }
    if (column) {
      quantize_fp4_columns<kStochastic>(
          tile, scaling, column_tensor, padded_rows, work, x.cols,
          column.codes + tile.row / 2 * x.cols + tile.col,
          column.dequant_scale + tile.row / kFp4Block * column_scales + tile.col);
    }
  });
}

void quantize(ConstRows x, const Fp4Scaling& scaling, Fp4Output row, Fp4Output column, float amax) {
  const bool rotates = scaling.options.hadamard && column;
  const float column_amax = rotates ? amax_of_rotated(x) : amax;
  const auto run =
      scaling.options.stochastic_rounding ? &quantize_tiles<true> : &quantize_tiles<false>;
  run(x, scaling, row, amax, column, column_amax);
}

#else
// Pairs of vectors need more than one lane. Without them the reference is as fast.
void quantize(ConstRows x, const Fp4Scaling& scaling, Fp4Output row, Fp4Output column, float) {
  nvfp4_quantize_reference(x, scaling, row, column, nullptr);
}
#endif

void dequantize_blocks(const uint8_t* codes, const uint8_t* dequant_scale, float amax,
                       float largest_scale, Fp4Direction direction, Rows y) {
  const Fp4Decoding tensor{amax, 1.0f / (6 * largest_scale)};
  const bool by_row = direction == Fp4Direction::row;
  const size_t stride = fp4_code_shape(direction, y.rows, y.cols).cols,
               scale_stride = fp4_scale_shape(direction, y.rows, y.cols).cols;
  for_each_row(y, [&](auto element, auto* to, size_t r) HWY_ATTR {
    using E = decltype(element);
    if (by_row) {
      fp4_values_by_row(element, codes + r * stride, dequant_scale + r * scale_stride, tensor,
                        y.cols, to);
      return;
    }
    const auto run = r % 2 == 0 ? &fp4_values_by_column<false, E> : &fp4_values_by_column<true, E>;
    run(element, codes + r / 2 * stride, dequant_scale + r / kFp4Block * scale_stride, tensor,
        y.cols, to);
  });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {
HWY_EXPORT(quantize);
HWY_EXPORT(dequantize_blocks);

void nvfp4_quantize_seen(ConstRows x, const Seen& seen, const Fp4Scaling& scaling, Fp4Output row,
                         Fp4Output column, float* amax) {
  if (row)
    clear_padding(row.dequant_scale, fp4_scale_shape(Fp4Direction::row, x.rows, x.cols), x.rows,
                  fp4_blocks(x.cols));
  if (column)
    clear_padding(column.dequant_scale, fp4_scale_shape(Fp4Direction::column, x.rows, x.cols),
                  fp4_blocks(x.rows), x.cols);
  if (amax != nullptr) *amax = seen.amax;
  if (row || column) HWY_DYNAMIC_DISPATCH(quantize)(x, scaling, row, column, seen.amax);
}

void nvfp4_quantize(const Input& x, const Fp4Scaling& scaling, Fp4Output row, Fp4Output column,
                    float* amax) {
  nvfp4_quantize_seen(whole_of(x), seen_in(x), scaling, row, column, amax);
}

void nvfp4_dequantize(const uint8_t* codes, const uint8_t* dequant_scale, float amax,
                      float largest_scale, Fp4Direction direction, Rows y) {
  HWY_DYNAMIC_DISPATCH(dequantize_blocks)(codes, dequant_scale, amax, largest_scale, direction, y);
}

}  // namespace tandem::kernels::cpu
#endif
