// Rows of RMSNorm and LayerNorm. `kCentered` selects LayerNorm, which subtracts the mean. Included
// once per Highway target.

#if defined(TANDEM_KERNELS_CPU_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_NORM_INL_H_
#undef TANDEM_KERNELS_CPU_NORM_INL_H_
#else
#define TANDEM_KERNELS_CPU_NORM_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/cpu/element-inl.h"
#include "kernels/cpu/scratch.h"
#include "kernels/norm.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;

/// The distance of two scratch rows, in floats.
HWY_INLINE size_t scratch_stride(size_t hidden) { return norm_sum_cols(hidden, false); }

/// The parameters as float32, with neutral values for absent ones.
struct NormParameters {
  const float* gamma;
  const float* bias;
};

/// gamma as float32: `weight` itself if it is gamma, else computed in `buffer`, which must have
/// room for `hidden` floats; ones if there is no weight.
HWY_INLINE const float* gamma_of(ConstVector weight, bool zero_centered_gamma, size_t hidden,
                                 float* buffer) {
  const FloatTag d;
  const float* gamma = as_float32(weight, buffer);
  if (weight && !zero_centered_gamma) return gamma;
  const auto one = hn::Set(d, 1.0f);
  for_each_vector(hidden, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto value = weight ? hn::Add(load_part(Float32{}, d, gamma + i, part), one) : one;
    store_part(Float32{}, d, value, buffer + i, part);
  });
  return buffer;
}

HWY_INLINE NormParameters norm_parameters(ConstVector weight, ConstVector bias,
                                          bool zero_centered_gamma, size_t hidden) {
  float* buffer = scratch(ScratchUse::parameters, 2 * scratch_stride(hidden));
  float* bias_buffer = buffer + scratch_stride(hidden);
  const float* gamma = gamma_of(weight, zero_centered_gamma, hidden, buffer);
  if (!bias) std::fill_n(bias_buffer, hidden, 0.0f);
  return {gamma, bias ? as_float32(bias, bias_buffer) : bias_buffer};
}

/// Starts to bring row `r`, if it exists, into the cache. Writing a row leaves reads of memory
/// idle, and the hardware prefetches nothing beyond a row's 4 KiB page.
HWY_INLINE void fetch_row(ConstRows matrix, size_t r) {
  if (!matrix || r >= matrix.rows) return;
  with_element(matrix.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    constexpr size_t kLine = 64 / sizeof(typename E::Stored);
    const auto* row = E::at(matrix.data, r * matrix.stride);
    for (size_t c = 0; c < matrix.cols; c += kLine) hwy::Prefetch(row + c);
  });
}

/// Row `r` as elements E: in place if the matrix has them, else converted into `buffer` (then E is
/// Float32).
template <typename E>
HWY_INLINE const typename E::Stored* row_to_read(E, ConstRows matrix, size_t r, float* buffer) {
  if (matrix.element == E::kElement) return E::at(matrix.data, r * matrix.stride);
  if constexpr (E::kElement == Element::float32) {
    with_element(matrix.element, [&](auto element) HWY_ATTR {
      widen(element, decltype(element)::at(matrix.data, r * matrix.stride), matrix.cols, buffer);
    });
    return buffer;
  }
  return nullptr;
}

/// Where to write row `r` as elements E. If that is `buffer`, finish_row converts it.
template <typename E>
HWY_INLINE typename E::Stored* row_to_write(E, Rows matrix, size_t r, float* buffer) {
  if (matrix.element == E::kElement) return E::at(matrix.data, r * matrix.stride);
  return reinterpret_cast<typename E::Stored*>(buffer);
}

template <typename E>
HWY_INLINE void finish_row(E, Rows matrix, size_t r, const float* buffer) {
  if (matrix.element == E::kElement) return;
  with_element(matrix.element, [&](auto element) HWY_ATTR {
    narrow(element, buffer, matrix.cols, decltype(element)::at(matrix.data, r * matrix.stride));
  });
}

