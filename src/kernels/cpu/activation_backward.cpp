// Backward of activations and gated units in one pass: the gradient, its column sums, the gradient
// of a factor per row, and the re-emitted result of forward.
#include "kernels/activation.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/activation_backward.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/activation_math-inl.h"
#include "kernels/cpu/element-inl.h"
#include "kernels/cpu/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// One run of columns: the gate at index 0, the second half of a gated unit at index 1.
template <class Act, bool kGated, typename E>
struct BackwardRun {
  using Stored = typename E::Stored;

  const Act& act;
  const Stored* grad_y = nullptr;
  const Stored* z[2] = {};
  Stored* grad_z[2] = {};
  /// nullptr if the sums are not wanted.
  float* sums[2] = {};
  /// nullptr if y is not wanted.
  Stored* y = nullptr;
  /// The distance of two rows of z, in elements.
  size_t next_row = 0;

  template <size_t N, typename Part>
  HWY_INLINE void run(size_t i, Part part) const {
    const Pack<N> grad = load_pack<N>(E{}, grad_y + i, part);
    const Pack<N> a = load_pack<N>(E{}, z[0] + i, part);
    if constexpr (kGated) {
      // The halves of a row are short streams, which the hardware prefetches late.
      if constexpr (N > 1) {
        for (const Stored* half : z) prefetch_pack<N>(E{}, half + i + next_row);
      }
      const Pack<N> b = load_pack<N>(E{}, z[1] + i, part), other = other_of(act, b);
      const auto result = act.value_and_grad(a, grad * other);
      put_grad(i, part, 0, result.grad);
      put_grad(i, part, 1, other_grad_of(act, b, grad * result.value));
      if (y) store_pack(E{}, result.value * other, y + i, part);
    } else {
      const auto result = act.value_and_grad(a, grad);
      put_grad(i, part, 0, result.grad);
      if (y) store_pack(E{}, result.value, y + i, part);
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

/// What all rows share.
struct Backward {
  const Function& function;
  ConstRows grad_y, z;
  Rows grad_z, y;

  /// Whether grad_y, z, grad_z and y all have the element of z.
  bool is_uniform() const {
    const Element element = z.element;
    return grad_y.element == element && grad_z.element == element && (!y || y.element == element);
  }
};

/// Columns [first, first + piece) of row r; all operands have the element E.
template <bool kGated, class Act, typename E>
void backward_uniform(const Act& act, E element, const Backward& b, size_t r, size_t first,
                      size_t piece, float* sums) {
  for_each_run<kGated>(b.function, b.grad_y.cols, first, piece,
                       [&](size_t c, size_t count, const size_t* columns) HWY_ATTR {
                         BackwardRun<Act, kGated, E> run{act};
                         run.next_row = b.z.stride;
                         run.grad_y = element.at(b.grad_y.data, r * b.grad_y.stride + c);
                         for (int half = 0; half < (kGated ? 2 : 1); ++half) {
                           run.z[half] = element.at(b.z.data, r * b.z.stride + columns[half]);
                           run.grad_z[half] =
                               element.at(b.grad_z.data, r * b.grad_z.stride + columns[half]);
                           if (sums) run.sums[half] = sums + columns[half];
                         }
                         if (b.y) run.y = element.at(b.y.data, r * b.y.stride + c);
                         for_each_pack(count, run);
                       });
}

/// The factor of a row, and lanes to which its gradient is added; nullptr if it is not wanted.
struct RowFactor {
  float factor;
  float* dots;
};

/// to[i] = values[i] * factor.
HWY_NOINLINE inline void multiply(const float* values, float factor, size_t count, float* to) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto value = load_part(Float32{}, d, values + i, part);
    store_part(Float32{}, d, hn::Mul(value, hn::Set(d, factor)), to + i, part);
  });
}

/// Adds a[i] * b[i] to the lanes of `dots`.
HWY_NOINLINE inline void add_dots(const float* a, const float* b, size_t count, float* dots) {
  const hn::ScalableTag<float> d;
  auto sum = hn::Load(d, dots);
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    sum =
        hn::MulAdd(load_part(Float32{}, d, a + i, part), load_part(Float32{}, d, b + i, part), sum);
  });
  hn::Store(sum, d, dots);
}

