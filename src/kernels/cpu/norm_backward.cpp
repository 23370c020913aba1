#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/targets.h"
#include "kernels/norm.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm_backward.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {

/// Processes one row at a time. Several rows together would share loads of gamma and the sums, but
/// their interleaved streams defeat the hardware's prefetching (1.7 times slower from memory).
template <bool kCentered, typename E>
HWY_INLINE void backward_row(E element, const NormBackward& a, NormParameters parameters, size_t r,
                             float* buffers, float* weight_sums, float* bias_sums) {
  const size_t hidden = a.x.cols, stride = scratch_stride(hidden);
  const float* gamma = parameters.gamma;
  const auto* grad_y = row_to_read(element, a.grad_y, r, buffers);
  const auto* x = row_to_read(element, a.x, r, buffers + stride);
  const RowStatistics statistics{kCentered ? a.mean[r] : 0.0f, a.inv_norm[r]};
  const double divisor = divisor_of(a.options, hidden);
  RowMeans means{};
  if (weight_sums != nullptr) {
    means = with_rounding<kCentered>(element, a.x.element, a.options, [&](auto rounding) HWY_ATTR {
      return sum_gradients<kCentered, true>(rounding, element, grad_y, x, gamma, statistics, hidden,
                                            divisor, weight_sums, bias_sums);
    });
  } else if (a.grad_x) {
    means = sum_gradients<kCentered, false>(Float32{}, element, grad_y, x, gamma, statistics,
                                            hidden, divisor, weight_sums, bias_sums);
  }
  float* result_buffer = buffers + 3 * stride;
  if (a.grad_x) {
    auto* grad_x = row_to_write(element, a.grad_x, r, result_buffer);
    if (a.grad_residual) {
      const auto* residual = row_to_read(element, a.grad_residual, r, buffers + 2 * stride);
      write_grad_x<kCentered, true>(element, grad_y, x, residual, gamma, statistics, means, hidden,
                                    grad_x);
    } else {
      write_grad_x<kCentered, false>(element, grad_y, x, x, gamma, statistics, means, hidden,
                                     grad_x);
    }
    finish_row(element, a.grad_x, r, result_buffer);
  }
  if (a.y) {
    auto* y = row_to_write(element, a.y, r, result_buffer);
    with_rounding<kCentered>(element, a.x.element, a.options, [&](auto rounding) HWY_ATTR {
      normalize_row<kCentered>(rounding, element, x, parameters, statistics, hidden, y);
    });
    finish_row(element, a.y, r, result_buffer);
  }
}

/// out[c] = sum over the blocks of partial_sums[block * distance + c], in the order of blocks,
/// rounded once.
HWY_INLINE void add_partial_sums(const float* partial_sums, size_t blocks, size_t distance,
                                 Vector out) {
  const FloatTag d;
  const size_t size = out.size;
  // Threads get whole groups of 64 columns, so that a column's lane does not depend on the ranges.
  const size_t groups = (size + 63) / 64;
  const int64_t grain =
      static_cast<int64_t>(std::max<size_t>(1, 512 / std::max<size_t>(1, blocks)));
  with_element(out.element, [&](auto element) HWY_ATTR {
    parallel_for(0, static_cast<int64_t>(groups), grain, [&](int64_t first, int64_t last) HWY_ATTR {
      const ScopedFloatMode mode;
      const size_t begin = static_cast<size_t>(first) * 64,
                   end = std::min(size, static_cast<size_t>(last) * 64);
      auto* to = decltype(element)::at(out.data, begin);
      for_each_vector(end - begin, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
        auto sum = hn::Zero(d);
        // Rows of partial sums are padded: whole vectors may be read.
        for (size_t block = 0; block < blocks; ++block) {
          sum = hn::Add(sum, hn::LoadU(d, partial_sums + block * distance + begin + i));
        }
        store_part(element, d, sum, to + i, part);
      });
    });
  });
}

