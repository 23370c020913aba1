// Forward of activations and gated units in one pass over memory. Most take one exponential and one
// division per element.
#include "kernels/activation.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/activation.cpp"
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
template <class Act, bool kGated, bool kBiased, typename E>
struct ForwardRun {
  using Stored = typename E::Stored;

  const Act& act;
  const Stored* x[2] = {};
  const float* bias[2] = {};
  /// nullptr if z is not wanted.
  Stored* z[2] = {};
  Stored* y = nullptr;
  /// The distance of two rows of x, in elements.
  size_t next_row = 0;
  /// The row's factor; nullptr if there is none.
  const float* factor = nullptr;

  template <size_t N, typename Part>
  HWY_INLINE void run(size_t i, Part part) const {
    Pack<N> result = act.value(make_z<N>(i, part, 0));
    if constexpr (kGated) result = result * other_of(act, make_z<N>(i, part, 1));
    if (factor) result = result * Pack<N>(*factor);
    store_pack(E{}, result, y + i, part);
  }

 private:
  template <size_t N, typename Part>
  HWY_INLINE Pack<N> make_z(size_t i, Part part, int half) const {
    Pack<N> v = load_pack<N>(E{}, x[half] + i, part);
    // The halves of a row are short streams, which the hardware prefetches late.
    if constexpr (kGated && N > 1) prefetch_pack<N>(E{}, x[half] + i + next_row);
    if constexpr (kBiased) v = round_pack(E{}, v + load_pack<N>(Float32{}, bias[half] + i, part));
    if (z[half]) store_pack(E{}, v, z[half] + i, part);
    return v;
  }
};

/// What all rows share. `bias` and `factors` are float32 or nullptr.
struct Forward {
  const Function& function;
  ConstRows x;
  const float *bias, *factors;
  Element z_element;
  Rows z, y;

  const float* factor(size_t r) const { return factors ? factors + r : nullptr; }
  bool is_uniform() const {
    return x.element == z_element && y.element == z_element && (!z || z.element == z_element);
  }
};

/// Columns [first, first + piece) of row r; x, z and y all have the element E.
template <bool kGated, bool kBiased, class Act, typename E>
void forward_uniform(const Act& act, E element, const Forward& f, size_t r, size_t first,
                     size_t piece) {
  for_each_run<kGated>(f.function, f.y.cols, first, piece,
                       [&](size_t c, size_t count, const size_t* columns) HWY_ATTR {
                         ForwardRun<Act, kGated, kBiased, E> run{act};
                         for (int half = 0; half < (kGated ? 2 : 1); ++half) {
                           run.x[half] = element.at(f.x.data, r * f.x.stride + columns[half]);
                           if constexpr (kBiased) run.bias[half] = f.bias + columns[half];
                           if (f.z)
                             run.z[half] = element.at(f.z.data, r * f.z.stride + columns[half]);
                         }
                         run.y = element.at(f.y.data, r * f.y.stride + c);
                         run.next_row = f.x.stride;
                         run.factor = f.factor(r);
                         for_each_pack(count, run);
                       });
}

/// Columns of row r for any mix of elements, through float32 buffers.
template <bool kGated, class Act>
void forward_mixed(const Act& act, const Forward& f, size_t r, size_t first, size_t piece) {
  const auto run_chunk = [&](size_t c, size_t count, const size_t* columns) HWY_ATTR {
    HWY_ALIGN float inputs[2][kChunk], results[kChunk];
    ForwardRun<Act, kGated, false, Float32> run{act};
    for (int half = 0; half < (kGated ? 2 : 1); ++half) {
      const float* from = widened(f.x, r, columns[half], count, inputs[half]);
      if (from != inputs[half]) std::copy_n(from, count, inputs[half]);
      if (f.bias) accumulate(f.bias + columns[half], inputs[half], count);
      round_all(f.z_element, inputs[half], count);
      if (f.z) put_narrowed(inputs[half], f.z, r, columns[half], count);
      run.x[half] = inputs[half];
    }
    run.y = place_for(f.y, r, c, results);
    run.factor = f.factor(r);
    for_each_pack(count, run);
    put_narrowed(run.y, f.y, r, c, count);
  };
  for_each_chunk(piece, [&](size_t offset, size_t chunk) HWY_ATTR {
    for_each_run<kGated>(f.function, f.y.cols, first + offset, chunk,
                         [&](size_t c, size_t count, const size_t* columns)
                             HWY_ATTR { run_chunk(c, count, columns); });
  });
}

/// Columns [first, first + piece) of row r, with the arguments of with_activation's body.
template <bool kGated, class Act, typename E>
void forward_piece(const void* act_, const Forward& f, size_t r, size_t first, size_t piece) {
  const Act& act = *static_cast<const Act*>(act_);
  if (!f.is_uniform() || f.z_element != E::kElement)
    forward_mixed<kGated>(act, f, r, first, piece);
  else if (f.bias)
    forward_uniform<kGated, true>(act, E{}, f, r, first, piece);
  else
    forward_uniform<kGated, false>(act, E{}, f, r, first, piece);
}
using Piece = void (*)(const void*, const Forward&, size_t, size_t, size_t);

template <bool kGated>
void forward(const Function& function, ConstRows x, ConstVector bias, ConstVector factors,
             Element z_element, Rows z, Rows y) {
  if (!kGated && !bias && !factors && is_flat(x) && is_flat(z) && is_flat(y)) {
    flatten(x);
    if (z) flatten(z);
    flatten(y);
  }
  // There is a bias or there are factors, but not both.
  const ConstVector vector = bias ? bias : factors;
  const bool widens = vector && vector.element != Element::float32;
  const float* wide =
      as_float32(vector, widens ? scratch(ScratchUse::parameters, vector.size) : nullptr);
  const Forward all{function, x, bias ? wide : nullptr, factors ? wide : nullptr, z_element, z, y};

  // This loop is compiled once for all activations.
  const auto run = [&](Piece piece, const void* act) HWY_ATTR __attribute__((noinline)) {
    for_each_piece(y.rows, y.cols, [&](size_t r, size_t first, size_t count) HWY_ATTR {
      piece(act, all, r, first, count);
    });
  };
  with_activation<kGated>(function, z_element, [&](const auto& act, auto precision) HWY_ATTR {
    using Act = std::remove_cvref_t<decltype(act)>;
    using E = std::conditional_t<decltype(precision)::value == Precision::full, Float32, BFloat16>;
    run(forward_piece<kGated, Act, E>, &act);
  });
}

void forward_target(const Function& function, ConstRows x, ConstVector bias, ConstVector factors,
                    Element z_element, Rows z, Rows y) {
  (function.is_gated ? forward<true> : forward<false>)(function, x, bias, factors, z_element, z, y);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(forward_target);

void activation_forward(const Function& function, ConstRows x, ConstVector bias, Element z_element,
                        Rows z, Rows y) {
  HWY_DYNAMIC_DISPATCH(forward_target)(function, x, bias, {}, z_element, z, y);
}

void scaled_forward(const Function& function, ConstRows x, ConstVector row_factors, Rows y) {
  HWY_DYNAMIC_DISPATCH(forward_target)(function, x, {}, row_factors, x.element, {}, y);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