template <typename Body, size_t... kIndices>
HWY_INLINE void unrolled(std::index_sequence<kIndices...>, Body& body) {
  (body(std::integral_constant<size_t, kIndices>()), ...);
}

/// Calls `body(std::integral_constant<size_t, i>())` for i < kCount, unrolled, so that arrays of
/// vectors indexed by i stay in registers.
template <size_t kCount, typename Body>
HWY_INLINE void unrolled(Body&& body) {
  unrolled(std::make_index_sequence<kCount>(), body);
}

/// totals[s] = the sum of all lanes of sums[s], to which `body(i, part, sums)` adds. A lane takes
/// at most kSteps + 1 additions in float32 before its sum is added to a float64, so the error does
/// not grow with the length.
template <size_t kSums, size_t kUnroll, size_t kSteps, typename Body>
HWY_INLINE void sum_row(size_t count, double (&totals)[kSums], Body&& body) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d), stride = kUnroll * lanes;
  for (size_t s = 0; s < kSums; ++s) totals[s] = 0.0;
  size_t i = 0;
  while (i < count) {
    FloatVector sums[kUnroll][kSums];
    unrolled<kUnroll * kSums>(
        [&](auto k) TANDEM_INLINE_LAMBDA { sums[k / kSums][k % kSums] = hn::Zero(d); });
    const size_t end = i + std::min((count - i) / stride, kSteps) * stride;
    for (; i < end; i += stride) {
      unrolled<kUnroll>([&](auto u)
                            TANDEM_INLINE_LAMBDA { body(i + u * lanes, Whole{}, sums[u]); });
    }
    if (count - i < stride) {
      for (; i + lanes <= count; i += lanes) body(i, Whole{}, sums[0]);
      if (i < count) body(i, count - i, sums[kUnroll - 1]);
      i = count;
    }
    unrolled<kSums>([&](auto s) TANDEM_INLINE_LAMBDA {
      auto sum = sums[0][s];
      unrolled<kUnroll - 1>([&](auto u)
                                TANDEM_INLINE_LAMBDA { sum = hn::Add(sum, sums[u + 1][s]); });
      totals[s] += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
    });
  }
}

struct RowStatistics {
  /// 0 for RMSNorm.
  float mean;
  /// inv_rms or inv_std.
  float inv_norm;
};

/// Loads two vectors of adjacent elements, in an order that only a sum over all of them may use.
template <typename E>
HWY_INLINE void load_pair(E element, const typename E::Stored* HWY_RESTRICT p, FloatVector& first,
                          FloatVector& second) {
  const FloatTag d;
  if constexpr (E::kElement == Element::bfloat16 && HWY_TARGET != HWY_SCALAR) {
    // Even and odd elements cost one instruction each; widening in order would cost two.
    const hn::RebindToUnsigned<FloatTag> du;
    const hn::Repartition<uint16_t, FloatTag> d16;
    const auto words = hn::BitCast(du, hn::LoadU(d16, p));
    first = hn::BitCast(d, hn::ShiftLeft<16>(words));
    second = hn::BitCast(d, hn::And(words, hn::Set(du, 0xFFFF0000u)));
  } else {
    first = load(element, d, p);
    second = load(element, d, p + hn::Lanes(d));
  }
}

