// Forward of activations and gated linear units. One exponential and one division per element, one
// pass over memory.
#include "kernels/activation.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/activation.cpp"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/activation_math-inl.h"
#include "kernels/cpu/element-inl.h"
#include "kernels/cpu/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// One run of columns: the activated half at index 0, the other half of a gated unit at index 1.
template <class Act, bool kGated, bool kBiased, typename E>
struct ForwardRun {
  using Stored = typename E::Stored;

  const Stored* x[2] = {};
  const float* bias[2] = {};
  /// null where z is not wanted.
  Stored* z[2] = {};
  Stored* y = nullptr;
  /// Elements of x from one row to the next.
  size_t next_row = 0;

  template <size_t N, typename Part>
  HWY_INLINE void run(size_t i, Part part) const {
    Pack<N> result = Act::value(make_z<N>(i, part, 0));
    if constexpr (kGated) result = result * make_z<N>(i, part, 1);
    store_pack(E{}, result, y + i, part);
  }

 private:
  template <size_t N, typename Part>
  HWY_INLINE Pack<N> make_z(size_t i, Part part, int half) const {
    Pack<N> v = load_pack<N>(E{}, x[half] + i, part);
    // The halves of a row are short streams, which hardware prefetches late.
    if constexpr (kGated && N > 1) prefetch_pack<N>(E{}, x[half] + i + next_row);
    if constexpr (kBiased) v = round_pack(E{}, v + load_pack<N>(Float32{}, bias[half] + i, part));
    if (z[half]) store_pack(E{}, v, z[half] + i, part);
    return v;
  }
};

/// All of x, z and y hold the element; `bias` is float32 or null.
template <class Act, bool kGated, bool kBiased, typename E>
void forward_uniform(E element, ConstRows x, const float* bias, Rows z, Rows y) {
  constexpr int kHalves = kGated ? 2 : 1;
  for_each_piece(y.rows, y.cols, [&](size_t r, size_t c, size_t count) HWY_ATTR {
    ForwardRun<Act, kGated, kBiased, E> run;
    for (int half = 0; half < kHalves; ++half) {
      const size_t column = half * y.cols + c;
      run.x[half] = element.at(x.data, r * x.stride + column);
      if constexpr (kBiased) run.bias[half] = bias + column;
      if (z) run.z[half] = element.at(z.data, r * z.stride + column);
    }
    run.y = element.at(y.data, r * y.stride + c);
    run.next_row = x.stride;
    for_each_pack(count, run);
  });
}

/// Any mix of elements, through float32 buffers.
template <class Act, bool kGated>
void forward_mixed(ConstRows x, const float* bias, Element z_element, Rows z, Rows y) {
  constexpr int kHalves = kGated ? 2 : 1;
  for_each_piece(y.rows, y.cols, [&](size_t r, size_t first, size_t piece) HWY_ATTR {
    for_each_chunk(piece, [&](size_t offset, size_t count) HWY_ATTR {
      HWY_ALIGN float inputs[2][kChunk], results[kChunk];
      const size_t c = first + offset;
      ForwardRun<Act, kGated, false, Float32> run;
      for (int half = 0; half < kHalves; ++half) {
        const size_t column = half * y.cols + c;
        const float* from = widened(x, r, column, count, inputs[half]);
        if (from != inputs[half]) std::copy_n(from, count, inputs[half]);
        if (bias) accumulate(bias + column, inputs[half], count);
        round_all(z_element, inputs[half], count);
        if (z) put_narrowed(inputs[half], z, r, column, count);
        run.x[half] = inputs[half];
      }
      run.y = place_for(y, r, c, results);
      for_each_pack(count, run);
      put_narrowed(run.y, y, r, c, count);
    });
  });
}

template <bool kGated>
void forward(Activation activation, ConstRows x, ConstVector bias, Element z_element, Rows z,
             Rows y) {
  if (!kGated && !bias && is_flat(x) && is_flat(z) && is_flat(y)) {
    flatten(x);
    if (z) flatten(z);
    flatten(y);
  }
  const bool widens = bias && bias.element != Element::float32;
  const float* wide_bias =
      as_float32(bias, widens ? scratch(ScratchUse::parameters, bias.size) : nullptr);

  const bool uniform =
      x.element == z_element && y.element == z_element && (!z || z.element == z_element);
  with_activation(activation, z_element, [&](auto act, auto precision) HWY_ATTR {
    using Act = decltype(act);
    using E = std::conditional_t<decltype(precision)::value == Precision::full, Float32, BFloat16>;
    if (!uniform || z_element != E::kElement)
      forward_mixed<Act, kGated>(x, wide_bias, z_element, z, y);
    else if (bias)
      forward_uniform<Act, kGated, true>(E{}, x, wide_bias, z, y);
    else
      forward_uniform<Act, kGated, false>(E{}, x, nullptr, z, y);
  });
}

void activation_forward_target(Activation activation, ConstRows x, ConstVector bias,
                               Element z_element, Rows z, Rows y) {
  forward<false>(activation, x, bias, z_element, z, y);
}

void glu_forward_target(Activation activation, ConstRows x, ConstVector bias, Element z_element,
                        Rows z, Rows y) {
  forward<true>(activation, x, bias, z_element, z, y);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(activation_forward_target);
HWY_EXPORT(glu_forward_target);

void activation_forward(Activation activation, ConstRows x, ConstVector bias, Element z_element,
                        Rows z, Rows y) {
  HWY_DYNAMIC_DISPATCH(activation_forward_target)(activation, x, bias, z_element, z, y);
}

void glu_forward(Activation activation, ConstRows x, ConstVector bias, Element z_element, Rows z,
                 Rows y) {
  HWY_DYNAMIC_DISPATCH(glu_forward_target)(activation, x, bias, z_element, z, y);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
