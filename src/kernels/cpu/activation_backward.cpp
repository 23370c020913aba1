// Backward of activations and gated linear units: the gradient, its column sums and the forward
// result again, in one pass.
#include "kernels/activation.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/activation_backward.cpp"
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
template <class Act, bool kGated, typename E>
struct BackwardRun {
  using Stored = typename E::Stored;

  const Stored* grad_y = nullptr;
  const Stored* z[2] = {};
  Stored* grad_z[2] = {};
  /// null where the sums are not wanted.
  float* sums[2] = {};
  /// null where y is not wanted.
  Stored* y = nullptr;
  /// Elements of z from one row to the next.
  size_t next_row = 0;

  template <size_t N, typename Part>
  HWY_INLINE void run(size_t i, Part part) const {
    const Pack<N> grad = load_pack<N>(E{}, grad_y + i, part);
    const Pack<N> a = load_pack<N>(E{}, z[0] + i, part);
    if constexpr (kGated) {
      // The halves of a row are short streams, which hardware prefetches late.
      if constexpr (N > 1) {
        for (const Stored* half : z) prefetch_pack<N>(E{}, half + i + next_row);
      }
      const Pack<N> b = load_pack<N>(E{}, z[1] + i, part);
      const auto act = Act::value_and_grad(a, grad * b);
      put_grad(i, part, 0, act.grad);
      put_grad(i, part, 1, grad * act.value);
      if (y) store_pack(E{}, act.value * b, y + i, part);
    } else {
      const auto act = Act::value_and_grad(a, grad);
      put_grad(i, part, 0, act.grad);
      if (y) store_pack(E{}, act.value, y + i, part);
    }
  }

 private:
  template <size_t N, typename Part>
  HWY_INLINE void put_grad(size_t i, Part part, int half, const Pack<N>& grad) const {
    store_pack(E{}, grad, grad_z[half] + i, part);
    if (!sums[half]) return;
    store_pack(Float32{}, load_pack<N>(Float32{}, sums[half] + i, part) + round_pack(E{}, grad),
               sums[half] + i, part);
  }
};

/// All of grad_y, z, grad_z and y hold the element.
template <class Act, bool kGated, typename E>
void backward_uniform(E element, ConstRows grad_y, ConstRows z, Rows grad_z, Rows y, size_t r,
                      size_t c, size_t count, float* sums) {
  BackwardRun<Act, kGated, E> run;
  run.next_row = z.stride;
  run.grad_y = element.at(grad_y.data, r * grad_y.stride + c);
  for (int half = 0; half < (kGated ? 2 : 1); ++half) {
    const size_t column = half * grad_y.cols + c;
    run.z[half] = element.at(z.data, r * z.stride + column);
    run.grad_z[half] = element.at(grad_z.data, r * grad_z.stride + column);
    if (sums) run.sums[half] = sums + column;
  }
  if (y) run.y = element.at(y.data, r * y.stride + c);
  for_each_pack(count, run);
}

/// Any mix of elements, through float32 buffers.
template <class Act, bool kGated>
void backward_mixed(ConstRows grad_y, ConstRows z, Rows grad_z, Rows y, size_t r, size_t first,
                    size_t piece, float* sums) {
  for_each_chunk(piece, [&](size_t offset, size_t count) HWY_ATTR {
    HWY_ALIGN float inputs[3][kChunk], grads[2][kChunk], results[kChunk];
    const size_t c = first + offset;
    constexpr int kHalves = kGated ? 2 : 1;
    BackwardRun<Act, kGated, Float32> run;
    run.grad_y = widened(grad_y, r, c, count, inputs[2]);
    for (int half = 0; half < kHalves; ++half) {
      run.z[half] = widened(z, r, half * grad_y.cols + c, count, inputs[half]);
      run.grad_z[half] = grads[half];
    }
    if (y) run.y = place_for(y, r, c, results);
    for_each_pack(count, run);
    for (int half = 0; half < kHalves; ++half) {
      const size_t column = half * grad_y.cols + c;
      put_narrowed(grads[half], grad_z, r, column, count);
      if (!sums) continue;
      round_all(grad_z.element, grads[half], count);
      accumulate(grads[half], sums + column, count);
    }
    if (y) put_narrowed(run.y, y, r, c, count);
  });
}

template <bool kGated>
void backward(Activation activation, ConstRows grad_y, ConstRows z, Rows grad_z, Vector grad_bias,
              Rows y) {
  if (!kGated && !grad_bias && is_flat(grad_y) && is_flat(z) && is_flat(grad_z) && is_flat(y)) {
    flatten(grad_y);
    flatten(z);
    flatten(grad_z);
    if (y) flatten(y);
  }
  const Element element = z.element;
  const bool uniform =
      grad_y.element == element && grad_z.element == element && (!y || y.element == element);
  with_activation(activation, element, [&](auto act, auto precision) HWY_ATTR {
    using Act = decltype(act);
    using E = std::conditional_t<decltype(precision)::value == Precision::full, Float32, BFloat16>;
    const auto run = [&](size_t r, size_t c, size_t count, float* sums) HWY_ATTR {
      if (uniform && element == E::kElement)
        backward_uniform<Act, kGated>(E{}, grad_y, z, grad_z, y, r, c, count, sums);
      else
        backward_mixed<Act, kGated>(grad_y, z, grad_z, y, r, c, count, sums);
    };
    if (grad_bias) {
      for_each_row_summing(grad_y.rows, grad_z.cols, grad_bias,
                           [&](size_t r, float* sums) HWY_ATTR { run(r, 0, grad_y.cols, sums); });
    } else {
      for_each_piece(grad_y.rows, grad_y.cols,
                     [&](size_t r, size_t c, size_t count) HWY_ATTR { run(r, c, count, nullptr); });
    }
  });
}

void activation_backward_target(Activation activation, ConstRows grad_y, ConstRows z, Rows grad_z,
                                Vector grad_bias, Rows y) {
  backward<false>(activation, grad_y, z, grad_z, grad_bias, y);
}

void glu_backward_target(Activation activation, ConstRows grad_y, ConstRows z, Rows grad_z,
                         Vector grad_bias, Rows y) {
  backward<true>(activation, grad_y, z, grad_z, grad_bias, y);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(activation_backward_target);
HWY_EXPORT(glu_backward_target);

void activation_backward(Activation activation, ConstRows grad_y, ConstRows z, Rows grad_z,
                         Vector grad_bias, Rows y) {
  HWY_DYNAMIC_DISPATCH(activation_backward_target)(activation, grad_y, z, grad_z, grad_bias, y);
}

void glu_backward(Activation activation, ConstRows grad_y, ConstRows z, Rows grad_z,
                  Vector grad_bias, Rows y) {
  HWY_DYNAMIC_DISPATCH(glu_backward_target)(activation, grad_y, z, grad_z, grad_bias, y);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
