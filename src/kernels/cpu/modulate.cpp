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

/// `shift` may be nullptr.
void modulate_run(const float* x, const float* scale, float offset, const float* shift, float* y,
                  size_t count) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto factor = hn::Add(load_part(Float32{}, d, scale + i, part), hn::Set(d, offset));
    const auto added = shift ? load_part(Float32{}, d, shift + i, part) : hn::Zero(d);
    store_part(Float32{}, d, hn::MulAdd(load_part(Float32{}, d, x + i, part), factor, added), y + i,
               part);
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

/// `of_shift` may be nullptr, and so may `of_scale`, together with x.
void add_run(const float* grad_y, const float* x, float* of_scale, float* of_shift, size_t count) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto grad = load_part(Float32{}, d, grad_y + i, part);
    if (of_scale) {
      const auto sum = load_part(Float32{}, d, of_scale + i, part);
      store_part(Float32{}, d, hn::MulAdd(grad, load_part(Float32{}, d, x + i, part), sum),
                 of_scale + i, part);
    }
    if (of_shift) {
      const auto sum = load_part(Float32{}, d, of_shift + i, part);
      store_part(Float32{}, d, hn::Add(grad, sum), of_shift + i, part);
    }
  });
}

void modulate_sums_target(ConstRows grad_y, ConstRows x, Rows grad_scale, Rows grad_shift) {
  const size_t cols = grad_y.cols, groups = grad_scale ? grad_scale.rows : grad_shift.rows;
  if (groups == 0 || cols == 0) return;
  const size_t height = grad_y.rows / groups, pieces = (cols + kColumns - 1) / kColumns;
  const size_t work = std::max<size_t>(1, height * std::min(cols, kColumns));
  auto run = [&](int64_t begin, int64_t end) HWY_ATTR {
    const ScopedFloatMode mode;
    for (auto task = static_cast<size_t>(begin); task < static_cast<size_t>(end); ++task) {
      const size_t group = task / pieces, c = task % pieces * kColumns,
                   count = std::min(kColumns, cols - c), behind = (group + 1) * height;
      HWY_ALIGN float inputs[2][kColumns], of_scale[2][kColumns] = {}, of_shift[2][kColumns] = {};
      for (size_t top = group * height; top < behind; top += kBlockRows) {
        const size_t bottom = std::min(behind, top + kBlockRows);
        std::fill_n(of_scale[1], count, 0.0f);
        std::fill_n(of_shift[1], count, 0.0f);
        for (size_t r = top; r < bottom; ++r)
          add_run(widened(grad_y, r, c, count, inputs[0]),
                  grad_scale ? widened(x, r, c, count, inputs[1]) : nullptr,
                  grad_scale ? of_scale[1] : nullptr, grad_shift ? of_shift[1] : nullptr, count);
        accumulate(of_scale[1], of_scale[0], count);
        accumulate(of_shift[1], of_shift[0], count);
      }
      if (grad_scale) put_narrowed(of_scale[0], grad_scale, group, c, count);
      if (grad_shift) put_narrowed(of_shift[0], grad_shift, group, c, count);
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

void modulate_sums(ConstRows grad_y, ConstRows x, Rows grad_scale, Rows grad_shift) {
  HWY_DYNAMIC_DISPATCH(modulate_sums_target)(grad_y, x, grad_scale, grad_shift);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