/// totals[s] = the sum of all lanes of sums[s], to which `term(v, sums)` adds for all vectors v of
/// the row, in no particular order. Lanes beyond the end hold `pad`. As in sum_row, float64 takes
/// over after at most 17 additions per lane.
template <size_t kSums, typename E, typename Term>
HWY_INLINE void sum_terms(E element, const typename E::Stored* HWY_RESTRICT x, size_t count,
                          float pad, double (&totals)[kSums], Term&& term) {
  const FloatTag d;
  const size_t lanes = hn::Lanes(d), stride = 4 * lanes;
  for (size_t s = 0; s < kSums; ++s) totals[s] = 0.0;
  size_t i = 0;
  while (i < count) {
    FloatVector sums[4][kSums];
    unrolled<4 * kSums>([&](auto k)
                            TANDEM_INLINE_LAMBDA { sums[k / kSums][k % kSums] = hn::Zero(d); });
    const size_t end = i + std::min<size_t>((count - i) / stride, 16) * stride;
    for (; i < end; i += stride) {
      FloatVector v0, v1, v2, v3;
      load_pair(element, x + i, v0, v1);
      load_pair(element, x + i + 2 * lanes, v2, v3);
      term(v0, sums[0]);
      term(v1, sums[1]);
      term(v2, sums[2]);
      term(v3, sums[3]);
    }
    if (count - i < stride) {
      for (; i + lanes <= count; i += lanes) term(load(element, d, x + i), sums[0]);
      if (i < count) {
        const auto v = load_first(element, d, x + i, count - i);
        term(hn::IfThenElse(hn::FirstN(d, count - i), v, hn::Set(d, pad)), sums[3]);
      }
      i = count;
    }
    unrolled<kSums>([&](auto s) TANDEM_INLINE_LAMBDA {
      const auto sum = hn::Add(hn::Add(sums[0][s], sums[1][s]), hn::Add(sums[2][s], sums[3][s]));
      totals[s] += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
    });
  }
}

/// The divisor of a sum over a row.
HWY_INLINE double divisor_of(const NormOptions& options, size_t hidden) {
  return options.sums ? 1.0 : static_cast<double>(std::max<size_t>(hidden, 1));
}

/// The statistics of RMSNorm: 1 / sqrt(mean(x^2) + eps), or with the sum instead of the mean.
template <typename E>
HWY_NOINLINE RowStatistics rms_statistics(E element, const typename E::Stored* HWY_RESTRICT x,
                                          size_t hidden, const NormOptions& options) {
  double total[1];
  sum_terms(element, x, hidden, 0.0f, total,
            [](auto v, FloatVector(&sums)[1])
                TANDEM_INLINE_LAMBDA { sums[0] = hn::MulAdd(v, v, sums[0]); });
  return {0.0f, static_cast<float>(
                    1.0 / std::sqrt(total[0] / divisor_of(options, hidden) + options.eps))};
}

/// The mean and 1 / sqrt(variance + eps). Each part of the row is read twice, for its mean and for
/// the differences from it, so nothing cancels; the parts are combined in float64. For float32,
/// parts are short, so that the second read of a part overlaps with loading the next part from
/// memory. 16-bit rows come from memory faster than they are computed, and are one part.
template <typename E>
HWY_NOINLINE RowStatistics layer_statistics(E element, const typename E::Stored* HWY_RESTRICT x,
                                            size_t hidden, double eps) {
  constexpr bool kParts = E::kElement == Element::float32;
  const size_t part = kParts ? 256 : std::max<size_t>(hidden, 1);
  const double n = static_cast<double>(std::max<size_t>(hidden, 1));
  // Sums of x - origin over all elements, of squared differences within parts, and of squared
  // distances between parts.
  double origin = 0.0, sum = 0.0, squares_within = 0.0, squares_between = 0.0;
  for (size_t begin = 0; begin < hidden; begin += part) {
    const size_t count = std::min(part, hidden - begin);
    const double part_n = static_cast<double>(count);
    double total[1], differences[kParts ? 2 : 1];
    sum_terms(element, x + begin, count, 0.0f, total,
              [](auto v, FloatVector(&sums)[1])
                  TANDEM_INLINE_LAMBDA { sums[0] = hn::Add(sums[0], v); });
    const float center = static_cast<float>(total[0] / part_n);
    const auto center_vector = hn::Set(FloatTag(), center);
    sum_terms(element, x + begin, count, center, differences,
              [&](auto v, auto& sums) TANDEM_INLINE_LAMBDA {
                const auto difference = hn::Sub(v, center_vector);
                sums[0] = hn::MulAdd(difference, difference, sums[0]);
                if constexpr (kParts) sums[1] = hn::Add(sums[1], difference);
              });
    // The distance of the part's mean from `center`. It is needed more exactly than the float32
    // sums give it, because distances between means count as variance.
    const double off =
        (kParts ? differences[kParts] : total[0] - part_n * static_cast<double>(center)) / part_n;
    const double part_mean = static_cast<double>(center) + off;
    if (begin == 0) origin = part_mean;
    const double distance = part_mean - origin;
    sum += part_n * distance;
    squares_within += differences[0] - part_n * off * off;
    squares_between += part_n * distance * distance;
  }
  const double from_origin = sum / n;
  const double variance = (squares_within + squares_between - sum * from_origin) / n;
  // max keeps NaN, its first argument, and replaces what rounding makes negative. Squares that
  // overflowed make the row NaN: the inverse root would be 0, as for a row of equal numbers.
  const double spread = std::isinf(variance) ? NAN : std::max(variance, 0.0);
  return {static_cast<float>(origin + from_origin),
          static_cast<float>(1.0 / std::sqrt(spread + eps))};
}

