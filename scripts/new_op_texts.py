"""The texts that new_op.py writes. @name@ stands for the op's name, @Type@ for the prefix of its types.

Sources are compiled in groups, so every name at file scope must contain the op's name. Kernels are compiled one by one.
"""

ACTIVATION_FORMULA = """template <Precision kPrecision>
struct Formula<Activation::@name@, kPrecision> {
  template <size_t N>
  static HWY_INLINE Pack<N> value(const Pack<N>& x) {
    return x / denominator(x);
  }
  template <size_t N>
  static HWY_INLINE ValueAndGrad<N> value_and_grad(const Pack<N>& x, const Pack<N>& grad) {
    const Pack<N> below = denominator(x);
    return {x / below, grad / (below * below)};
  }

 private:
  template <size_t N>
  static HWY_INLINE Pack<N> denominator(const Pack<N>& x) {
    return Pack<N>(1.0f) + each([](auto v) TANDEM_INLINE_LAMBDA { return hn::Abs(v); }, x);
  }
};

"""

ACTIVATION_REFERENCE = """template <>
struct ActivationReference<Activation::@name@> {
  static at::Tensor value(const at::Tensor& z) { return z / (1 + z.abs()); }
  static at::Tensor grad(const at::Tensor& grad_y, const at::Tensor& z) {
    const at::Tensor below = 1 + z.abs();
    return grad_y / (below * below);
  }
};

"""

# Rows for tests/python/test_kernel_ops.py.
KERNEL_OP_CASES = '''        "@name@_backward": [y, x, 1.0, [True, True]],
        "@name@_forward": [x, 1.0],
'''

