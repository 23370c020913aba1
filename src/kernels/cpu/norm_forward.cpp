#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/targets.h"
#include "kernels/norm.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm_forward.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"
#include "kernels/cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {

/// Computes row r of a sum and returns it as a matrix in which every row is that row.
class SumRow {
 public:
  SumRow(const NormForward& norm, float* buffer)
      : x_(norm.x),
        extra_(norm.extra),
        element_(norm.sum_element),
        sum_(norm.sum),
        buffer_(buffer) {}

  HWY_INLINE void fetch(size_t r) const {
    fetch_row(x_, r);
    fetch_row(extra_, r);
  }

  HWY_INLINE ConstRows operator()(size_t r) const {
    return with_element(element_, [&](auto element) HWY_ATTR {
      using E = decltype(element);
      const Rows row{sum_ ? static_cast<void*>(E::at(sum_.data, r * sum_.stride)) : buffer_,
                     element_, 1, x_.cols, 0};
      if (x_.element == element_ && extra_.element == element_) {
        const hn::ScalableTag<float> d;
        const auto *a = E::at(x_.data, r * x_.stride), *b = E::at(extra_.data, r * extra_.stride);
        write_row(element, x_.cols, E::at(row.data, 0),
                  [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
                    return hn::Add(load_part(element, d, a + i, part),
                                   load_part(element, d, b + i, part));
                  });
      } else {
        for_each_chunk(x_.cols, [&](size_t c, size_t count) HWY_ATTR {
          HWY_ALIGN float sums[kChunk], more[kChunk];
          const float* from = widened(x_, r, c, count, sums);
          if (from != sums) std::copy_n(from, count, sums);
          accumulate(widened(extra_, r, c, count, more), sums, count);
          put_narrowed(sums, row, 0, c, count);
        });
      }
      return ConstRows(row);
    });
  }

 private:
  ConstRows x_, extra_;
  Element element_;
  Rows sum_;
  float* buffer_;
};

/// Returns the rows of a matrix unchanged.
class PlainRow {
 public:
  explicit PlainRow(ConstRows x) : x_(x) {}
  HWY_INLINE void fetch(size_t r) const { fetch_row(x_, r); }
  HWY_INLINE ConstRows operator()(size_t) const { return x_; }

 private:
  ConstRows x_;
};

/// `source(x_buffer)` returns an object that prefetches row r (`fetch`) and that returns a matrix
/// with row r, whose element is `x_element`.
template <bool kCentered, typename Source>
HWY_INLINE void normalize(const NormForward& norm, Element x_element, const Source& source) {
  const NormOptions& options = norm.options;
  const Rows y = norm.y;
  const size_t rows = norm.x.rows, hidden = norm.x.cols, stride = scratch_stride(hidden);
  const NormParameters parameters =
      norm_parameters(norm.weight, norm.bias, options.zero_centered_gamma, hidden);
  const int64_t grain =
      static_cast<int64_t>(std::max<size_t>(1, 16384 / std::max<size_t>(1, hidden)));
  with_element(x_element == y.element ? x_element : Element::float32, [&](auto element) HWY_ATTR {
    parallel_for(0, static_cast<int64_t>(rows), grain, [&](int64_t first, int64_t last) HWY_ATTR {
      const ScopedFloatMode mode;
      float* x_buffer = scratch(ScratchUse::rows, 3 * stride);
      float* y_buffer = x_buffer + stride;
      const auto row_of = source(y_buffer + stride);
      for (size_t r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r) {
        const ConstRows x = row_of(r);
        const RowStatistics statistics = row_statistics<kCentered>(x, r, options);
        const auto* x_row = row_to_read(element, x, r, x_buffer);
        auto* y_row = row_to_write(element, y, r, y_buffer);
        row_of.fetch(r + 1);
        with_rounding<kCentered>(element, x_element, options, [&](auto rounding) HWY_ATTR {
          normalize_row<kCentered>(rounding, element, x_row, parameters, statistics, hidden, y_row);
        });
        finish_row(element, y, r, y_buffer);
        if constexpr (kCentered) norm.mean[r] = statistics.mean;
        norm.inv_norm[r] = statistics.inv_norm;
      }
    });
  });
}

void forward_target(const NormForward& norm) {
  const auto run = [&](Element x_element, const auto& source) HWY_ATTR {
    if (norm.mean == nullptr) {
      normalize<false>(norm, x_element, source);
    } else {
      normalize<true>(norm, x_element, source);
    }
  };
  if (norm.extra) {
    run(norm.sum_element, [&](float* buffer) { return SumRow(norm, buffer); });
  } else {
    run(norm.x.element, [&](float*) { return PlainRow(norm.x); });
  }
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(forward_target);

void norm_forward(const NormForward& norm) { HWY_DYNAMIC_DISPATCH(forward_target)(norm); }

}  // namespace tandem::kernels::cpu
#endif