/// Any mix of elements, and rows with a factor, through float32 buffers. The factor is applied
/// outside of BackwardRun: inside, it would take registers that units without a factor need.
template <bool kGated, class Act>
void backward_buffered(const Act& act, const Backward& b, size_t r, size_t first, size_t piece,
                       float* sums, const RowFactor* scaled) {
  const auto run_chunk = [&](size_t c, size_t count, const size_t* columns) HWY_ATTR {
    HWY_ALIGN float inputs[3][kChunk], grads[2][kChunk], results[kChunk], scaled_grad[kChunk];
    constexpr int kHalves = kGated ? 2 : 1;
    BackwardRun<Act, kGated, Float32> run{act};
    const float* grad_y = widened(b.grad_y, r, c, count, inputs[2]);
    run.grad_y = grad_y;
    for (int half = 0; half < kHalves; ++half) {
      run.z[half] = widened(b.z, r, columns[half], count, inputs[half]);
      run.grad_z[half] = grads[half];
    }
    if (scaled) {
      multiply(grad_y, scaled->factor, count, scaled_grad);
      run.grad_y = scaled_grad;
      if (b.y || scaled->dots) run.y = results;
    } else if (b.y) {
      run.y = place_for(b.y, r, c, results);
    }
    for_each_pack(count, run);
    if (scaled) {
      if (scaled->dots) add_dots(grad_y, results, count, scaled->dots);
      if (b.y) multiply(results, scaled->factor, count, results);
    }
    for (int half = 0; half < kHalves; ++half) {
      put_narrowed(grads[half], b.grad_z, r, columns[half], count);
      if (!sums) continue;
      round_all(b.grad_z.element, grads[half], count);
      accumulate(grads[half], sums + columns[half], count);
    }
    if (b.y) put_narrowed(run.y, b.y, r, c, count);
  };
  for_each_chunk(piece, [&](size_t offset, size_t chunk) HWY_ATTR {
    for_each_run<kGated>(b.function, b.grad_y.cols, first + offset, chunk,
                         [&](size_t c, size_t count, const size_t* columns)
                             HWY_ATTR { run_chunk(c, count, columns); });
  });
}

/// Columns [first, first + piece) of row r, with the arguments of with_activation's body. `sums`
/// and `scaled` are optional.
template <bool kGated, class Act, typename E>
void backward_piece(const void* act_, const Backward& b, size_t r, size_t first, size_t piece,
                    float* sums, const RowFactor* scaled) {
  const Act& act = *static_cast<const Act*>(act_);
  if (!scaled && b.z.element == E::kElement && b.is_uniform())
    backward_uniform<kGated>(act, E{}, b, r, first, piece, sums);
  else
    backward_buffered<kGated>(act, b, r, first, piece, sums, scaled);
}
using Piece = void (*)(const void*, const Backward&, size_t, size_t, size_t, float*,
                       const RowFactor*);

/// Calls `body(piece, act)`. If `body` is no template, it is compiled once for all activations.
template <bool kGated, typename Body>
void with_piece(const Backward& b, const Body& body) {
  with_activation<kGated>(b.function, b.z.element, [&](const auto& act, auto precision) HWY_ATTR {
    using Act = std::remove_cvref_t<decltype(act)>;
    using E = std::conditional_t<decltype(precision)::value == Precision::full, Float32, BFloat16>;
    body(backward_piece<kGated, Act, E>, &act);
  });
}

