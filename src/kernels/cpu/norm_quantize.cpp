#include <cfloat>

#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/targets.h"
#include "kernels/norm.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm_quantize.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/norm-inl.h"
#include "kernels/cpu/quantize-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {

/// Row `r` of y in its element: x_hat in float32, stored with one rounding, as the forward does it.
template <bool kCentered, typename E>
HWY_INLINE const typename E::Stored* make_row(E element, ConstRows x, size_t r,
                                              NormParameters parameters, RowStatistics statistics,
                                              float* buffers, typename E::Stored* y_row) {
  const size_t hidden = x.cols, stride = scratch_stride(hidden);
  if (x.element == E::kElement) {
    normalize_row<kCentered>(element, E::at(x.data, r * x.stride), parameters, statistics, hidden,
                             y_row);
    return y_row;
  }
  const float* x_row = row_to_read(Float32{}, x, r, buffers);
  float* wide = buffers + stride;
  normalize_row<kCentered>(Float32{}, x_row, parameters, statistics, hidden, wide);
  narrow(element, wide, hidden, y_row);
  return y_row;
}

/// One pass over x for the statistics and the amax of y, one that makes y again and converts it:
/// between them only the amax is kept.
template <bool kCentered>
HWY_INLINE void norm_quantize(ConstRows x, ConstVector weight, ConstVector bias,
                              const NormOptions& options, Element y_element,
                              const CurrentScaling& scaling, Rows y, float* mean, float* inv_norm,
                              Fp8Output out) {
  const size_t hidden = x.cols, stride = scratch_stride(hidden);
  const NormParameters parameters =
      norm_parameters(weight, bias, options.zero_centered_gamma, hidden);
  const int64_t grain =
      static_cast<int64_t>(std::max<size_t>(1, 16384 / std::max<size_t>(1, hidden)));
  const int64_t rows = static_cast<int64_t>(x.rows);
  SharedExtremes shared;
  with_element(y_element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    using Stored = typename E::Stored;
    parallel_for(0, rows, grain, [&](int64_t first, int64_t last) HWY_ATTR {
      const ScopedFloatMode mode;
      float* buffers = scratch(ScratchUse::rows, 3 * stride);
      auto* spare = reinterpret_cast<Stored*>(buffers + 2 * stride);
      Extremes extremes;
      for (size_t r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r) {
        const RowStatistics statistics = row_statistics<kCentered>(x, r, options);
        if constexpr (kCentered) mean[r] = statistics.mean;
        inv_norm[r] = statistics.inv_norm;
        Stored* y_row = y ? E::at(y.data, r * y.stride) : spare;
        look_at(element, make_row<kCentered>(element, x, r, parameters, statistics, buffers, y_row),
                hidden, extremes);
      }
      shared.add(extremes);
    });
    const float amax = value_of_bits(element, shared.get().amax_bits);
    const float quant_scale =
        scale_from_amax(amax, scaling.format, scaling.eps, scaling.power_of_two, FLT_MAX);
    const bool ordinary = is_ordinary(amax, shared.get().has_nan, quant_scale, scaling.format);
    *out.amax = amax;
    *out.dequant_scale = divide(1.0f, quant_scale);
    with_format(scaling.format, [&](auto format) HWY_ATTR {
      parallel_for(0, rows, grain, [&](int64_t first, int64_t last) HWY_ATTR {
        const ScopedFloatMode mode;
        float* buffers = scratch(ScratchUse::rows, 3 * stride);
        auto* spare = reinterpret_cast<Stored*>(buffers + 2 * stride);
        for (size_t r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r) {
          const RowStatistics statistics{kCentered ? mean[r] : 0.0f, inv_norm[r]};
          const Stored* y_row =
              y ? E::at(static_cast<const void*>(y.data), r * y.stride)
                : make_row<kCentered>(element, x, r, parameters, statistics, buffers, spare);
          quantize_row<format()>(element, y_row, hidden, quant_scale, ordinary,
                                 out.codes + r * hidden);
        }
      });
    });
  });
}

void rms_quantize(ConstRows x, ConstVector weight, const NormOptions& options, Element y_element,
                  const CurrentScaling& scaling, Rows y, float* inv_rms, Fp8Output out) {
  norm_quantize<false>(x, weight, {}, options, y_element, scaling, y, nullptr, inv_rms, out);
}

void layer_quantize(ConstRows x, ConstVector weight, ConstVector bias, const NormOptions& options,
                    Element y_element, const CurrentScaling& scaling, Rows y, float* mean,
                    float* inv_std, Fp8Output out) {
  norm_quantize<true>(x, weight, bias, options, y_element, scaling, y, mean, inv_std, out);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(rms_quantize);
HWY_EXPORT(layer_quantize);

void rms_norm_quantize(ConstRows x, ConstVector weight, const NormOptions& options,
                       Element y_element, const CurrentScaling& scaling, Rows y, float* inv_rms,
                       Fp8Output out) {
  HWY_DYNAMIC_DISPATCH(rms_quantize)(x, weight, options, y_element, scaling, y, inv_rms, out);
}

void layer_norm_quantize(ConstRows x, ConstVector weight, ConstVector bias,
                         const NormOptions& options, Element y_element,
                         const CurrentScaling& scaling, Rows y, float* mean, float* inv_std,
                         Fp8Output out) {
  HWY_DYNAMIC_DISPATCH(layer_quantize)
  (x, weight, bias, options, y_element, scaling, y, mean, inv_std, out);
}

}  // namespace tandem::kernels::cpu
#endif
