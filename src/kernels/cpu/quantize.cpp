#include "kernels/quantize.h"

#include <cfloat>

#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/targets.h"
#include "kernels/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/quantize.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/quantize-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {

/// Elements that stay in the second-level cache between two passes.
constexpr size_t kPart = 32768;

/// A matrix as pieces of at most `length` adjacent elements: rows, or equal parts of the whole
/// matrix if there are no gaps between rows.
struct Pieces {
  explicit Pieces(ConstRows x) {
    const bool adjacent = x.stride == x.cols || x.rows == 1;
    length = adjacent ? kPart : x.cols;
    distance = adjacent ? kPart : x.stride;
    elements = x.rows * x.cols;
    count = elements == 0 ? 0 : adjacent ? (elements + kPart - 1) / kPart : x.rows;
  }
  /// The length of piece `i`. In contiguous memory of that shape it begins at i * length.
  size_t length_of(size_t i) const { return std::min(length, elements - i * length); }
  int64_t grain() const {
    return static_cast<int64_t>(std::max<size_t>(1, kPart / std::max<size_t>(1, length)));
  }

  size_t count, length, distance, elements;
};

void quantize_scaled(ConstRows x, Fp8Format format, float amax, bool has_nan, float quant_scale,
                     uint8_t* codes) {
  const bool ordinary = is_ordinary(amax, has_nan, quant_scale, format);
  const Pieces pieces(x);
  with_element(x.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    with_format(format, [&](auto kind) HWY_ATTR {
      parallel_for(0, static_cast<int64_t>(pieces.count), pieces.grain(),
                   [&](int64_t first, int64_t last) HWY_ATTR {
                     const ScopedFloatMode mode;
                     // From the end, because the search for the amax has just read the end, which
                     // is still in the cache.
                     for (size_t i = static_cast<size_t>(last); i-- > static_cast<size_t>(first);) {
                       quantize_row<kind()>(element, E::at(x.data, i * pieces.distance),
                                            pieces.length_of(i), quant_scale, ordinary,
                                            codes + i * pieces.length);
                     }
                   });
    });
  });
}

/// Computes y in blocks of rows that stay in the second-level cache, and calls `body` for each as
/// for_each_run does.
template <typename E, typename Body>
Extremes for_each_block_made(E, const MadeRows& made, const Body& body) {
  using Stored = typename E::Stored;
  const Rows& y = made.y;
  const MadeBands bands(made, std::max<size_t>(1, kPart / std::max<size_t>(1, y.cols)));
  const size_t block = bands.height;
  SharedExtremes shared;
  parallel_for(0, static_cast<int64_t>(bands.count), 1, [&](int64_t begin, int64_t last) {
    Extremes extremes;
    const size_t end = std::min(y.rows, static_cast<size_t>(last) * bands.together);
    for (size_t first = static_cast<size_t>(begin) * bands.together; first < end; first += block) {
      const size_t count = std::min(block, end - first);
      Stored* rows = y ? E::at(y.data, first * y.cols)
                       : reinterpret_cast<Stored*>(scratch(ScratchUse::made, block * y.cols));
      made.make(first, count, rows);
      const ScopedFloatMode mode;
      body(rows, first * y.cols, count * y.cols, extremes);
    }
    shared.add(extremes);
  });
  return shared.get();
}

/// Calls `body(elements, place, count, extremes)` for runs of adjacent elements of x, which in
/// contiguous memory begin at `place`. Returns all `extremes` combined.
template <typename E, typename Body>
Extremes for_each_run(E element, const Input& x, const Body& body) {
  if (const auto* made = std::get_if<const MadeRows*>(&x))
    return for_each_block_made(element, **made, body);
  const auto* const band = std::get_if<Band>(&x);
  const ConstRows rows = band != nullptr ? band->rows : whole_of(x);
  const size_t before = band != nullptr ? band->first * rows.cols : 0;
  const Pieces pieces(rows);
  SharedExtremes shared;
  parallel_for(0, static_cast<int64_t>(pieces.count), pieces.grain(),
               [&](int64_t first, int64_t last) HWY_ATTR {
                 const ScopedFloatMode mode;
                 Extremes extremes;
                 for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i)
                   body(E::at(rows.data, i * pieces.distance), before + i * pieces.length,
                        pieces.length_of(i), extremes);
                 shared.add(extremes);
               });
  return shared.get();
}

Seen look_at_all(const Input& x) {
  return with_element(whole_of(x).element, [&](auto element) HWY_ATTR {
    const Extremes all = for_each_run(element, x,
                                      [&](const auto* run, size_t, size_t count, Extremes& extremes)
                                          HWY_ATTR { look_at(element, run, count, extremes); });
    return Seen{value_of_bits(element, all.amax_bits), all.has_nan};
  });
}

