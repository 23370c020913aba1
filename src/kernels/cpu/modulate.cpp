// Rows that are multiplied and shifted, and the sums of their gradients, in float32 chunks that
// stay in L1.
#include "kernels/modulate.h"

#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/modulate.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// How many rows are summed before their sum is added to the sum of earlier rows.
constexpr size_t kBlockRows = 64;
// Columns of one task, so that even a few groups of few columns occupy several threads.
constexpr size_t kColumns = 128;

/// `shift` may be nullptr. Adding a zero in its place would turn products that are -0 into 0.
void modulate_run(const float* x, const float* scale, float offset, const float* shift, float* y,
                  size_t count) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto factor = hn::Add(load_part(Float32{}, d, scale + i, part), hn::Set(d, offset));
    const auto v = load_part(Float32{}, d, x + i, part);
    store_part(Float32{}, d,
               shift ? hn::MulAdd(v, factor, load_part(Float32{}, d, shift + i, part))
                     : hn::Mul(v, factor),
               y + i, part);
  });
}

void modulate_target(ConstRows x, ConstRows scale, float offset, ConstRows shift, Rows y) {
  const size_t height = scale.rows == 0 ? 1 : x.rows / scale.rows;
  for_each_piece(y.rows, y.cols, [&](size_t r, size_t first, size_t piece) HWY_ATTR {
    const ScopedFloatMode mode;
    for_each_chunk(piece, [&](size_t offset_in_piece, size_t count) HWY_ATTR {
      HWY_ALIGN float inputs[3][kChunk], results[kChunk];
      const size_t c = first + offset_in_piece, group = r / height;
      float* const to = place_for(y, r, c, results);
      modulate_run(widened(x, r, c, count, inputs[0]), widened(scale, group, c, count, inputs[1]),
                   offset, shift ? widened(shift, group, c, count, inputs[2]) : nullptr, to, count);
      put_narrowed(to, y, r, c, count);
    });
  });
}

/// sums += grad_y * x
void add_products(const float* grad_y, const float* x, float* sums, size_t count) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto sum =
        hn::MulAdd(load_part(Float32{}, d, grad_y + i, part), load_part(Float32{}, d, x + i, part),
                   load_part(Float32{}, d, sums + i, part));
    store_part(Float32{}, d, sum, sums + i, part);
  });
}

void modulate_sums_target(ConstRows grad_y, ConstRows x, Rows sums) {
  const size_t cols = grad_y.cols, groups = sums.rows;
  if (groups == 0 || cols == 0) return;
  const size_t height = grad_y.rows / groups, pieces = (cols + kColumns - 1) / kColumns;
  const size_t work = std::max<size_t>(1, height * std::min(cols, kColumns));
  auto run = [&](int64_t begin, int64_t end) HWY_ATTR {
    const ScopedFloatMode mode;
    for (auto task = static_cast<size_t>(begin); task < static_cast<size_t>(end); ++task) {
      const size_t group = task / pieces, c = task % pieces * kColumns,
                   count = std::min(kColumns, cols - c), behind = (group + 1) * height;
      HWY_ALIGN float inputs[2][kColumns], totals[kColumns] = {}, of_block[kColumns];
      for (size_t top = group * height; top < behind; top += kBlockRows) {
        std::fill_n(of_block, count, 0.0f);
        for (size_t r = top; r < std::min(behind, top + kBlockRows); ++r)
          add_products(widened(grad_y, r, c, count, inputs[0]), widened(x, r, c, count, inputs[1]),
                       of_block, count);
        accumulate(of_block, totals, count);
      }
      put_narrowed(totals, sums, group, c, count);
    }
  };
  const auto tasks = static_cast<int64_t>(groups * pieces);
  if (grad_y.rows * cols <= kTaskElements) return run(0, tasks);
  parallel_for(0, tasks, static_cast<int64_t>(std::max<size_t>(1, kTaskElements / work)), run);
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(modulate_target);
HWY_EXPORT(modulate_sums_target);

void modulate(ConstRows x, ConstRows scale, float offset, ConstRows shift, Rows y) {
  HWY_DYNAMIC_DISPATCH(modulate_target)(x, scale, offset, shift, y);
}

void modulate_sums(ConstRows grad_y, ConstRows x, Rows sums) {
  HWY_DYNAMIC_DISPATCH(modulate_sums_target)(grad_y, x, sums);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