/// The statistics of row `r`, always from the matrix itself and never from a converted row: pairs
/// of bfloat16 are added in another order than float32, and every kernel must find equal
/// statistics.
template <bool kCentered>
HWY_INLINE RowStatistics row_statistics(ConstRows x, size_t r, const NormOptions& options) {
  return with_element(x.element, [&](auto element) HWY_ATTR {
    const auto* row = decltype(element)::at(x.data, r * x.stride);
    if constexpr (kCentered) return layer_statistics(element, row, x.cols, options.eps);
    return rms_statistics(element, row, x.cols, options);
  });
}

/// x_hat = (x - mean) * inv_norm.
template <bool kCentered>
HWY_INLINE FloatVector normalized(FloatVector x, FloatVector mean, FloatVector inv_norm) {
  if constexpr (kCentered) return hn::Mul(hn::Sub(x, mean), inv_norm);
  return hn::Mul(x, inv_norm);
}

/// Calls `body` with the element to which x_hat of a row of `x` is rounded before it is multiplied
/// by gamma; Float32 if it is not rounded. `E` is the element as which rows are read.
template <bool kCentered, typename E, typename Body>
HWY_INLINE decltype(auto) with_rounding(E, Element x, const NormOptions& options, Body&& body) {
  if constexpr (!kCentered) {
    if (options.rounds_before_weight) {
      if constexpr (E::kElement == Element::float32) return with_element(x, body);
      return body(E{});
    }
  }
  return body(Float32{});
}

/// y = x_hat * gamma (+ bias). Forward and backward both call this function, so their bits are
/// equal.
template <bool kCentered, typename R, typename E>
HWY_NOINLINE void normalize_row(R rounding, E element, const typename E::Stored* HWY_RESTRICT x,
                                NormParameters parameters, RowStatistics statistics, size_t hidden,
                                typename E::Stored* HWY_RESTRICT y) {
  const FloatTag d;
  const auto mean = hn::Set(d, statistics.mean), inv_norm = hn::Set(d, statistics.inv_norm);
  write_row(element, hidden, y, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto x_hat = round_to(
        rounding, d, normalized<kCentered>(load_part(element, d, x + i, part), mean, inv_norm));
    const auto gamma = load_part(Float32{}, d, parameters.gamma + i, part);
    if constexpr (kCentered) {
      return hn::MulAdd(x_hat, gamma, load_part(Float32{}, d, parameters.bias + i, part));
    } else {
      return hn::Mul(x_hat, gamma);
    }
  });
}

/// The two means that grad_x of one row needs (for L2, sums). mean(g) is 0 for RMSNorm.
struct RowMeans {
  float g, g_x_hat;
};

