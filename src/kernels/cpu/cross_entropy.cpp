#include "kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/targets.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cross_entropy.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"
#include "kernels/cpu/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {

/// exp(z - largest), 0 if that is below float32. Reads and writes packs of float32 in one buffer.
struct Exponentials {
  template <size_t N, typename Part>
  HWY_INLINE void run(size_t i, Part part) const {
    const Pack<N> below = Pack<N>(largest) - load_pack<N>(Float32{}, z + i, part);
    const Pack<N> e = exp_negated(at_most(87.0f, below));
    const auto limit = hn::Set(hn::ScalableTag<float>(), 87.0f);
    store_pack(
        Float32{},
        each([&](auto value, auto at)
                 TANDEM_INLINE_LAMBDA { return hn::IfThenZeroElse(hn::Gt(at, limit), value); },
             e, below),
        to + i, part);
  }
  float largest;
  const float* z;
  float* to;
};

/// z = cap tanh(z / cap)
struct Cap {
  template <size_t N, typename Part>
  HWY_INLINE void run(size_t i, Part part) const {
    const Pack<N> inner = load_pack<N>(Float32{}, z + i, part) * Pack<N>(1 / cap);
    store_pack(Float32{}, Pack<N>(cap) * tanh_of(inner), z + i, part);
  }
  float cap;
  float* z;
};

/// The sum of values[i] * weights[i]; nullptr weights are ones.
HWY_INLINE double weighted_sum(const float* values, const float* weights, size_t count) {
  const hn::ScalableTag<float> d;
  auto sum = hn::Zero(d);
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto value = load_part(Float32{}, d, values + i, part);
    sum = weights == nullptr ? hn::Add(sum, value)
                             : hn::MulAdd(value, load_part(Float32{}, d, weights + i, part), sum);
  });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

/// The largest value, ignoring NaN.
HWY_INLINE float largest_of(const float* values, size_t count) {
  const hn::ScalableTag<float> d;
  auto largest = hn::Set(d, -std::numeric_limits<float>::infinity());
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    const auto value = hn::LoadU(d, values + i);
    largest = hn::IfThenElse(hn::Gt(value, largest), value, largest);  // Max may return NaN
  }
  float found = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < count; ++i) found = std::max(found, values[i]);
  return found;
}

/// to[i] = exponentials[i] * scale - smoothing * weights[i], times the slope of the cap at z[i].
HWY_INLINE void gradients_of(const float* exponentials, float scale, float smoothing,
                             const float* weights, float cap, const float* z, size_t count,
                             float* to) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    auto value = hn::Mul(load_part(Float32{}, d, exponentials + i, part), hn::Set(d, scale));
    if (smoothing != 0) {
      const auto weight =
          weights == nullptr ? hn::Set(d, 1.0f) : load_part(Float32{}, d, weights + i, part);
      value = hn::NegMulAdd(hn::Set(d, smoothing), weight, value);
    }
    if (cap != 0) {
      const auto share = hn::Mul(load_part(Float32{}, d, z + i, part), hn::Set(d, 1 / cap));
      value = hn::Mul(value, hn::NegMulAdd(share, share, hn::Set(d, 1.0f)));
    }
    store_part(Float32{}, d, value, to + i, part);
  });
}

/// The number that is subtracted from z before the exponential.
float reference_of(double largest) {
  return std::isinf(largest) && largest < 0 ? 0 : static_cast<float>(largest);
}

/// One row: its z in float32, and what is computed from it.
class LogitsRow {
 public:
  /// `buffer` has room for a row of float32; `bias` is float32 or nullptr.
  LogitsRow(const CrossEntropy& rows, size_t r, const float* bias, float* buffer)
      : rows_(rows), r_(r), cols_(rows.logits.cols) {
    const auto cap = static_cast<float>(rows.options.soft_cap);
    const bool is_as_stored =
        rows.logits.element == Element::float32 && bias == nullptr && cap == 0;
    z_ = is_as_stored ? static_cast<const float*>(rows.logits.data) + r * rows.logits.stride
                      : buffer;
    if (is_as_stored) return;
    for_each_chunk(cols_, [&](size_t c, size_t count) HWY_ATTR {
      float* const to = buffer + c;
      const float* const from = widened(rows.logits, r, c, count, to);
      if (from != to) std::copy_n(from, count, to);
      if (bias != nullptr) accumulate(bias + c, to, count);
      if (cap != 0) for_each_pack(count, Cap{cap, to});
    });
  }

