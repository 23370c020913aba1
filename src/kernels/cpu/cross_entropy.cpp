#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>

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

/// exp(z - largest), 0 where that is below float32. Takes packs from and to float32 in one buffer.
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

/// sum of values[i] weights[i]; null weights: ones.
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

/// The largest of some values; those that are NaN may be passed over.
HWY_INLINE float largest_of(const float* values, size_t count) {
  const hn::ScalableTag<float> d;
  auto largest = hn::Set(d, -std::numeric_limits<float>::infinity());
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d))
    largest = hn::Max(largest, hn::LoadU(d, values + i));
  float found = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < count; ++i) found = std::max(found, values[i]);
  return found;
}

/// to[i] = exponentials[i] scale - smoothing weights[i], times the slope of the cap at z[i].
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

/// One row: its z in float32, and what is computed of it.
class LogitsRow {
 public:
  /// `buffer` holds a row of float32; `bias` is float32 or null.
  LogitsRow(const CrossEntropy& rows, size_t r, const float* bias, float* buffer)
      : rows_(rows), r_(r), cols_(rows.logits.cols) {
    const auto cap = static_cast<float>(rows.options.soft_cap);
    const bool is_as_stored =
        rows.logits.element == Element::float32 && bias == nullptr && cap == 0;
    z_ = is_as_stored ? static_cast<const float*>(rows.logits.data) + r * rows.logits.stride
                      : buffer;
    const bool smooths = rows.options.label_smoothing != 0;
    for_each_chunk(cols_, [&](size_t c, size_t count) HWY_ATTR {
      if (!is_as_stored) {
        float* const to = buffer + c;
        const float* const from = widened(rows.logits, r, c, count, to);
        if (from != to) std::copy_n(from, count, to);
        if (bias != nullptr) accumulate(bias + c, to, count);
        if (cap != 0) for_each_pack(count, Cap{cap, to});
      }
      largest_ = std::max(largest_, largest_of(z_ + c, count));
      if (smooths) sum_ += weighted_sum(z_ + c, weights_at(c), count);
    });
    HWY_ALIGN float exponentials[kChunk];
    for_each_chunk(cols_, [&](size_t c, size_t count) HWY_ATTR {
      for_each_pack(count, Exponentials{largest_, z_ + c, exponentials});
      exponential_sum_ += weighted_sum(exponentials, nullptr, count);
    });
  }

  /// `all_weights`: the sum of the classes' weights.
  void finish(double all_weights) const {
    const CrossEntropyOptions& options = rows_.options;
    const auto target = static_cast<size_t>(rows_.targets[r_]);
    const double weight = rows_.class_weight == nullptr ? 1 : rows_.class_weight[target],
                 on_target = (1 - options.label_smoothing) * weight,
                 on_each = options.label_smoothing / static_cast<double>(cols_),
                 log_sum = std::log(exponential_sum_), all = largest_ + log_sum,
                 of_target = static_cast<double>(z_[target]) - largest_;
    if (rows_.losses != nullptr) {
      double loss = on_target * (log_sum - of_target) + options.z_loss * all * all;
      if (on_each != 0) loss += on_each * (all_weights * all - sum_);
      rows_.losses[r_] = static_cast<float>(loss);
    }
    if (!rows_.gradients) return;
    const double factor = rows_.factors == nullptr ? 1 : rows_.factors[r_],
                 share = on_target + on_each * all_weights + 2 * options.z_loss * all,
                 cap = options.soft_cap,
                 slope =
                     cap == 0 ? 1 : 1 - z_[target] * static_cast<double>(z_[target]) / (cap * cap),
                 at_target =
                     std::exp(of_target) / exponential_sum_ * share - on_each * weight - on_target;
    const auto scale = static_cast<float>(factor * share / exponential_sum_),
               smoothing = static_cast<float>(factor * on_each);
    const auto of_target_as_float = static_cast<float>(factor * slope * at_target);
    HWY_ALIGN float exponentials[kChunk], made[kChunk];
    for_each_chunk(cols_, [&](size_t c, size_t count) HWY_ATTR {
      for_each_pack(count, Exponentials{largest_, z_ + c, exponentials});
      gradients_of(exponentials, scale, smoothing, weights_at(c), static_cast<float>(cap), z_ + c,
                   count, made);
      if (target - c < count) made[target - c] = of_target_as_float;
      put_narrowed(made, rows_.gradients, r_, c, count);
    });
  }

  int64_t best() const {
    for (size_t c = 0; c < cols_; ++c)
      if (z_[c] == largest_) return static_cast<int64_t>(c);
    return 0;
  }

 private:
  const float* weights_at(size_t c) const {
    return rows_.class_weight == nullptr ? nullptr : rows_.class_weight + c;
  }

  const CrossEntropy& rows_;
  const size_t r_, cols_;
  const float* z_;
  float largest_ = -std::numeric_limits<float>::infinity();
  /// Of exp(z - largest), and of w z.
  double exponential_sum_ = 0, sum_ = 0;
};

/// Loss and gradient 0; the logits may be gone.
void ignore_row(const CrossEntropy& rows, size_t r) {
  if (rows.losses != nullptr) rows.losses[r] = 0;
  if (!rows.gradients) return;
  const size_t bytes = bytes_per_element(rows.gradients.element);
  std::memset(static_cast<char*>(rows.gradients.data) + r * rows.gradients.stride * bytes, 0,
              rows.gradients.cols * bytes);
}

void cross_entropy_rows(const CrossEntropy& rows) {
  const size_t cols = rows.logits.cols;
  if (cols == 0) return;
  const float* const bias =
      as_float32(rows.bias, rows.bias ? scratch(ScratchUse::parameters, cols) : nullptr);
  double all_weights = static_cast<double>(cols);
  if (rows.class_weight != nullptr && rows.options.label_smoothing != 0) {
    all_weights = 0;
    for (size_t c = 0; c < cols; ++c) all_weights += rows.class_weight[c];
  }
  const auto grain = static_cast<int64_t>(std::max<size_t>(1, kTaskElements / cols));
  parallel_for(0, static_cast<int64_t>(rows.logits.rows), grain,
               [&](int64_t first, int64_t last) HWY_ATTR {
                 const ScopedFloatMode mode;
                 float* const buffer = scratch(ScratchUse::rows, cols);
                 for (auto r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r) {
                   const bool counts = rows.targets[r] >= 0;
                   if (counts || rows.best != nullptr) {
                     const LogitsRow row(rows, r, bias, buffer);
                     if (rows.best != nullptr) rows.best[r] = row.best();
                     if (counts) row.finish(all_weights);
                   }
                   if (!counts) ignore_row(rows, r);
                 }
               });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(cross_entropy_rows);

void cross_entropy(const CrossEntropy& rows) { HWY_DYNAMIC_DISPATCH(cross_entropy_rows)(rows); }

}  // namespace tandem::kernels::cpu
#endif
