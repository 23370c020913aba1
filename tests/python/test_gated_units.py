"""Gated units with numbers, with a and b by turns, and times a number per row, against torch's expressions in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support import check_against, clamped_swiglu, of_halves, situ, squared_relu

import tandem
from tandem import ops

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (5,), (2, 3), (300,))

# The op of a block size, and its function of a and b.
UNITS = {
    "GLU": (lambda s: ops.GLU(glu_interleave_size=s), lambda a, b: torch.sigmoid(a) * b),
    "SwiGLU": (lambda s: ops.SwiGLU(glu_interleave_size=s), lambda a, b: F.silu(a) * b),
    "SiTUGLU": (lambda s: ops.SiTUGLU(glu_interleave_size=s), situ),
    "SiTUGLU 0.5, 2": (lambda s: ops.SiTUGLU(beta1=0.5, beta2=2.0, glu_interleave_size=s), lambda a, b: situ(a, b, 0.5, 2.0)),
    "ClampedSwiGLU": (lambda s: ops.ClampedSwiGLU(glu_interleave_size=s), clamped_swiglu),
    "ClampedSwiGLU 0.7, 1, 0.5": (
        lambda s: ops.ClampedSwiGLU(limit=0.7, alpha=1.0, glu_linear_offset=0.5, glu_interleave_size=s),
        lambda a, b: clamped_swiglu(a, b, 0.7, 1.0, 0.5),
    ),
}
SCALED = {
    "ScaledSwiGLU": (ops.ScaledSwiGLU, lambda a, b: F.silu(a) * b),
    "ScaledSiTUGLU": (lambda s: ops.ScaledSiTUGLU(s, beta1=2.0), lambda a, b: situ(a, b, 2.0)),
    "ScaledClampedQGeGLU": (lambda s: ops.ScaledClampedQGeGLU(s, limit=0.8), lambda a, b: clamped_swiglu(a, b, 0.8)),
    "ScaledSReLU": (lambda s: ops.ScaledSReLU(activation_recompute_in_mlp=s is not None), None),
}


def by_turns(function, size):
    """`function(a, b)` of the last dimension, in which blocks of `size` columns take turns."""
    if size is None:
        return of_halves(function)

    def apply(x):
        a, b = x.unflatten(-1, (-1, 2, size)).unbind(-2)
        return function(a, b).flatten(-2)

    return apply


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [None, 1, 4, 32])
@pytest.mark.parametrize("name", UNITS)
def test_units(name, size, dtype):
    make, function = UNITS[name]
    for rows, cols in itertools.product(SHAPES, (64, 384)):
        check_against(make(size), by_turns(function, size), torch.randn(*rows, cols).to(dtype).requires_grad_())
    strided = torch.randn(64, 7).to(dtype).t().requires_grad_()
    check_against(make(size), by_turns(function, size), strided)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_units(name, size, dtype, needs):
    make, function = SCALED[name]
    unit, columns = (squared_relu, 37) if function is None else (by_turns(function, size), 64)
    for rows in SHAPES:
        x = torch.randn(*rows, columns).to(dtype).requires_grad_(needs[0])
        scales = torch.randn(rows).to(dtype).requires_grad_(needs[1])
        check_against(make(size), lambda x, scales: unit(x) * scales[..., None], x, scales)


@pytest.mark.parametrize("unit", [ops.ScaledSwiGLU, ops.ScaledSiTUGLU, ops.ScaledClampedQGeGLU, ops.ScaledSReLU])
@pytest.mark.parametrize("is_fused", [True, False])
def test_what_a_scaled_unit_writes_is_not_kept_whatever_is_said_of_recomputing(unit, is_fused):
    width, kept = (8 if unit is ops.ScaledSReLU else 16), set()
    for recomputes in (False, True):
        op = unit(activation_recompute_in_mlp=recomputes)
        assert op.activation_recompute_in_mlp is recomputes
        last = [ops.GroupedLinear(2, 8, 4, bias=False)] if is_fused else [ops.Linear(8, 4, bias=False)]
        box = ops.Sequential(ops.GroupedLinear(2, 4, width, bias=False), op, *last)
        splits = torch.tensor([3, 2])
        box(torch.randn(5, 4, requires_grad=True), splits, torch.rand(5), *([splits] if is_fused else [])).sum().backward()
        kept.add(box.saved_bytes())
    assert kept == {5 * width * 4}, "what the first product writes"


def test_scales_are_cast_to_the_dtype_of_x():
    x, scales = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True), torch.randn(5, requires_grad=True)
    op = ops.ScaledSwiGLU()
    y = op(x, scales)
    assert y.dtype == torch.bfloat16 and torch.equal(y, op(x, scales.bfloat16()))
    y.sum().backward()
    assert scales.grad.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert op(x.float(), scales).dtype == torch.bfloat16


@pytest.mark.parametrize("name", UNITS)
def test_units_fuse(name):
    make, function = UNITS[name]
    for size in (None, 4):
        box = ops.Sequential(ops.Linear(8, 16), make(size), ops.Linear(8, 8))
        with torch.no_grad():
            box[0].bias.normal_()
        x = torch.randn(6, 8, requires_grad=True)
        y, expected = box(x), box[2](by_turns(function, size)(F.linear(x, box[0].weight, box[0].bias)))
        torch.testing.assert_close(y, expected)
        requested = [x, *box.parameters()]
        torch.testing.assert_close(torch.autograd.grad(y.sum(), requested), torch.autograd.grad(expected.sum(), requested), rtol=1e-5, atol=1e-5)
        text = box.explain()
        assert "made    linear_bias_glu" in text and "made    glu_backward_bias" in text
        assert tandem.verify(box, x)


def test_scaled_units_keep_their_input_alone():
    for op, scaled in ((ops.SwiGLU(), ops.ScaledSwiGLU(4)), (ops.ClampedSwiGLU(), ops.ScaledClampedQGeGLU()), (ops.SiTUGLU(), ops.ScaledSiTUGLU())):
        box, plain = ops.Sequential(ops.Linear(8, 16), scaled, ops.Linear(8, 8)), ops.Sequential(ops.Linear(8, 16), op, ops.Linear(8, 8))
        x, scales = torch.randn(4, 8, requires_grad=True), torch.randn(4, requires_grad=True)
        box(x, scales).sum().backward()
        plain(x).sum().backward()
        assert box.saved_bytes() == plain.saved_bytes(), "the output is written again in backward"
        assert tandem.verify(box, x, scales)


COMPILED = [
    ops.SiTUGLU,
    lambda: ops.ClampedSwiGLU(glu_interleave_size=2),
    lambda: ops.SReGLU(glu_interleave_size=4),
    ops.ScaledSReLU,
    lambda: ops.ScaledSwiGLU(2),
    ops.ScaledSiTUGLU,
]


@pytest.mark.parametrize("make", COMPILED)
def test_units_compile(make, fresh_dynamo):
    op = make()
    given = [torch.randn(4, 16, requires_grad=True), torch.randn(4, requires_grad=True)][: 1 + op.num_extra_inputs]
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), op(*given))
    torch.testing.assert_close(torch.autograd.grad(compiled(*given).sum(), given), torch.autograd.grad(op(*given).sum(), given))


def test_numbers_are_read_at_each_call():
    op, x = ops.ClampedSwiGLU(), torch.randn(4, 16)
    op(x)
    op.limit, op.alpha = 0.25, 1.0
    op.glu_interleave_size = 2
    torch.testing.assert_close(op(x), by_turns(lambda a, b: clamped_swiglu(a, b, 0.25, 1.0), 2)(x))
    op.glu_interleave_size = None
    torch.testing.assert_close(op(x), of_halves(lambda a, b: clamped_swiglu(a, b, 0.25, 1.0))(x))
    with pytest.raises(ValueError, match="ClampedSwiGLU: expected glu_interleave_size to be None or a whole number > 0, got -3"):
        op.glu_interleave_size = -3
    assert repr(op) == "ClampedSwiGLU(limit=0.25, alpha=1.0, glu_linear_offset=1.0)"


def test_what_is_cut_off_has_no_gradient():
    a = torch.tensor([6.0, 7.0, 7.5, -9.0, 1.0, 1.0, 1.0, 1.0])
    b = torch.tensor([1.0, 1.0, 1.0, 1.0, 7.0, 7.5, -7.0, -7.5])
    x = torch.cat([a, b]).requires_grad_()
    ops.ClampedSwiGLU()(x).sum().backward()
    assert (x.grad[:8] != 0).tolist() == [True, True, False, True, True, True, True, True]
    assert (x.grad[8:] != 0).tolist() == [True, True, True, True, True, False, True, False]