  LogitsSums sums() const {
    LogitsSums sums;
    float largest = -std::numeric_limits<float>::infinity();
    const bool smooths = rows_.options.label_smoothing != 0;
    for_each_chunk(cols_, [&](size_t c, size_t count) HWY_ATTR {
      largest = std::max(largest, largest_of(z_ + c, count));
      if (smooths) sums.weighted += weighted_sum(z_ + c, weights_at(c), count);
    });
    sums.largest = largest;
    HWY_ALIGN float exponentials[kChunk];
    for_each_chunk(cols_, [&](size_t c, size_t count) HWY_ATTR {
      for_each_pack(count, Exponentials{reference_of(largest), z_ + c, exponentials});
      sums.exponentials += weighted_sum(exponentials, nullptr, count);
    });
    if (has_target()) {
      sums.target = z_[target()];
      sums.target_weight = rows_.class_weight == nullptr ? 1 : rows_.class_weight[target()];
    }
    if (rows_.best != nullptr) {
      const float* const found = std::find(z_, z_ + cols_, largest);
      sums.best = found == z_ + cols_ ? 0 : static_cast<double>(found - z_);
    }
    return sums;
  }

  /// Computes loss and gradient. `classes`: the number of classes; `all_weights`: the sum of their
  /// weights.
  void finish(const LogitsSums& sums, double classes, double all_weights) const {
    const CrossEntropyOptions& options = rows_.options;
    const double on_target = (1 - options.label_smoothing) * sums.target_weight,
                 on_each = options.label_smoothing / classes,
                 reference = reference_of(sums.largest), log_sum = std::log(sums.exponentials),
                 all = reference + log_sum, of_target = sums.target - reference;
    if (rows_.losses != nullptr) {
      double loss = on_target * (log_sum - of_target) + options.z_loss * all * all;
      if (on_each != 0) loss += on_each * (all_weights * all - sums.weighted);
      rows_.losses[r_] = static_cast<float>(loss);
    }
    if (!rows_.gradients) return;
    const double factor = rows_.factors == nullptr ? 1 : rows_.factors[r_],
                 share = on_target + on_each * all_weights + 2 * options.z_loss * all,
                 cap = options.soft_cap,
                 slope = cap == 0 ? 1 : 1 - sums.target * sums.target / (cap * cap),
                 at_target = std::exp(of_target) / sums.exponentials * share -
                             on_each * sums.target_weight - on_target;
    const auto scale = static_cast<float>(factor * share / sums.exponentials),
               smoothing = static_cast<float>(factor * on_each);
    const auto of_target_as_float = static_cast<float>(factor * slope * at_target);
    HWY_ALIGN float exponentials[kChunk], made[kChunk];
    for_each_chunk(cols_, [&](size_t c, size_t count) HWY_ATTR {
      for_each_pack(count, Exponentials{static_cast<float>(reference), z_ + c, exponentials});
      gradients_of(exponentials, scale, smoothing, weights_at(c), static_cast<float>(cap), z_ + c,
                   count, made);
      if (target() - c < count) made[target() - c] = of_target_as_float;
      put_narrowed(made, rows_.gradients, r_, c, count);
    });
  }

 private:
  size_t target() const { return static_cast<size_t>(rows_.targets[r_]); }
  bool has_target() const { return target() < cols_; }
  const float* weights_at(size_t c) const {
    return rows_.class_weight == nullptr ? nullptr : rows_.class_weight + c;
  }

