#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/targets.h"
#include "kernels/norm.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm_forward.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {

/// `mean` is null for RMSNorm.
template <bool kCentered>
HWY_INLINE void norm_forward(ConstRows x, ConstVector weight, ConstVector bias,
                             const NormOptions& options, Rows y, float* mean, float* inv_norm) {
  const size_t hidden = x.cols, stride = scratch_stride(hidden);
  const NormParameters parameters =
      norm_parameters(weight, bias, options.zero_centered_gamma, hidden);
  const int64_t grain =
      static_cast<int64_t>(std::max<size_t>(1, 16384 / std::max<size_t>(1, hidden)));
  with_element(x.element == y.element ? x.element : Element::float32, [&](auto element) HWY_ATTR {
    parallel_for(0, static_cast<int64_t>(x.rows), grain, [&](int64_t first, int64_t last) HWY_ATTR {
      const ScopedFloatMode mode;
      float* x_buffer = scratch(ScratchUse::rows, 2 * stride);
      float* y_buffer = x_buffer + stride;
      for (size_t r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r) {
        const RowStatistics statistics = row_statistics<kCentered>(x, r, options);
        const auto* x_row = row_to_read(element, x, r, x_buffer);
        auto* y_row = row_to_write(element, y, r, y_buffer);
        normalize_row<kCentered>(element, x_row, parameters, statistics, hidden, y_row);
        finish_row(element, y, r, y_buffer);
        if constexpr (kCentered) mean[r] = statistics.mean;
        inv_norm[r] = statistics.inv_norm;
      }
    });
  });
}

void rms_forward(ConstRows x, ConstVector weight, const NormOptions& options, Rows y,
                 float* inv_rms) {
  norm_forward<false>(x, weight, {}, options, y, nullptr, inv_rms);
}

void layer_forward(ConstRows x, ConstVector weight, ConstVector bias, const NormOptions& options,
                   Rows y, float* mean, float* inv_std) {
  norm_forward<true>(x, weight, bias, options, y, mean, inv_std);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(rms_forward);
HWY_EXPORT(layer_forward);

void rms_norm_forward(ConstRows x, ConstVector weight, const NormOptions& options, Rows y,
                      float* inv_rms) {
  HWY_DYNAMIC_DISPATCH(rms_forward)(x, weight, options, y, inv_rms);
}

void l2_norm_forward(ConstRows x, double eps, Rows y, float* inv_norm) {
  rms_norm_forward(x, {}, {.eps = eps, .sums = true}, y, inv_norm);
}

void layer_norm_forward(ConstRows x, ConstVector weight, ConstVector bias,
                        const NormOptions& options, Rows y, float* mean, float* inv_std) {
  HWY_DYNAMIC_DISPATCH(layer_forward)(x, weight, bias, options, y, mean, inv_std);
}

}  // namespace tandem::kernels::cpu
#endif
