#include "kernels/mxfp8.h"

#include "kernels/cpu/padding.h"
#include "kernels/cpu/targets.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/mxfp8.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/mxfp8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {

void quantize(const Input& x, const Fp8Scaling& scaling, Mxfp8Output row, Mxfp8Output column,
              float* amax) {
#if TANDEM_HAS_ELEMENT_PAIRS
  const ConstRows whole = whole_of(x);
  with_element(whole.element, [&](auto element) HWY_ATTR {
    with_format(scaling.format, [&](auto format) HWY_ATTR {
      const float largest = quantize_input(
          element, x, MxTiles<format()>(whole, scaling.options.square_blocks, row, column));
      if (amax != nullptr) *amax = largest;
    });
  });
#else
  // Pairs of vectors need more than one lane. Without them the reference is as fast.
  with_whole(x,
             [&](ConstRows whole) { mxfp8_quantize_reference(whole, scaling, row, column, amax); });
#endif
}

bool takes_bands() { return TANDEM_HAS_ELEMENT_PAIRS != 0; }

void dequantize_blocks(const uint8_t* codes, const uint8_t* dequant_scale, Fp8Format format,
                       MxDirection direction, Rows y) {
  const size_t stride = mx_scale_shape(direction, y.rows, y.cols).cols;
  with_format(format, [&](auto kind) HWY_ATTR {
    for_each_row(y, [&](auto element, auto* to, size_t r) HWY_ATTR {
      const uint8_t* from = codes + r * y.cols;
      if (direction == MxDirection::column)
        return dequantize_columns<kind()>(element, from, y.cols,
                                          dequant_scale + r / kMxBlock * stride, to);
      for (size_t c = 0; c < y.cols; c += kMxBlock) {
        const float factor = float_from_e8m0(dequant_scale[r * stride + c / kMxBlock]);
        dequantize_row<kind()>(element, from + c, std::min(kMxBlock, y.cols - c), factor, to + c);
      }
    });
  });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {
HWY_EXPORT(quantize);
HWY_EXPORT(takes_bands);
HWY_EXPORT(dequantize_blocks);

namespace {

void clear_paddings(ConstRows x, const Mxfp8Output& row, const Mxfp8Output& column) {
  const auto blocks = [](size_t n) { return (n + kMxBlock - 1) / kMxBlock; };
  clear_padding(row.dequant_scale, mx_scale_shape(MxDirection::row, x.rows, x.cols), x.rows,
                blocks(x.cols));
  clear_padding(column.dequant_scale, mx_scale_shape(MxDirection::column, x.rows, x.cols),
                blocks(x.rows), x.cols);
}

}  // namespace

void mxfp8_quantize(const Input& x, const Fp8Scaling& scaling, Mxfp8Output row, Mxfp8Output column,
                    float* amax) {
  if (has_first_rows(x)) clear_paddings(whole_of(x), row, column);
  HWY_DYNAMIC_DISPATCH(quantize)(x, scaling, row, column, amax);
}

bool takes_bands_of_blocks() { return HWY_DYNAMIC_DISPATCH(takes_bands)(); }

void mxfp8_dequantize(const uint8_t* codes, const uint8_t* dequant_scale, Fp8Format format,
                      MxDirection direction, Rows y) {
  HWY_DYNAMIC_DISPATCH(dequantize_blocks)(codes, dequant_scale, format, direction, y);
}

}  // namespace tandem::kernels::cpu
#endif
