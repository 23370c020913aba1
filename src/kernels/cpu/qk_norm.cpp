// RMSNorm of the heads of queries and keys, each as a row.
#include "kernels/qk_norm.h"

#include <cstring>

#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/qk_norm.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"
#include "kernels/cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {

/// The layout of a row's heads, and the gamma of each.
struct NormedHeads {
  size_t head_dim, queries, count;
  const float *query_gamma, *key_gamma;

  HWY_INLINE const float* gamma(size_t head) const {
    return head < queries ? query_gamma : key_gamma;
  }
  HWY_INLINE size_t end() const { return count * head_dim; }
};

HWY_INLINE NormedHeads normed_heads(const QkNorm& norm) {
  const size_t head_dim = norm.query_weight.size, stride = scratch_stride(head_dim);
  const bool zero_centered = norm.options.zero_centered_gamma;
  float* const buffer = scratch(ScratchUse::parameters, 2 * stride);
  return {head_dim, norm.num_heads, norm.num_heads + norm.num_kv_heads,
          gamma_of(norm.query_weight, zero_centered, head_dim, buffer),
          gamma_of(norm.key_weight, zero_centered, head_dim, buffer + stride)};
}

/// Copies the columns from `begin` on, which hold values.
template <typename Stored>
HWY_INLINE void copy_rest(const Stored* from, size_t begin, size_t cols, Stored* to) {
  if (from != to && begin != cols)
    std::memcpy(static_cast<void*>(to + begin), static_cast<const void*>(from + begin),
                (cols - begin) * sizeof(Stored));
}

void qk_norm_forward_target(const QkNorm& norm, kernels::Rows y) {
  const ConstRows x = norm.x;
  const NormedHeads heads = normed_heads(norm);
  const size_t head_dim = heads.head_dim;
  const auto grain = static_cast<int64_t>(std::max<size_t>(1, kTaskElements / x.cols));
  with_element(x.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    parallel_for(0, static_cast<int64_t>(x.rows), grain, [&](int64_t first, int64_t last) HWY_ATTR {
      const ScopedFloatMode mode;
      for (auto r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r) {
        const auto* const from = E::at(x.data, r * x.stride);
        auto* const to = E::at(y.data, r * y.stride);
        for (size_t head = 0, c = 0; head < heads.count; ++head, c += head_dim) {
          const RowStatistics statistics =
              rms_statistics(element, from + c, head_dim, norm.options);
          with_rounding<false>(element, x.element, norm.options, [&](auto rounding) HWY_ATTR {
            normalize_row<false>(rounding, element, from + c, {heads.gamma(head), nullptr},
                                 statistics, head_dim, to + c);
          });
        }
        copy_rest(from, heads.end(), x.cols, to);
      }
    });
  });
}

/// The heads of a row are summed first, then their sum is added to the block's. A float32 sum so
/// has at most as many terms as a row has heads, or a block has rows.
void qk_norm_backward_target(const QkNorm& norm, ConstRows grad_y, kernels::Rows grad_x,
                             Vector grad_query_weight, Vector grad_key_weight) {
  const ConstRows x = norm.x;
  const NormedHeads heads = normed_heads(norm);
  const size_t head_dim = heads.head_dim, stride = scratch_stride(head_dim), cols = 2 * stride;
  const double divisor = divisor_of(norm.options, head_dim);
  const bool sums_weights = grad_query_weight || grad_key_weight;
  const PartialSums part{
      sums_weights ? scratch(ScratchUse::partial_sums, sum_blocks(x.rows) * cols) : nullptr, cols,
      sum_block_rows(x.rows)};
  with_element(x.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    for_each_row_summing(x.rows, part, [&](size_t r, float* sums) HWY_ATTR {
      const ScopedFloatMode mode;
      const auto* const from = E::at(x.data, r * x.stride);
      const auto* const grad = E::at(grad_y.data, r * grad_y.stride);
      auto* const to = grad_x ? E::at(grad_x.data, r * grad_x.stride) : nullptr;
      float* const of_row = sums != nullptr ? scratch(ScratchUse::rows, cols) : nullptr;
      if (sums != nullptr) std::fill_n(of_row, cols, 0.0f);
      for (size_t head = 0, c = 0; head < heads.count; ++head, c += head_dim) {
        const float* const gamma = heads.gamma(head);
        const RowStatistics statistics = rms_statistics(element, from + c, head_dim, norm.options);
        RowMeans means;
        if (sums != nullptr) {
          float* const of_weight = of_row + (head < heads.queries ? 0 : stride);
          with_rounding<false>(element, x.element, norm.options, [&](auto rounding) HWY_ATTR {
            means = sum_gradients<false, true>(rounding, element, grad + c, from + c, gamma,
                                               statistics, head_dim, divisor, of_weight, nullptr);
          });
        } else {
          means = sum_gradients<false, false>(Float32{}, element, grad + c, from + c, gamma,
                                              statistics, head_dim, divisor, nullptr, nullptr);
        }
        if (to != nullptr)
          write_grad_x<false, false>(element, grad + c, from + c, from + c, gamma, statistics,
                                     means, head_dim, to + c);
      }
      if (sums != nullptr) accumulate(of_row, sums, cols);
      if (to != nullptr) copy_rest(grad, heads.end(), x.cols, to);
    });
  });
  if (sums_weights) add_norm_sums(part, x.rows, grad_query_weight, grad_key_weight);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(qk_norm_forward_target);
HWY_EXPORT(qk_norm_backward_target);

void qk_norm_forward(const QkNorm& norm, Rows y) {
  HWY_DYNAMIC_DISPATCH(qk_norm_forward_target)(norm, y);
}

void qk_norm_backward(const QkNorm& norm, ConstRows grad_y, Rows grad_x, Vector grad_query_weight,
                      Vector grad_key_weight) {
  HWY_DYNAMIC_DISPATCH(qk_norm_backward_target)
  (norm, grad_y, grad_x, grad_query_weight, grad_key_weight);
}

}  // namespace tandem::kernels::cpu
#endif