/// Adds the amax of adjacent elements to `extremes` and writes their codes. Each part is read for
/// the amax and converted while it is in the cache.
template <Fp8Format kFormat, typename E>
HWY_INLINE void quantize_run(E element, const typename E::Stored* HWY_RESTRICT x, size_t count,
                             float quant_scale, uint8_t* HWY_RESTRICT codes, Extremes& extremes) {
  for (size_t at = 0; at < count; at += kPart) {
    const size_t length = std::min(kPart, count - at);
    Extremes part;
    look_at(element, x + at, length, part);
    const bool ordinary =
        is_ordinary(value_of_bits(element, part.amax_bits), part.has_nan, quant_scale, kFormat);
    quantize_row<kFormat>(element, x + at, length, quant_scale, ordinary, codes + at);
    extremes.amax_bits = std::max(extremes.amax_bits, part.amax_bits);
  }
}

float quantize_given(const Input& x, Fp8Format format, float quant_scale, uint8_t* codes) {
  return with_element(whole_of(x).element, [&](auto element) HWY_ATTR {
    Extremes all;
    with_format(format, [&](auto kind) HWY_ATTR {
      all = for_each_run(
          element, x, [&](const auto* run, size_t at, size_t count, Extremes& extremes) HWY_ATTR {
            quantize_run<kind()>(element, run, count, quant_scale, codes + at, extremes);
          });
    });
    return value_of_bits(element, all.amax_bits);
  });
}

void dequantize_to(const uint8_t* codes, Fp8Format format, float dequant_scale, Rows y) {
  const Pieces pieces(y);
  with_element(y.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    with_format(format, [&](auto kind) HWY_ATTR {
      parallel_for(
          0, static_cast<int64_t>(pieces.count), pieces.grain(),
          [&](int64_t first, int64_t last) HWY_ATTR {
            const ScopedFloatMode mode;
            for (size_t i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i) {
              dequantize_row<kind()>(element, codes + i * pieces.length, pieces.length_of(i),
                                     dequant_scale, E::at(y.data, i * pieces.distance));
            }
          });
    });
  });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(look_at_all);
HWY_EXPORT(quantize_scaled);
HWY_EXPORT(quantize_given);
HWY_EXPORT(dequantize_to);

Seen seen_in(const Input& x) { return HWY_DYNAMIC_DISPATCH(look_at_all)(x); }

void quantize_current_seen(ConstRows x, const Seen& seen, const Fp8Scaling& scaling,
                           Fp8Output out) {
  const float quant_scale = scale_from_amax(seen.amax, scaling, FLT_MAX);
  HWY_DYNAMIC_DISPATCH(quantize_scaled)
  (x, scaling.format, seen.amax, seen.has_nan, quant_scale, out.codes);
  if (out.amax != nullptr) *out.amax = seen.amax;
  if (out.dequant_scale != nullptr) *out.dequant_scale = divide(1.0f, quant_scale);
}

void quantize_current(const Input& x, const Fp8Scaling& scaling, Fp8Output out) {
  quantize_current_seen(whole_of(x), seen_in(x), scaling, out);
}

void quantize_delayed(const Input& x, Fp8Format format, float quant_scale, Fp8Output out) {
  const float largest = HWY_DYNAMIC_DISPATCH(quantize_given)(x, format, quant_scale, out.codes);
  if (out.amax != nullptr) *out.amax = largest;
  if (out.dequant_scale != nullptr) *out.dequant_scale = divide(1.0f, quant_scale);
}

void make_all(const MadeRows& made) {
  const Rows& y = made.y;
  const size_t row_bytes = y.cols * bytes_per_element(y.element);
  constexpr size_t kOfABand = 32768;
  const MadeBands bands(made, std::max<size_t>(1, kOfABand / std::max<size_t>(1, y.cols)));
  parallel_for(0, static_cast<int64_t>(bands.count), 1, [&](int64_t begin, int64_t last) {
    const size_t end = std::min(y.rows, static_cast<size_t>(last) * bands.together);
    for (size_t first = static_cast<size_t>(begin) * bands.together; first < end;
         first += bands.height) {
      void* const rows = y ? static_cast<std::byte*>(y.data) + first * row_bytes
                           : static_cast<void*>(scratch(ScratchUse::made, bands.height * y.cols));
      made.make(first, std::min(bands.height, end - first), rows);
    }
  });
}

void* memory_beside(size_t elements) { return scratch(ScratchUse::made_beside, elements); }

void dequantize(const uint8_t* codes, Fp8Format format, float dequant_scale, Rows y) {
  HWY_DYNAMIC_DISPATCH(dequantize_to)(codes, format, dequant_scale, y);
}

}  // namespace tandem::kernels::cpu
#endif
