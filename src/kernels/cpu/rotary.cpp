// Pairs of features turned by angles, a head at a time.
#include "kernels/rotary.h"

#include <cstring>

#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rotary.cpp"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Of one head: `sign` is that of the sines.
template <typename E>
HWY_INLINE void turn_halves(E element, const typename E::Stored* from, const float* cosines,
                            const float* sines, float sign, size_t half, typename E::Stored* to) {
  const hn::ScalableTag<float> d;
  for_each_vector(half, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto cosine = load_part(Float32{}, d, cosines + i, part),
               sine = hn::Mul(load_part(Float32{}, d, sines + i, part), hn::Set(d, sign)),
               a = load_part(element, d, from + i, part),
               b = load_part(element, d, from + half + i, part);
    store_part(element, d, hn::NegMulAdd(b, sine, hn::Mul(a, cosine)), to + i, part);
    store_part(element, d, hn::MulAdd(a, sine, hn::Mul(b, cosine)), to + half + i, part);
  });
}

template <typename E>
HWY_INLINE void turn_neighbours(E element, const typename E::Stored* from, const float* cosines,
                                const float* sines, float sign, size_t features,
                                typename E::Stored* to) {
  static_assert(kChunk % 2 == 0, "a pair lies in one chunk");
  for_each_chunk(features, [&](size_t c, size_t count) HWY_ATTR {
    HWY_ALIGN float values[kChunk];
    widen(element, from + c, count, values);
    for (size_t i = 0; i < count; i += 2) {
      const float cosine = cosines[(c + i) / 2], sine = sign * sines[(c + i) / 2], a = values[i],
                  b = values[i + 1];
      values[i] = a * cosine - b * sine;
      values[i + 1] = b * cosine + a * sine;
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
  const size_t head_dim = rows.head_dim, features = rows.features, half = features / 2,
               end = rows.heads * head_dim;
  const float sign = rows.inverse ? -1.0f : 1.0f;
  const auto grain = static_cast<int64_t>(std::max<size_t>(1, kTaskElements / x.cols));
  with_element(x.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    parallel_for(0, static_cast<int64_t>(x.rows), grain, [&](int64_t first, int64_t last) HWY_ATTR {
      const ScopedFloatMode mode;
      for (auto r = static_cast<size_t>(first); r < static_cast<size_t>(last); ++r) {
        const auto* const from = E::at(x.data, r * x.stride);
        auto* const to = E::at(y.data, r * y.stride);
        const size_t angles = r % rows.positions * half;
        const float *const cosine = rows.cosines + angles, *const sine = rows.sines + angles;
        for (size_t c = 0; c < end; c += head_dim) {
          if (rows.interleaved) {
            turn_neighbours(element, from + c, cosine, sine, sign, features, to + c);
          } else {
            turn_halves(element, from + c, cosine, sine, sign, half, to + c);
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
