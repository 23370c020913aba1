// How elementwise kernels iterate over vectors, rows and threads. Included once per Highway target.

#if defined(TANDEM_KERNELS_CPU_ELEMENTWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_KERNELS_CPU_ELEMENTWISE_INL_H_
#undef TANDEM_KERNELS_CPU_ELEMENTWISE_INL_H_
#else
#define TANDEM_KERNELS_CPU_ELEMENTWISE_INL_H_
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/cpu/element-inl.h"
#include "kernels/cpu/scratch.h"
#include "kernels/parallel.h"
#include "kernels/partial_sums.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Elements of one task for the thread pool; less work is not worth another thread.
constexpr size_t kTaskElements = 16384;
/// Columns that are converted at a time if element types differ: all buffers together fit in L1.
constexpr size_t kChunk = 256;

/// Calls `body(c, count)` for pieces of at most kChunk columns.
template <typename Body>
HWY_INLINE void for_each_chunk(size_t cols, const Body& body) {
  for (size_t c = 0; c < cols; c += kChunk) body(c, std::min(kChunk, cols - c));
}

/// Calls `body(row, column, count)` for pieces of rows, on several threads if that pays. Results
/// must not depend on the pieces.
template <typename Body>
HWY_INLINE void for_each_piece(size_t rows, size_t cols, const Body& body) {
  if (cols == 0) return;  // whatever the number of rows
  if (rows * cols <= kTaskElements) {
    for (size_t r = 0; r < rows; ++r) body(r, size_t{0}, cols);
    return;
  }
  const size_t pieces = (cols + kTaskElements - 1) / kTaskElements;
  const size_t grain = std::max<size_t>(1, kTaskElements / cols);
  parallel_for(0, static_cast<int64_t>(rows * pieces), static_cast<int64_t>(grain),
               [&](int64_t begin, int64_t end) {
                 for (size_t i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
                   const size_t r = pieces == 1 ? i : i / pieces,
                                c = pieces == 1 ? 0 : i % pieces * kTaskElements;
                   body(r, c, std::min(kTaskElements, cols - c));
                 }
               });
}

/// Views without gaps are flattened to a single row, so that short rows have no tails. All views of
/// a call must be flat then.
template <typename View>
bool is_flat(const View& view) {
  return !view || view.stride == view.cols || view.rows <= 1;
}
template <typename View>
void flatten(View& view) {
  view.cols *= view.rows;
  view.stride = view.cols;
  view.rows = std::min<size_t>(view.rows, 1);
}

/// `count` elements of row `r` from column `c` as float32: in place if they are float32, else
/// widened into `scratch`.
HWY_NOINLINE inline const float* widened(ConstRows x, size_t r, size_t c, size_t count,
                                         float* scratch) {
  if (x.element == Element::float32) return static_cast<const float*>(x.data) + r * x.stride + c;
  with_element(x.element, [&](auto element) HWY_ATTR {
    widen(element, decltype(element)::at(x.data, r * x.stride + c), count, scratch);
  });
  return scratch;
}

/// Where float32 results for row `r`, column `c` go: the row itself if it is float32, else
/// `scratch`, for `put_narrowed`.
HWY_INLINE float* place_for(Rows y, size_t r, size_t c, float* scratch) {
  return y.element == Element::float32 ? static_cast<float*>(y.data) + r * y.stride + c : scratch;
}
HWY_NOINLINE inline void put_narrowed(const float* results, Rows y, size_t r, size_t c,
                                      size_t count) {
  with_element(y.element, [&](auto element) HWY_ATTR {
    auto* to = decltype(element)::at(y.data, r * y.stride + c);
    if (static_cast<const void*>(to) != results) narrow(element, results, count, to);
  });
}

/// Rounds `count` floats to the element, in place.
HWY_NOINLINE inline void round_all(Element to, float* values, size_t count) {
  if (to == Element::float32) return;
  with_element(to, [&](auto element) HWY_ATTR {
    const hn::ScalableTag<float> d;
    for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
      store_part(Float32{}, d, round_to(element, d, load_part(Float32{}, d, values + i, part)),
                 values + i, part);
    });
  });
}

/// sums[i] += values[i].
HWY_NOINLINE inline void accumulate(const float* values, float* sums, size_t count) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto sum =
        hn::Add(load_part(Float32{}, d, sums + i, part), load_part(Float32{}, d, values + i, part));
    store_part(Float32{}, d, sum, sums + i, part);
  });
}

/// Calls `body(row, sums)` for each of some rows of a matrix, to add the row's columns to `sums`
/// (float32; nullptr if no sums are wanted).
template <typename Body>
HWY_INLINE void for_each_row_summing(size_t rows, const PartialSums& part, const Body& body) {
  const size_t begin = part.first, end = begin + rows, height = part.block_rows;
  const auto run_blocks = [&](int64_t first, int64_t last) {
    for (size_t block = static_cast<size_t>(first); block < static_cast<size_t>(last); ++block) {
      const size_t top = block * height, bottom = std::min(end, top + height);
      float* sums = part ? part.sums + block * part.cols : nullptr;
      if (sums && top >= begin) std::fill_n(sums, part.cols, 0.0f);
      for (size_t r = std::max(begin, top); r < bottom; ++r) body(r - begin, sums);
    }
  };
  const auto first = static_cast<int64_t>(begin / height),
             last = static_cast<int64_t>((end + height - 1) / height);
  if (rows * part.cols <= kTaskElements) return run_blocks(first, last);
  const size_t grain = std::max<size_t>(1, kTaskElements / (height * part.cols));
  parallel_for(first, last, static_cast<int64_t>(grain),
               [&](int64_t some, int64_t more) { run_blocks(some, more); });
}

/// totals = the sums of all `rows` rows of a matrix, rounded once. `totals` may be the memory of
/// the first block's sums.
HWY_INLINE void add_up(const PartialSums& part, size_t rows, Vector totals) {
  const size_t cols = part.cols;
  if (rows == 0) std::fill_n(part.sums, cols, 0.0f);
  for (size_t block = 1; block < sum_blocks(rows); ++block)
    accumulate(part.sums + block * cols, part.sums, cols);
  if (part.sums == totals.data) return;
  with_element(totals.element, [&](auto element) HWY_ATTR {
    narrow(element, part.sums, cols, decltype(element)::at(totals.data, 0));
  });
}

/// for_each_row_summing and add_up for all rows of a matrix. `totals` is optional.
template <typename Body>
HWY_INLINE void for_each_row_summing(size_t rows, size_t cols, Vector totals, const Body& body) {
  if (cols == 0) return;
  const size_t blocks = sum_blocks(rows);
  constexpr size_t kInline = 1024;
  HWY_ALIGN float few[kInline];
  float* partial = nullptr;
  if (totals) {
    if (blocks == 1 && totals.element == Element::float32) {
      partial = static_cast<float*>(totals.data);
    } else if (blocks * cols <= kInline) {
      partial = few;
    } else {
      partial = scratch(ScratchUse::partial_sums, blocks * cols);
    }
  }

  const PartialSums all{partial, cols, sum_block_rows(rows)};
  for_each_row_summing(rows, all, body);
  if (totals) add_up(all, rows, totals);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // TANDEM_KERNELS_CPU_ELEMENTWISE_INL_H_