  const CrossEntropy& rows_;
  const size_t r_, cols_;
  const float* z_;
};

/// Sets loss and gradient of a row to 0. The gradients may overwrite the logits.
void ignore_row(const CrossEntropy& rows, size_t r) {
  if (rows.losses != nullptr) rows.losses[r] = 0;
  if (!rows.gradients) return;
  const size_t bytes = bytes_per_element(rows.gradients.element);
  std::memset(static_cast<char*>(rows.gradients.data) + r * rows.gradients.stride * bytes, 0,
              rows.gradients.cols * bytes);
}

/// Calls `visit(r, row)` for the rows that count; for all rows if the best class is wanted.
template <typename Visit>
HWY_INLINE void for_each_row(const CrossEntropy& rows, const Visit& visit) {
  const size_t cols = rows.logits.cols;
  const float* const bias =
      as_float32(rows.bias, rows.bias ? scratch(ScratchUse::parameters, cols) : nullptr);
  const auto grain = static_cast<int64_t>(std::max<size_t>(1, kTaskElements / cols));
  parallel_for(0, static_cast<int64_t>(rows.logits.rows), grain,
               [&](int64_t first, int64_t last) HWY_ATTR {
                 const ScopedFloatMode mode;
                 float* const buffer = scratch(ScratchUse::rows, cols);
                 for (auto r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r) {
                   if (rows.targets[r] >= 0 || rows.best != nullptr)
                     visit(r, LogitsRow(rows, r, bias, buffer));
                   if (rows.targets[r] < 0) ignore_row(rows, r);
                 }
               });
}

void cross_entropy_rows(const CrossEntropy& rows) {
  const size_t cols = rows.logits.cols;
  if (cols == 0) return;
  const ClassShard* const shard = rows.shard;
  double all_weights = shard != nullptr ? shard->all_weights : static_cast<double>(cols);
  if (shard == nullptr && rows.class_weight != nullptr && rows.options.label_smoothing != 0)
    all_weights = std::accumulate(rows.class_weight, rows.class_weight + cols, 0.0);
  const double classes = shard != nullptr ? shard->classes : static_cast<double>(cols);
  for_each_row(rows, [&](size_t r, const LogitsRow& row) HWY_ATTR {
    const LogitsSums sums = shard != nullptr ? shard->sums[r] : row.sums();
    if (rows.best != nullptr) rows.best[r] = static_cast<int64_t>(sums.best);
    if (rows.targets[r] >= 0) row.finish(sums, classes, all_weights);
  });
}

void logits_sums_of_rows(const CrossEntropy& rows, LogitsSums* sums) {
  if (rows.logits.cols == 0) return;
  for_each_row(rows, [&](size_t r, const LogitsRow& row) HWY_ATTR { sums[r] = row.sums(); });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(cross_entropy_rows);
HWY_EXPORT(logits_sums_of_rows);

void cross_entropy(const CrossEntropy& rows) { HWY_DYNAMIC_DISPATCH(cross_entropy_rows)(rows); }

void logits_sums(const CrossEntropy& rows, LogitsSums* sums) {
  HWY_DYNAMIC_DISPATCH(logits_sums_of_rows)(rows, sums);
}

LogitsSums joined(const LogitsSums& one, const LogitsSums& next, double first) {
  LogitsSums all{.weighted = one.weighted + next.weighted,
                 .target = one.target + next.target,
                 .target_weight = one.target_weight + next.target_weight};
  const bool next_is_larger = next.largest > one.largest;
  all.largest = next_is_larger ? next.largest : one.largest;
  all.best = next_is_larger ? first + next.best : one.best;
  for (const LogitsSums* each : {&one, &next})
    if (each->exponentials != 0) {
      const bool is_alike = each->largest == all.largest;
      all.exponentials += is_alike ? each->exponentials
                                   : each->exponentials * std::exp(each->largest - all.largest);
    }
  return all;
}

}  // namespace tandem::kernels::cpu
#endif
