// Sums, scaling and column sums. Each kernel reads its operands once.
#include "kernels/elementwise.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/elementwise.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Operands of one element are processed directly. A mix of elements goes through float32 buffers in
// L1 and the same loop.
template <typename E>
void multiply_run(E element, const typename E::Stored* x, float a, float b, typename E::Stored* out,
                  size_t count) {
  const hn::ScalableTag<float> d;
  const auto first = hn::Set(d, a), second = hn::Set(d, b);
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    store_part(element, d, hn::Mul(hn::Mul(load_part(element, d, x + i, part), first), second),
               out + i, part);
  });
}

/// `extra` may be nullptr.
template <typename E>
void add_bias_run(E element, const typename E::Stored* x, const float* bias,
                  const typename E::Stored* extra, typename E::Stored* out, size_t count) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    auto sum = hn::Add(load_part(element, d, x + i, part), load_part(Float32{}, d, bias + i, part));
    if (extra) sum = hn::Add(sum, load_part(element, d, extra + i, part));
    store_part(element, d, sum, out + i, part);
  });
}

void add_bias_target(ConstRows x, ConstVector bias, ConstRows extra, Rows out) {
  const bool widens = bias && bias.element != Element::float32;
  const float* wide_bias =
      as_float32(bias, widens ? scratch(ScratchUse::parameters, bias.size) : nullptr);
  const Element element = out.element;
  const bool uniform = bias && x.element == element && (!extra || extra.element == element);
  for_each_piece(out.rows, out.cols, [&](size_t r, size_t first, size_t piece) HWY_ATTR {
    if (uniform) {
      with_element(element, [&](auto e) HWY_ATTR {
        add_bias_run(e, e.at(x.data, r * x.stride + first), wide_bias + first,
                     extra ? e.at(extra.data, r * extra.stride + first) : nullptr,
                     e.at(out.data, r * out.stride + first), piece);
      });
      return;
    }
    for_each_chunk(piece, [&](size_t offset, size_t count) HWY_ATTR {
      HWY_ALIGN float sums[kChunk], more[kChunk];
      const size_t c = first + offset;
      const float* from = widened(x, r, c, count, sums);
      if (from != sums) std::copy_n(from, count, sums);
      if (bias) accumulate(wide_bias + c, sums, count);
      if (extra) accumulate(widened(extra, r, c, count, more), sums, count);
      put_narrowed(sums, out, r, c, count);
    });
  });
}

void multiply_twice_target(ConstRows x, float a, float b, Rows out) {
  if (is_flat(x) && is_flat(out)) {
    flatten(x);
    flatten(out);
  }
  for_each_piece(out.rows, out.cols, [&](size_t r, size_t first, size_t piece) HWY_ATTR {
    if (x.element == out.element) {
      with_element(out.element, [&](auto element) HWY_ATTR {
        multiply_run(element, element.at(x.data, r * x.stride + first), a, b,
                     element.at(out.data, r * out.stride + first), piece);
      });
      return;
    }
    for_each_chunk(piece, [&](size_t offset, size_t count) HWY_ATTR {
      HWY_ALIGN float buffers[2][kChunk];
      const size_t c = first + offset;
      float* results = place_for(out, r, c, buffers[1]);
      multiply_run(Float32{}, widened(x, r, c, count, buffers[0]), a, b, results, count);
      put_narrowed(results, out, r, c, count);
    });
  });
}

/// Adds a row to the sums of its columns.
template <typename E>
HWY_INLINE void add_row(E element, ConstRows x, size_t r, float* into) {
  const auto* row = element.at(x.data, r * x.stride);
  const hn::ScalableTag<float> d;
  for_each_vector(x.cols, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto sum =
        hn::Add(load_part(Float32{}, d, into + i, part), load_part(element, d, row + i, part));
    store_part(Float32{}, d, sum, into + i, part);
  });
}

void sum_rows_target(ConstRows x, Vector sums) {
  with_element(x.element, [&](auto element) HWY_ATTR {
    for_each_row_summing(x.rows, x.cols, sums,
                         [&](size_t r, float* into) HWY_ATTR { add_row(element, x, r, into); });
  });
}

void sum_some_rows_target(ConstRows x, const PartialSums& part) {
  with_element(x.element, [&](auto element) HWY_ATTR {
    for_each_row_summing(x.rows, part,
                         [&](size_t r, float* into) HWY_ATTR { add_row(element, x, r, into); });
  });
}

void add_partial_sums_target(const PartialSums& part, size_t rows, Vector sums) {
  add_up(part, rows, sums);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(add_bias_target);
HWY_EXPORT(multiply_twice_target);
HWY_EXPORT(sum_rows_target);
HWY_EXPORT(sum_some_rows_target);
HWY_EXPORT(add_partial_sums_target);

void add_bias(ConstRows x, ConstVector bias, ConstRows extra, Rows out) {
  HWY_DYNAMIC_DISPATCH(add_bias_target)(x, bias, extra, out);
}

void multiply_twice(ConstRows x, float a, float b, Rows out) {
  HWY_DYNAMIC_DISPATCH(multiply_twice_target)(x, a, b, out);
}

void sum_rows(ConstRows x, Vector sums) { HWY_DYNAMIC_DISPATCH(sum_rows_target)(x, sums); }

void sum_some_rows(ConstRows x, const PartialSums& part) {
  HWY_DYNAMIC_DISPATCH(sum_some_rows_target)(x, part);
}

void add_partial_sums(const PartialSums& part, size_t rows, Vector sums) {
  HWY_DYNAMIC_DISPATCH(add_partial_sums_target)(part, rows, sums);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