NEW_FILES = {
    "src/kernels/@name@.h": """// @name@, forward and backward: one pass over memory each.
#pragma once

#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// y = x / (1 + slope |x|), computed in float32 and rounded once.
///
/// Shapes: x, y [rows, cols].
void @name@_forward(ConstRows x, float slope, Rows y);

/// grad_x = grad_y / (1 + slope |x|)^2; y as forward wrote it, to the bit.
///
/// Optional: y.
void @name@_backward(ConstRows grad_y, ConstRows x, float slope, Rows grad_x, Rows y);

}  // namespace tandem::kernels::cpu
""",
    "src/kernels/cpu/@name@.cpp": """// @name@: whatever the elements are, rows go through float32 buffers that stay in L1.
#include "kernels/@name@.h"

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/@name@.cpp"
#include "hwy/foreach_target.h"
// Behind foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"
#include "kernels/cpu/elementwise-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::kernels::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// 1 + slope |x|
template <class D>
HWY_INLINE hn::Vec<D> denominator(D d, hn::Vec<D> x, float slope) {
  return hn::Add(hn::Set(d, 1.0f), hn::Mul(hn::Set(d, slope), hn::Abs(x)));
}

void forward_run(const float* x, float slope, float* y, size_t count) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto v = load_part(Float32{}, d, x + i, part);
    store_part(Float32{}, d, hn::Div(v, denominator(d, v, slope)), y + i, part);
  });
}

/// `y` may be null.
void backward_run(const float* grad_y, const float* x, float slope, float* grad_x, float* y,
                  size_t count) {
  const hn::ScalableTag<float> d;
  for_each_vector(count, [&](size_t i, auto part) TANDEM_INLINE_LAMBDA {
    const auto v = load_part(Float32{}, d, x + i, part), below = denominator(d, v, slope);
    const auto grad = hn::Div(load_part(Float32{}, d, grad_y + i, part), hn::Mul(below, below));
    store_part(Float32{}, d, grad, grad_x + i, part);
    if (y) store_part(Float32{}, d, hn::Div(v, below), y + i, part);
  });
}

void @name@_forward_target(ConstRows x, float slope, Rows y) {
  if (is_flat(x) && is_flat(y)) {
    flatten(x);
    flatten(y);
  }
  for_each_piece(y.rows, y.cols, [&](size_t r, size_t first, size_t piece) HWY_ATTR {
    for_each_chunk(piece, [&](size_t offset, size_t count) HWY_ATTR {
      HWY_ALIGN float inputs[kChunk], results[kChunk];
      const size_t c = first + offset;
      float* to = place_for(y, r, c, results);
      forward_run(widened(x, r, c, count, inputs), slope, to, count);
      put_narrowed(to, y, r, c, count);
    });
  });
}

void @name@_backward_target(ConstRows grad_y, ConstRows x, float slope, Rows grad_x, Rows y) {
  if (is_flat(grad_y) && is_flat(x) && is_flat(grad_x) && is_flat(y)) {
    flatten(grad_y);
    flatten(x);
    flatten(grad_x);
    if (y) flatten(y);
  }
  for_each_piece(grad_x.rows, grad_x.cols, [&](size_t r, size_t first, size_t piece) HWY_ATTR {
    for_each_chunk(piece, [&](size_t offset, size_t count) HWY_ATTR {
      HWY_ALIGN float inputs[2][kChunk], results[2][kChunk];
      const size_t c = first + offset;
      float* to = place_for(grad_x, r, c, results[0]);
      float* again = y ? place_for(y, r, c, results[1]) : nullptr;
      backward_run(widened(grad_y, r, c, count, inputs[0]), widened(x, r, c, count, inputs[1]),
                   slope, to, again, count);
      put_narrowed(to, grad_x, r, c, count);
      if (y) put_narrowed(again, y, r, c, count);
    });
  });
}

}  // namespace tandem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem::kernels::cpu {

HWY_EXPORT(@name@_forward_target);
HWY_EXPORT(@name@_backward_target);

void @name@_forward(ConstRows x, float slope, Rows y) {
  HWY_DYNAMIC_DISPATCH(@name@_forward_target)(x, slope, y);
}

void @name@_backward(ConstRows grad_y, ConstRows x, float slope, Rows grad_x, Rows y) {
  HWY_DYNAMIC_DISPATCH(@name@_backward_target)(grad_y, x, slope, grad_x, y);
}

}  // namespace tandem::kernels::cpu
#endif  // HWY_ONCE
""",
    "src/kernel_ops/elementwise/@name@.h": """// @name@ as kernel ops.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// y = x / (1 + slope |x|).
///
/// Shapes: x any -> y like x.
struct @Type@Forward {
  static constexpr const char* kName = "@name@_forward";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& x;
    double slope;
    TANDEM_ARGUMENTS(x, slope)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// grad_x = grad_y / (1 + slope |x|)^2; y as forward wrote it.
struct @Type@Backward {
  static constexpr const char* kName = "@name@_backward";
  static constexpr std::array kResults{"grad_x", "y"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& x;
    double slope;
    std::array<bool, 2> output_mask;
    TANDEM_ARGUMENTS(grad_y, x, slope, output_mask)
  };
  static Specs<2> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<2> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
""",
    "src/kernel_ops/elementwise/@name@.cpp": """#include "kernel_ops/elementwise/@name@.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/@name@.h"

namespace tandem::kernel_ops {

Specs<1> @Type@Forward::shapes(const Args& args) {
  check_floating("@name@", args.x, "x");
  return {like(args.x)};
}

void @Type@Forward::cpu(const Args& args, std::span<Tensor> results) {
  kernels::cpu::@name@_forward(RowsIn(args.x), static_cast<float>(args.slope), rows_out(results[0]));
}

Results<1> @Type@Forward::reference(const Args& args) {
  const Tensor source = args.x.to(wide(args.x.scalar_type()));
  return {(source / (1 + args.slope * source.abs())).to(args.x.scalar_type())};
}

Specs<2> @Type@Backward::shapes(const Args& args) {
  const auto& [grad_y, x, slope, output_mask] = args;
  check_floating("@name@_backward", x, "x");
  check_same_shape("@name@_backward", grad_y, "grad_y", x, "x");
  return {like(x, x.scalar_type(), output_mask[0]), like(x, x.scalar_type(), output_mask[1])};
}

void @Type@Backward::cpu(const Args& args, std::span<Tensor> results) {
  const auto& [grad_y, x, slope, output_mask] = args;
  // The kernel always writes grad_x.
  const Tensor grad_x = results[0].defined() ? results[0] : at::empty(x.sizes(), x.options());
  kernels::cpu::@name@_backward(RowsIn(grad_y), RowsIn(x), static_cast<float>(slope),
                              rows_out(grad_x), rows_out(results[1]));
}

Results<2> @Type@Backward::reference(const Args& args) {
  const auto& [grad_y, x, slope, output_mask] = args;
  const Tensor source = x.to(wide(x.scalar_type())), below = 1 + slope * source.abs();
  const Tensor grad = grad_y.to(source.scalar_type());
  return {output_mask[0] ? (grad / (below * below)).to(x.scalar_type()) : masked_out(x),
          output_mask[1] ? (source / below).to(x.scalar_type()) : masked_out(x)};
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<@Type@Forward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic>::these, @Type@Forward::cpu}});
  register_kernel_op<@Type@Backward>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic>::these, @Type@Backward::cpu}});
}

}  // namespace tandem::kernel_ops
""",
    "src/ops/@name@.cpp": """// y = x / (1 + slope |x|), element by element.
#include "core/call.h"
#include "core/op_def.h"
#include "kernel_ops/elementwise/@name@.h"

namespace tandem::ops {

namespace {

struct @Type@Options {
  double slope = 1;
};

void @name@_forward(Call& call) {
  enum Read { x };
  call.write<kernel_ops::@Type@Forward>(
      {.x = call.in(x), .slope = call.options<@Type@Options>().slope});
}

void @name@_backward(Call& call) {
  enum Read { grad_y, x };
  call.write<kernel_ops::@Type@Backward>({.grad_y = call.in(grad_y),
                                        .x = call.in(x),
                                        .slope = call.options<@Type@Options>().slope,
                                        .output_mask = call.output_mask<2>()});
}

const OpDef k@Type@{
    .name = "@name@",
    .formula = "y = x / (1 + slope |x|)",
    .signature = {@Type@Options{},
                  {{"slope", &@Type@Options::slope, at_least(0), "how fast y bends away from x"}}},
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = @name@_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "x"},
                  .writes = {"grad_x", "y"},
                  .run = @name@_backward}},
    .reemits = {"y"},
    .context = {"x"},
};
TANDEM_REGISTER_OP(k@Type@);

}  // namespace

}  // namespace tandem::ops
""",
    "tests/python/test_@name@.py": '''"""@name@ against its formula in float64."""

import pytest
import torch
from support import TOLERANCES, check_against

import tandem
from tandem import ops
from tandem.ops.library import class_of

@Type@ = class_of("@name@")


def formula(slope):
    return lambda x: x / (1 + slope * x.abs())


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("slope", [0.0, 1.0, 2.5])
def test_values_and_gradients(slope, dtype):
    check_against(@Type@(slope=slope), formula(slope), torch.randn(5, 67).to(dtype).requires_grad_())


@pytest.mark.parametrize("shape", [(), (0, 8), (1,), (3, 16), (2, 3, 7), (300, 300)])
def test_shapes(shape):
    check_against(@Type@(), formula(1.0), torch.randn(shape, requires_grad=True))


def test_rows_that_are_apart():
    check_against(@Type@(), formula(1.0), torch.randn(5, 32)[:, ::2].detach().requires_grad_())


def test_backward_writes_the_output_again_instead_of_keeping_it():
    box = ops.Sequential(ops.Linear(8, 8), @Type@(slope=0.5), ops.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    box(x).sum().backward()
    assert box.saved_bytes() == 4 * 8 * 4
    assert tandem.verify(box, x)


def test_it_compiles():
    op, x = @Type@(slope=2.0), torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), op(x))
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(op(x).sum(), x))


def test_a_negative_slope_is_refused():
    with pytest.raises(ValueError, match="@Type@: expected slope to be a finite number >= 0, got -1.0. slope: how fast y bends away from x."):
        @Type@(slope=-1.0)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="@name@: expected x of dtype float32, bfloat16, float16 or float64, got int64"):
        @Type@()(torch.ones(3, dtype=torch.int64))
''',
}
