// Dropout. The mask is computed where it is used and never stored; backward recomputes it from the
// seed.
#include <cmath>

#include "kernels/cpu/targets.h"
#include "kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/elementwise_dropout.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"
#include "kernels/cpu/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Which elements are kept, and their factor.
struct Keep {
  explicit Keep(double p)
      : threshold(static_cast<int32_t>(std::ceil(p * 0x1p24))),
        factor(p < 1 ? static_cast<float>(1 / (1 - p)) : 0.0f) {}

  /// value * factor if the word keeps it: (word >> 8) * 2^-24 >= p, compared in integers, because
  /// (word >> 8) is below 2^24.
  template <class V>
  HWY_INLINE V apply(V value, const uint32_t* word) const {
    const hn::DFromV<V> d;
    const hn::RebindToSigned<decltype(d)> di;
    const hn::RebindToUnsigned<decltype(d)> du;
    const auto chance = hn::BitCast(di, hn::ShiftRight<8>(hn::LoadU(du, word)));
    const auto is_kept = hn::RebindMask(d, hn::Not(hn::Lt(chance, hn::Set(di, threshold))));
    return hn::IfThenElseZero(is_kept, hn::Mul(value, hn::Set(d, factor)));
  }

  int32_t threshold;
  float factor;
};

/// Calls `body(c, count, words)` for pieces of columns [first, first + cols) of row `r`. The
/// elements of a piece have the words `words[0]`, `words[1]`, ...
template <typename Body>
HWY_INLINE void for_each_words(uint64_t seed, size_t r, size_t row_cols, size_t first, size_t cols,
                               const Body& body) {
  for_each_chunk(cols, [&](size_t offset, size_t count) HWY_ATTR {
    HWY_ALIGN uint32_t words[kChunk + 4 + 2 * HWY_MAX_BYTES];
    const size_t c = first + offset, index = r * row_cols + c, skipped = index % 4;
    fill_words(seed, index / 4, skipped + count, words);
    body(c, count, words + skipped);
  });
}

void dropout_target(ConstRows x, ConstVector bias_of, uint64_t seed, double p, ConstRows extra,
                    Rows out) {
  const bool widens = bias_of && bias_of.element != Element::float32;
  const float* bias =
      as_float32(bias_of, widens ? scratch(ScratchUse::parameters, bias_of.size) : nullptr);
  const hn::ScalableTag<float> d;
  const Keep keep(p);
  if (!bias && is_flat(x) && is_flat(extra) && is_flat(out)) {
    flatten(x);
    if (extra) flatten(extra);
    flatten(out);
  }
  for_each_piece(out.rows, out.cols, [&](size_t r, size_t first, size_t piece) HWY_ATTR {
    for_each_words(seed, r, out.cols, first, piece,
                   [&](size_t c, size_t count, const uint32_t* words) HWY_ATTR {
                     HWY_ALIGN float inputs[kChunk], addends[kChunk], results[kChunk];
                     const float* from = widened(x, r, c, count, inputs);
                     const float* more = extra ? widened(extra, r, c, count, addends) : nullptr;
                     float* to = place_for(out, r, c, results);
                     for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
                       auto value = load_part(Float32{}, d, from + i, part);
                       if (bias)
                         value = hn::Add(value, load_part(Float32{}, d, bias + c + i, part));
                       value = keep.apply(value, words + i);
                       if (more) value = hn::Add(value, load_part(Float32{}, d, more + i, part));
                       store_part(Float32{}, d, value, to + i, part);
                     });
                     put_narrowed(to, out, r, c, count);
                   });
  });
}

/// `grad_x` or `sums` may be nullptr.
template <typename E>
HWY_INLINE void backward_bias_run(E element, const Keep& keep, const uint32_t* words,
                                  const typename E::Stored* grad_y,
                                  typename E::Stored* HWY_RESTRICT grad_x, float* HWY_RESTRICT sums,
                                  size_t count) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto value = keep.apply(load_part(element, d, grad_y + i, part), words + i);
    if (grad_x) store_part(element, d, value, grad_x + i, part);
    if (!sums) return;
    const auto sum = hn::Add(load_part(Float32{}, d, sums + i, part), round_to(element, d, value));
    store_part(Float32{}, d, sum, sums + i, part);
  });
}

/// Columns [first, first + cols) of row `r`. The mask counts this row as row `counted_as`.
template <typename E>
HWY_INLINE void backward_bias_row(E element, const Keep& keep, uint64_t seed, ConstRows grad_y,
                                  Rows grad_x, size_t r, size_t counted_as, size_t first,
                                  size_t cols, float* sums) {
  for_each_words(seed, counted_as, grad_y.cols, first, cols,
                 [&](size_t c, size_t count, const uint32_t* words) HWY_ATTR {
                   backward_bias_run(
                       element, keep, words, element.at(grad_y.data, r * grad_y.stride + c),
                       grad_x ? element.at(grad_x.data, r * grad_x.stride + c) : nullptr,
                       sums ? sums + c : nullptr, count);
                 });
}

void dropout_backward_bias_target(ConstRows grad_y, uint64_t seed, double p, Rows grad_x,
                                  Vector sums) {
  const Keep keep(p);
  with_element(grad_y.element, [&](auto element) HWY_ATTR {
    for_each_row_summing(grad_y.rows, grad_y.cols, sums, [&](size_t r, float* into) HWY_ATTR {
      backward_bias_row(element, keep, seed, grad_y, grad_x, r, r, 0, grad_y.cols, into);
    });
  });
}

void some_rows_backward_target(ConstRows grad_y, uint64_t seed, double p, Rows grad_x,
                               const PartialSums& part) {
  const Keep keep(p);
  with_element(grad_y.element, [&](auto element) HWY_ATTR {
    if (part) {
      for_each_row_summing(grad_y.rows, part, [&](size_t r, float* into) HWY_ATTR {
        backward_bias_row(element, keep, seed, grad_y, grad_x, r, part.first + r, 0, grad_y.cols,
                          into);
      });
    } else {
      for_each_piece(grad_y.rows, grad_y.cols, [&](size_t r, size_t c, size_t count) HWY_ATTR {
        backward_bias_row(element, keep, seed, grad_y, grad_x, r, part.first + r, c, count,
                          nullptr);
      });
    }
  });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(dropout_target);
HWY_EXPORT(dropout_backward_bias_target);
HWY_EXPORT(some_rows_backward_target);

void dropout(ConstRows x, uint64_t seed, double p, Rows out) {
  dropout_add(x, {}, seed, p, {}, out);
}

void dropout_add(ConstRows x, ConstVector bias, uint64_t seed, double p, ConstRows extra,
                 Rows out) {
  HWY_DYNAMIC_DISPATCH(dropout_target)(x, bias, seed, p, extra, out);
}

void dropout_backward_bias(ConstRows grad_y, uint64_t seed, double p, Rows grad_x, Vector sums) {
  HWY_DYNAMIC_DISPATCH(dropout_backward_bias_target)(grad_y, seed, p, grad_x, sums);
}

void dropout_some_rows_backward(ConstRows grad_y, uint64_t seed, double p, Rows grad_x,
                                const PartialSums& part) {
  HWY_DYNAMIC_DISPATCH(some_rows_backward_target)(grad_y, seed, p, grad_x, part);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
