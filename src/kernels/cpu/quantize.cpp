#include "kernels/quantize.h"

#include <cfloat>

#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/targets.h"
#include "kernels/parallel.h"
#include "kernels/quantize_made.h"

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

void amax_of(ConstRows x, float& amax, bool& has_nan) {
  const Pieces pieces(x);
  SharedExtremes shared;
  with_element(x.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    parallel_for(0, static_cast<int64_t>(pieces.count), pieces.grain(),
                 [&](int64_t first, int64_t last) HWY_ATTR {
                   Extremes extremes;
                   for (size_t i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i) {
                     look_at(element, E::at(x.data, i * pieces.distance), pieces.length_of(i),
                             extremes);
                   }
                   shared.add(extremes);
                 });
    amax = value_of_bits(element, shared.get().amax_bits);
    has_nan = shared.get().has_nan;
  });
}

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

/// amax_of and quantize_scaled in one pass: each part is read for the amax and converted while it
/// is in the cache.
void quantize_given(ConstRows x, Fp8Format format, float quant_scale, uint8_t* codes, float& amax) {
  const Pieces pieces(x);
  SharedExtremes shared;
  with_element(x.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    with_format(format, [&](auto kind) HWY_ATTR {
      parallel_for(
          0, static_cast<int64_t>(pieces.count), pieces.grain(),
          [&](int64_t first, int64_t last) HWY_ATTR {
            const ScopedFloatMode mode;
            Extremes all;
            for (size_t i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i) {
              const auto* from = E::at(x.data, i * pieces.distance);
              uint8_t* to = codes + i * pieces.length;
              const size_t length = pieces.length_of(i);
              for (size_t at = 0; at < length; at += kPart) {
                const size_t count = std::min(kPart, length - at);
                Extremes part;
                look_at(element, from + at, count, part);
                const bool ordinary = is_ordinary(value_of_bits(element, part.amax_bits),
                                                  part.has_nan, quant_scale, format);
                quantize_row<kind()>(element, from + at, count, quant_scale, ordinary, to + at);
                all.amax_bits = std::max(all.amax_bits, part.amax_bits);
              }
            }
            shared.add(all);
          });
    });
    amax = value_of_bits(element, shared.get().amax_bits);
  });
}

/// Computes y in blocks of rows that stay in the second-level cache, and calls `body(rows, first,
/// count, extremes)` for each. Returns all `extremes` combined.
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
      body(rows, first, count, extremes);
    }
    shared.add(extremes);
  });
  return shared.get();
}

/// Adds the amax of adjacent elements to `extremes` and writes their codes.
template <Fp8Format kFormat, typename E>
HWY_INLINE void quantize_part(E element, const typename E::Stored* HWY_RESTRICT x, size_t count,
                              float quant_scale, uint8_t* HWY_RESTRICT codes, Extremes& extremes) {
  const ScopedFloatMode mode;
  Extremes seen;
  look_at(element, x, count, seen);
  const bool ordinary =
      is_ordinary(value_of_bits(element, seen.amax_bits), seen.has_nan, quant_scale, kFormat);
  quantize_row<kFormat>(element, x, count, quant_scale, ordinary, codes);
  extremes.amax_bits = std::max(extremes.amax_bits, seen.amax_bits);
}

void amax_while_made(const MadeRows& made, float& amax, bool& has_nan) {
  with_element(made.y.element, [&](auto element) HWY_ATTR {
    const Extremes all = for_each_block_made(
        element, made, [&](auto* rows, size_t, size_t count, Extremes& extremes) HWY_ATTR {
          look_at(element, rows, count * made.y.cols, extremes);
        });
    amax = value_of_bits(element, all.amax_bits);
    has_nan = all.has_nan;
  });
}

void quantize_while_made(const MadeRows& made, Fp8Format format, float quant_scale, uint8_t* codes,
                         float& amax) {
  const size_t cols = made.y.cols;
  with_element(made.y.element, [&](auto element) HWY_ATTR {
    with_format(format, [&](auto kind) HWY_ATTR {
      const Extremes all = for_each_block_made(
          element, made,
          [&](const auto* rows, size_t first, size_t count, Extremes& extremes) HWY_ATTR {
            quantize_part<kind()>(element, rows, count * cols, quant_scale, codes + first * cols,
                                  extremes);
          });
      amax = value_of_bits(element, all.amax_bits);
    });
  });
}

