// Pairs of features turned by angles, one head at a time.
#include "kernels/rotary.h"

#include <cstring>

#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rotary.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Turns one head: (a cos_a - b sin_a, b cos_b + a sin_b). For the inverse the two sines are
/// exchanged and `sign` is -1.
template <typename E>
HWY_INLINE void turn_halves(E element, const typename E::Stored* from, const float* cosines,
                            const float* sines, bool inverse, size_t half, typename E::Stored* to) {
  const hn::ScalableTag<float> d;
  const auto sign = hn::Set(d, inverse ? -1.0f : 1.0f);
  const size_t of_a = inverse ? half : 0, of_b = half - of_a;
  for_each_vector(half, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto sine_a = hn::Mul(load_part(Float32{}, d, sines + of_a + i, part), sign),
               sine_b = hn::Mul(load_part(Float32{}, d, sines + of_b + i, part), sign),
               a = load_part(element, d, from + i, part),
               b = load_part(element, d, from + half + i, part);
    const auto turned_a =
        hn::NegMulAdd(b, sine_a, hn::Mul(a, load_part(Float32{}, d, cosines + i, part)));
    const auto turned_b =
        hn::MulAdd(a, sine_b, hn::Mul(b, load_part(Float32{}, d, cosines + half + i, part)));
    store_part(element, d, turned_a, to + i, part);
    store_part(element, d, turned_b, to + half + i, part);
  });
}

template <typename E>
HWY_INLINE void turn_neighbours(E element, const typename E::Stored* from, const float* cosines,
                                const float* sines, bool inverse, size_t features,
                                typename E::Stored* to) {
  static_assert(kChunk % 2 == 0, "a pair lies in one chunk");
  const float sign = inverse ? -1.0f : 1.0f;
  for_each_chunk(features, [&](size_t c, size_t count) HWY_ATTR {
    HWY_ALIGN float values[kChunk];
    widen(element, from + c, count, values);
    for (size_t i = 0; i < count; i += 2) {
      const float *const cosine = cosines + c + i, *const sine = sines + c + i;
      const float a = values[i], b = values[i + 1];
      values[i] = a * cosine[0] - b * (sign * sine[inverse ? 1 : 0]);
      values[i + 1] = b * cosine[1] + a * (sign * sine[inverse ? 0 : 1]);
    }
    narrow(element, values, count, to + c);
  });
}

template <typename E>
HWY_INLINE void copy(const typename E::Stored* from, size_t count, typename E::Stored* to) {
  if (from != to && count != 0)
    std::memcpy(static_cast<void*>(to), static_cast<const void*>(from), count * sizeof(*from));
}

void rotary_target(const Rotary& rows) {
  const ConstRows x = rows.x;
  const kernels::Rows y = rows.y;
  if (x.cols == 0) return;
  const size_t head_dim = rows.head_dim, features = rows.features, end = rows.heads * head_dim;
  const auto grain = static_cast<int64_t>(std::max<size_t>(1, kTaskElements / x.cols));
  with_element(x.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    parallel_for(0, static_cast<int64_t>(x.rows), grain, [&](int64_t first, int64_t last) HWY_ATTR {
      const ScopedFloatMode mode;
      for (auto r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r) {
        const auto* const from = E::at(x.data, r * x.stride);
        auto* const to = E::at(y.data, r * y.stride);
        const size_t angles = r % rows.positions * features;
        const float *const cosine = rows.cosines + angles, *const sine = rows.sines + angles;
        for (size_t c = 0; c < end; c += head_dim) {
          if (rows.interleaved) {
            turn_neighbours(element, from + c, cosine, sine, rows.inverse, features, to + c);
          } else {
            turn_halves(element, from + c, cosine, sine, rows.inverse, features / 2, to + c);
          }
          copy<E>(from + c + features, head_dim - features, to + c + features);
        }
        copy<E>(from + end, x.cols - end, to + end);
      }
    });
  });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(rotary_target);

void rotary(const Rotary& rows) { HWY_DYNAMIC_DISPATCH(rotary_target)(rows); }

}  // namespace tandem::kernels::cpu
#endif