/// If sums are wanted, `sum_over(body)` calls body(row, sums) for every row.
template <bool kGated, typename SumOver>
void backward(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z, Rows y,
              bool sums_up, const SumOver& sum_over) {
  if (!kGated && !sums_up && is_flat(grad_y) && is_flat(z) && is_flat(grad_z) && is_flat(y)) {
    flatten(grad_y);
    flatten(z);
    flatten(grad_z);
    if (y) flatten(y);
  }
  const Backward b{function, grad_y, z, grad_z, y};
  const auto run = [&](Piece piece, const void* act) HWY_ATTR __attribute__((noinline)) {
    if (sums_up) {
      sum_over([&](size_t r, float* sums)
                   HWY_ATTR { piece(act, b, r, 0, grad_y.cols, sums, nullptr); });
    } else {
      for_each_piece(grad_y.rows, grad_y.cols, [&](size_t r, size_t c, size_t count) HWY_ATTR {
        piece(act, b, r, c, count, nullptr, nullptr);
      });
    }
  };
  with_piece<kGated>(b, run);
}

template <typename SumOver>
void either_backward(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z, Rows y,
                     bool sums_up, const SumOver& sum_over) {
  (function.is_gated ? backward<true, SumOver>
                     : backward<false, SumOver>)(function, grad_y, z, grad_z, y, sums_up, sum_over);
}

template <bool kGated>
void backward_scaled(const Function& function, ConstRows grad_y, ConstRows x,
                     ConstVector row_factors, Rows grad_x, Vector grad_row_factors, Rows y) {
  const bool widens = row_factors.element != Element::float32;
  const float* factors =
      as_float32(row_factors, widens ? scratch(ScratchUse::parameters, row_factors.size) : nullptr);
  const Backward b{function, grad_y, x, grad_x, y};
  const auto run = [&](Piece piece, const void* act) HWY_ATTR __attribute__((noinline)) {
    for_each_row_summing(grad_y.rows, grad_y.cols, {}, [&](size_t r, float*) HWY_ATTR {
      const hn::ScalableTag<float> d;
      HWY_ALIGN float dots[HWY_MAX_BYTES / sizeof(float)];
      hn::Store(hn::Zero(d), d, dots);
      const RowFactor factor{factors[r], grad_row_factors ? dots : nullptr};
      piece(act, b, r, 0, grad_y.cols, nullptr, &factor);
      if (!grad_row_factors) return;
      const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, dots)));
      with_element(grad_row_factors.element, [&](auto element) HWY_ATTR {
        narrow(element, &sum, 1, element.at(grad_row_factors.data, r));
      });
    });
  };
  with_piece<kGated>(b, run);
}

void backward_target(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z,
                     Vector grad_bias, Rows y) {
  const auto sum_over = [&](const auto& body) HWY_ATTR {
    for_each_row_summing(grad_z.rows, grad_z.cols, grad_bias, body);
  };
  either_backward(function, grad_y, z, grad_z, y, static_cast<bool>(grad_bias), sum_over);
}

void some_rows_backward_target(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z,
                               const PartialSums& part, Rows y) {
  const auto sum_over = [&](const auto& body)
                            HWY_ATTR { for_each_row_summing(grad_z.rows, part, body); };
  either_backward(function, grad_y, z, grad_z, y, static_cast<bool>(part), sum_over);
}

void scaled_backward_target(const Function& function, ConstRows grad_y, ConstRows x,
                            ConstVector row_factors, Rows grad_x, Vector grad_row_factors, Rows y) {
  (function.is_gated ? backward_scaled<true> : backward_scaled<false>)(function, grad_y, x,
                                                                       row_factors, grad_x,
                                                                       grad_row_factors, y);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(backward_target);
HWY_EXPORT(some_rows_backward_target);
HWY_EXPORT(scaled_backward_target);

void activation_backward(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z,
                         Vector grad_bias, Rows y) {
  HWY_DYNAMIC_DISPATCH(backward_target)(function, grad_y, z, grad_z, grad_bias, y);
}

void some_rows_backward(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z,
                        const PartialSums& part, Rows y) {
  HWY_DYNAMIC_DISPATCH(some_rows_backward_target)(function, grad_y, z, grad_z, part, y);
}

void scaled_backward(const Function& function, ConstRows grad_y, ConstRows x,
                     ConstVector row_factors, Rows grad_x, Vector grad_row_factors, Rows y) {
  HWY_DYNAMIC_DISPATCH(scaled_backward_target)
  (function, grad_y, x, row_factors, grad_x, grad_row_factors, y);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