void look_at_rows(ConstRows rows, Seen& seen) {
  with_element(rows.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    Extremes extremes;
    look_at(element, E::at(rows.data, 0), rows.rows * rows.cols, extremes);
    seen = {value_of_bits(element, extremes.amax_bits), extremes.has_nan};
  });
}

void quantize_band_given(const Band& band, Fp8Format format, float quant_scale, uint8_t* codes,
                         float& amax) {
  const ConstRows& rows = band.rows;
  with_element(rows.element, [&](auto element) HWY_ATTR {
    using E = decltype(element);
    with_format(format, [&](auto kind) HWY_ATTR {
      Extremes extremes;
      quantize_part<kind()>(element, E::at(rows.data, 0), rows.rows * rows.cols, quant_scale,
                            codes + band.first * rows.cols, extremes);
      amax = value_of_bits(element, extremes.amax_bits);
    });
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

HWY_EXPORT(amax_of);
HWY_EXPORT(quantize_scaled);
HWY_EXPORT(quantize_given);
HWY_EXPORT(amax_while_made);
HWY_EXPORT(quantize_while_made);
HWY_EXPORT(look_at_rows);
HWY_EXPORT(quantize_band_given);
HWY_EXPORT(dequantize_to);

float amax(ConstRows x) {
  float largest = 0.0f;
  bool has_nan = false;
  HWY_DYNAMIC_DISPATCH(amax_of)(x, largest, has_nan);
  return largest;
}

namespace {

/// The codes of x, whose amax is known.
void quantize_with_amax(ConstRows x, float largest, bool has_nan, const CurrentScaling& scaling,
                        Fp8Output out) {
  const float quant_scale =
      scale_from_amax(largest, scaling.format, scaling.eps, scaling.power_of_two, FLT_MAX);
  HWY_DYNAMIC_DISPATCH(quantize_scaled)
  (x, scaling.format, largest, has_nan, quant_scale, out.codes);
  *out.amax = largest;
  *out.dequant_scale = divide(1.0f, quant_scale);
}

}  // namespace

void quantize_current(ConstRows x, const CurrentScaling& scaling, Fp8Output out) {
  float largest = 0.0f;
  bool has_nan = false;
  HWY_DYNAMIC_DISPATCH(amax_of)(x, largest, has_nan);
  quantize_with_amax(x, largest, has_nan, scaling, out);
}

float amax_made(const MadeRows& made) {
  float largest = 0.0f;
  bool has_nan = false;
  HWY_DYNAMIC_DISPATCH(amax_while_made)(made, largest, has_nan);
  return largest;
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

Seen look_at_band(const Band& band) {
  Seen seen;
  HWY_DYNAMIC_DISPATCH(look_at_rows)(band.rows, seen);
  return seen;
}

Seen quantize_delayed_band(const Band& band, Fp8Format format, float quant_scale, uint8_t* codes) {
  Seen seen;
  HWY_DYNAMIC_DISPATCH(quantize_band_given)(band, format, quant_scale, codes, seen.amax);
  return seen;
}

void quantize_current_seen(ConstRows y, const Seen& seen, const CurrentScaling& scaling,
                           Fp8Output out) {
  quantize_with_amax(y, seen.amax, seen.has_nan, scaling, out);
}

void quantize_current_made(const MadeRows& made, const CurrentScaling& scaling, Fp8Output out) {
  float largest = 0.0f;
  bool has_nan = false;
  HWY_DYNAMIC_DISPATCH(amax_while_made)(made, largest, has_nan);
  quantize_with_amax(made.y, largest, has_nan, scaling, out);
}

void quantize_delayed(ConstRows x, Fp8Format format, float quant_scale, Fp8Output out) {
  HWY_DYNAMIC_DISPATCH(quantize_given)(x, format, quant_scale, out.codes, *out.amax);
  *out.dequant_scale = divide(1.0f, quant_scale);
}

void quantize_delayed_made(const MadeRows& made, Fp8Format format, float quant_scale,
                           Fp8Output out) {
  HWY_DYNAMIC_DISPATCH(quantize_while_made)(made, format, quant_scale, out.codes, *out.amax);
  *out.dequant_scale = divide(1.0f, quant_scale);
}

void dequantize(const uint8_t* codes, Fp8Format format, float dequant_scale, Rows y) {
  HWY_DYNAMIC_DISPATCH(dequantize_to)(codes, format, dequant_scale, y);
}

}  // namespace tandem::kernels::cpu
#endif
