// Dropout: the mask is made where it is used and never stored; backward makes it again from the
//          seed.
#include <cmath>

#include "kernels/cpu/targets.h"
#include "kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/elementwise_dropout.cpp"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"
#include "kernels/cpu/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// `sums`: the element that the sum with the bias, and what is kept of it, are rounded to before
/// more is added.
template <typename E>
void dropout_rows(E sums, ConstRows x, const float* bias, uint64_t seed, double p, ConstRows extra,
                  Rows out) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::RebindToUnsigned<decltype(d)> du;
  // keep = (word >> 8) * 2^-24 >= p, in integers; no word reaches 2^24.
  const auto threshold = hn::Set(di, static_cast<int32_t>(std::ceil(p * 0x1p24)));
  const auto factor = hn::Set(d, p < 1 ? static_cast<float>(1 / (1 - p)) : 0.0f);
  const size_t cols = out.cols;
  if (!bias && is_flat(x) && is_flat(extra) && is_flat(out)) {
    flatten(x);
    if (extra) flatten(extra);
    flatten(out);
  }
  for_each_piece(out.rows, out.cols, [&](size_t r, size_t first, size_t piece) HWY_ATTR {
    for_each_chunk(piece, [&](size_t offset, size_t count) HWY_ATTR {
      HWY_ALIGN uint32_t words[kChunk + 4 + 2 * HWY_MAX_BYTES];
      HWY_ALIGN float inputs[kChunk], addends[kChunk], results[kChunk];
      const size_t c = first + offset, index = r * cols + c, skipped = index % 4;
      fill_words(seed, index / 4, skipped + count, words);
      const float* from = widened(x, r, c, count, inputs);
      const float* more = extra ? widened(extra, r, c, count, addends) : nullptr;
      float* to = place_for(out, r, c, results);
      for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
        const auto word = hn::BitCast(di, hn::ShiftRight<8>(hn::LoadU(du, words + skipped + i)));
        const auto is_kept = hn::RebindMask(d, hn::Not(hn::Lt(word, threshold)));
        auto value = load_part(Float32{}, d, from + i, part);
        if (bias)
          value = round_to(sums, d, hn::Add(value, load_part(Float32{}, d, bias + c + i, part)));
        value = hn::IfThenElseZero(is_kept, hn::Mul(value, factor));
        if (more)
          value = hn::Add(round_to(sums, d, value), load_part(Float32{}, d, more + i, part));
        store_part(Float32{}, d, value, to + i, part);
      });
      put_narrowed(to, out, r, c, count);
    });
  });
}

void dropout_target(ConstRows x, ConstVector bias, Element sum_element, uint64_t seed, double p,
                    ConstRows extra, Rows out) {
  const bool widens = bias && bias.element != Element::float32;
  const float* wide_bias =
      as_float32(bias, widens ? scratch(ScratchUse::parameters, bias.size) : nullptr);
  with_element(sum_element,
               [&](auto sums) HWY_ATTR { dropout_rows(sums, x, wide_bias, seed, p, extra, out); });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(dropout_target);

void dropout(ConstRows x, uint64_t seed, double p, Rows out) {
  dropout_add(x, {}, out.element, seed, p, {}, out);
}

void dropout_add(ConstRows x, ConstVector bias, Element sum_element, uint64_t seed, double p,
                 ConstRows extra, Rows out) {
  HWY_DYNAMIC_DISPATCH(dropout_target)(x, bias, sum_element, seed, p, extra, out);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
