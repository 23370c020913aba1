// Scalar MXFP8: what the vector code must equal to the bit.
#include "kernels/mxfp8.h"

#include <algorithm>

#include "kernels/cpu/float_mode.h"
#include "kernels/scalar.h"

namespace tandem::kernels {
namespace {

void quantize_block(ConstRows x, const Block& block, Fp8Format format, uint8_t dequant_scale,
                    uint8_t* codes) {
  const float factor = reciprocal_of_e8m0(dequant_scale);
  for (size_t r = block.row; r < block.row + block.rows; ++r) {
    for (size_t c = block.col; c < block.col + block.cols; ++c)
      codes[r * x.cols + c] = fp8_from_float(element_of(x, r, c) * factor, format);
  }
}

void quantize(ConstRows x, const Fp8Scaling& scaling, MxDirection direction, Mxfp8Output out) {
  if (!out) return;
  const bool by_row = direction == MxDirection::row, square = scaling.options.square_blocks;
  const MatrixShape shape = mx_scale_shape(direction, x.rows, x.cols);
  if (out.dequant_scale != nullptr) std::fill_n(out.dequant_scale, shape.size(), uint8_t{0});
  const size_t high = by_row && !square ? 1 : kMxBlock, wide = by_row || square ? kMxBlock : 1;
  for (size_t r = 0; r < x.rows; r += high) {
    for (size_t c = 0; c < x.cols; c += wide) {
      const Block block{r, std::min(high, x.rows - r), c, std::min(wide, x.cols - c)};
      const uint8_t code = e8m0_from_float(amax_of(x, block) * (1.0f / fp8_max(scaling.format)));
      if (out.codes != nullptr) quantize_block(x, block, scaling.format, code, out.codes);
      if (out.dequant_scale == nullptr) continue;
      if (by_row) {
        for (size_t i = 0; i < block.rows; ++i)
          out.dequant_scale[(r + i) * shape.cols + c / kMxBlock] = code;
      } else {
        for (size_t i = 0; i < block.cols; ++i)
          out.dequant_scale[r / kMxBlock * shape.cols + c + i] = code;
      }
    }
  }
}

}  // namespace

void mxfp8_quantize_reference(ConstRows x, const Fp8Scaling& scaling, Mxfp8Output row,
                              Mxfp8Output column, float* amax) {
  const cpu::ScopedFloatMode mode;
  quantize(x, scaling, MxDirection::row, row);
  quantize(x, scaling, MxDirection::column, column);
  if (amax != nullptr) *amax = amax_of(x, {0, x.rows, 0, x.cols});
}

}  // namespace tandem::kernels