/// Whether every operand has this element. If not, rows are converted to float32 in the cache.
HWY_INLINE bool all_are(const NormBackward& a, Element element) {
  return a.grad_y.element == element && a.x.element == element &&
         (!a.grad_residual || a.grad_residual.element == element) &&
         (!a.grad_x || a.grad_x.element == element) && (!a.y || a.y.element == element);
}

template <bool kCentered>
HWY_INLINE void norm_backward(const NormBackward& a, const PartialSums& part) {
  const size_t hidden = a.x.cols, stride = scratch_stride(hidden);
  const NormParameters parameters =
      norm_parameters(a.weight, a.bias, a.options.zero_centered_gamma, hidden);
  const size_t begin = part ? part.first : 0, all_end = begin + a.x.rows;
  const size_t block_rows =
      part ? part.block_rows : std::max<size_t>(1, 16384 / std::max<size_t>(1, hidden));
  const int64_t grain =
      static_cast<int64_t>(std::max<size_t>(1, 16384 / std::max<size_t>(1, block_rows * hidden)));
  with_element(
      all_are(a, a.x.element) ? a.x.element : Element::float32, [&](auto element) HWY_ATTR {
        auto run_blocks = [&](int64_t first, int64_t last) HWY_ATTR {
          const ScopedFloatMode mode;
          float* buffers = scratch(ScratchUse::rows, 4 * stride);
          for (size_t block = static_cast<size_t>(first); block < static_cast<size_t>(last);
               ++block) {
            float* weight_sums = part ? part.sums + block * part.cols : nullptr;
            float* bias_sums = part && kCentered ? weight_sums + stride : nullptr;
            const size_t top = block * block_rows, end = std::min(all_end, top + block_rows);
            if (part && top >= begin) std::fill_n(weight_sums, part.cols, 0.0f);
            for (size_t r = std::max(begin, top); r < end; ++r) {
              backward_row<kCentered>(element, a, parameters, r - begin, buffers, weight_sums,
                                      bias_sums);
            }
          }
        };
        parallel_for(static_cast<int64_t>(begin / block_rows),
                     static_cast<int64_t>((all_end + block_rows - 1) / block_rows), grain,
                     run_blocks);
      });
}

void some_rows_target(const NormBackward& a, const PartialSums& part) {
  if (a.mean == nullptr) {
    norm_backward<false>(a, part);
  } else {
    norm_backward<true>(a, part);
  }
}

void add_sums_target(const PartialSums& part, size_t rows, Vector grad_weight, Vector grad_bias) {
  const size_t blocks = (rows + part.block_rows - 1) / part.block_rows;
  if (grad_weight) add_partial_sums(part.sums, blocks, part.cols, grad_weight);
  if (grad_bias)
    add_partial_sums(part.sums + scratch_stride(grad_bias.size), blocks, part.cols, grad_bias);
}

/// Processes all rows.
void backward_target(const NormBackward& a, Vector grad_weight, Vector grad_bias) {
  PartialSums part;
  if (grad_weight || grad_bias) {
    const size_t rows = a.x.rows, cols = norm_sum_cols(a.x.cols, a.mean != nullptr);
    part = {scratch(ScratchUse::partial_sums, sum_blocks(rows) * cols), cols, sum_block_rows(rows)};
  }
  some_rows_target(a, part);
  if (part) add_sums_target(part, a.x.rows, grad_weight, grad_bias);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(some_rows_target);
HWY_EXPORT(add_sums_target);
HWY_EXPORT(backward_target);

void norm_backward(const NormBackward& norm, Vector grad_weight, Vector grad_bias) {
  HWY_DYNAMIC_DISPATCH(backward_target)(norm, grad_weight, grad_bias);
}

void some_rows_norm_backward(const NormBackward& rows, const PartialSums& part) {
  HWY_DYNAMIC_DISPATCH(some_rows_target)(rows, part);
}

void add_norm_sums(const PartialSums& part, size_t rows, Vector grad_weight, Vector grad_bias) {
  HWY_DYNAMIC_DISPATCH(add_sums_target)(part, rows, grad_weight, grad_bias);
}

}  // namespace tandem::kernels::cpu
#endif