/// The means of g and g * x_hat. With kColumnSums also weight_sums += grad_y * x_hat, with x_hat
/// rounded as in forward, and, for LayerNorm, bias_sums += grad_y.
template <bool kCentered, bool kColumnSums, typename R, typename E>
HWY_NOINLINE RowMeans sum_gradients(R rounding, E element,
                                    const typename E::Stored* HWY_RESTRICT grad_y,
                                    const typename E::Stored* HWY_RESTRICT x,
                                    const float* HWY_RESTRICT gamma, RowStatistics statistics,
                                    size_t hidden, double divisor, float* HWY_RESTRICT weight_sums,
                                    float* HWY_RESTRICT bias_sums) {
  constexpr size_t kSums = kCentered ? 2 : 1;
  const FloatTag d;
  const auto mean = hn::Set(d, statistics.mean), inv_norm = hn::Set(d, statistics.inv_norm);
  double totals[kSums];
  sum_row<kSums, 4, 16>(
      hidden, totals, [&](size_t i, auto part, FloatVector(&sums)[kSums]) TANDEM_INLINE_LAMBDA {
        const auto grad_y_i = load_part(element, d, grad_y + i, part),
                   gamma_i = load_part(Float32{}, d, gamma + i, part);
        const auto x_hat =
            normalized<kCentered>(load_part(element, d, x + i, part), mean, inv_norm);
        const auto product = hn::Mul(grad_y_i, x_hat);
        sums[0] = hn::MulAdd(product, gamma_i, sums[0]);
        if constexpr (kCentered) sums[1] = hn::MulAdd(grad_y_i, gamma_i, sums[1]);
        if constexpr (kColumnSums) {
          const auto of_weight = hn::Mul(grad_y_i, round_to(rounding, d, x_hat));
          store_part(Float32{}, d,
                     hn::Add(load_part(Float32{}, d, weight_sums + i, part), of_weight),
                     weight_sums + i, part);
          if constexpr (kCentered) {
            store_part(Float32{}, d,
                       hn::Add(load_part(Float32{}, d, bias_sums + i, part), grad_y_i),
                       bias_sums + i, part);
          }
        }
      });
  const double per_element = 1.0 / divisor;
  return {kCentered ? static_cast<float>(totals[kSums - 1] * per_element) : 0.0f,
          static_cast<float>(totals[0] * per_element)};
}

/// grad_x = inv_norm * (g - mean(g) - x_hat * mean(g * x_hat)) (+ grad_residual).
template <bool kCentered, bool kResidual, typename E>
HWY_NOINLINE void write_grad_x(E element, const typename E::Stored* HWY_RESTRICT grad_y,
                               const typename E::Stored* HWY_RESTRICT x,
                               const typename E::Stored* HWY_RESTRICT grad_residual,
                               const float* HWY_RESTRICT gamma, RowStatistics statistics,
                               RowMeans means, size_t hidden,
                               typename E::Stored* HWY_RESTRICT grad_x) {
  const FloatTag d;
  const auto mean = hn::Set(d, statistics.mean), inv_norm = hn::Set(d, statistics.inv_norm);
  const auto mean_g = hn::Set(d, means.g), mean_g_x_hat = hn::Set(d, means.g_x_hat);
  write_row(element, hidden, grad_x, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto x_hat = normalized<kCentered>(load_part(element, d, x + i, part), mean, inv_norm);
    auto g =
        hn::Mul(load_part(element, d, grad_y + i, part), load_part(Float32{}, d, gamma + i, part));
    if constexpr (kCentered) g = hn::Sub(g, mean_g);
    const auto inner = hn::NegMulAdd(x_hat, mean_g_x_hat, g);
    const auto grad = hn::Mul(inv_norm, inner);
    if constexpr (kResidual) {
      return hn::Add(grad, load_part(element, d, grad_residual + i, part));
    } else {
      return grad;
    }
  });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_NORM_INL_H_
