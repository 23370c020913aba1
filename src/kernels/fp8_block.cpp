// Scalar FP8 of blocks of 128: what the vector code must equal to the bit.
#include "kernels/fp8_block.h"

#include <algorithm>

#include "kernels/cpu/float_mode.h"
#include "kernels/quantize.h"
#include "kernels/scalar.h"

namespace tandem::kernels {
namespace {

void quantize(ConstRows x, const Fp8Scaling& scaling, Fp8BlockShape shape, Fp8BlockOutput out) {
  if (!out) return;
  const MatrixShape scales = fp8_block_scales(shape, x.rows, x.cols);
  if (out.dequant_scale != nullptr) std::fill_n(out.dequant_scale, scales.size(), 0.0f);
  const size_t high = shape == Fp8BlockShape::row ? 1 : kFp8Block,
               wide = shape == Fp8BlockShape::column ? 1 : kFp8Block;
  for (size_t r = 0; r < x.rows; r += high) {
    for (size_t c = 0; c < x.cols; c += wide) {
      const Block block{r, std::min(high, x.rows - r), c, std::min(wide, x.cols - c)};
      const float scale = scale_from_amax(amax_of(x, block), scaling, largest_of(x.element));
      for (size_t i = r; i < r + block.rows && out.codes != nullptr; ++i)
        for (size_t j = c; j < c + block.cols; ++j)
          out.codes[i * x.cols + j] = fp8_from_float(element_of(x, i, j) * scale, scaling.format);
      if (out.dequant_scale == nullptr) continue;
      const size_t at = shape == Fp8BlockShape::row ? c / kFp8Block * scales.cols + r
                                                    : r / kFp8Block * scales.cols + c / wide;
      out.dequant_scale[at] = cpu::divide(1.0f, scale);
    }
  }
}

}  // namespace

void fp8_block_quantize_reference(ConstRows x, const Fp8Scaling& scaling, Fp8BlockOutput row,
                                  Fp8BlockOutput column, Fp8BlockOutput square, float* amax) {
  const cpu::ScopedFloatMode mode;
  quantize(x, scaling, Fp8BlockShape::row, row);
  quantize(x, scaling, Fp8BlockShape::column, column);
  quantize(x, scaling, Fp8BlockShape::square, square);
  if (amax != nullptr) *amax = amax_of(x, {0, x.rows, 0, x.cols});
}

}  // namespace tandem::kernels
