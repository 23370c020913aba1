"""Infinities, NaN, zeros, subnormal and huge numbers: the answer of torch in float64, rounded."""

import math

import pytest
import support
import torch
import torch.nn.functional as F
from support import gated

import tandem.ops as ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = (
    -math.inf, -3.4e38, -1e30, -1e20, -6e4, -200.0, -104.0, -100.0, -88.0, -20.0, -11.0, -10.4, -5.0, -0.0,
    0.0, 1e-45, 1e-40, -1e-40, 6e-8, 0.5, 10.0, 20.0, 88.0, 6e4, 1e20, 1e30, 3.4e38, math.inf, math.nan,
)  # fmt: skip


def quick_gelu(x):
    """As one function: autograd of a product has infinity times 0 where the slope is a number."""
    return F.silu(1.702 * x) / 1.702


class ErfGELU(torch.autograd.Function):
    """F.gelu, which computes 1 + erf(x / sqrt(2)) and so loses what is below 1e-16. One function, as quick_gelu is."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * (0.5 * torch.special.erfc(-(0.5**0.5) * x))

    @staticmethod
    def backward(ctx, grad_y):
        (x,) = ctx.saved_tensors
        return grad_y * (0.5 * torch.special.erfc(-(0.5**0.5) * x) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def hard_swish(x):
    """F.hardswish, whose slope at NaN is 1."""
    return F.hardswish(x) * torch.where(x.isnan(), x, 1.0)


ACTIVATIONS = {
    **support.ACTIVATIONS,
    ops.QGELU: quick_gelu,
    ops.ErfGELU: ErfGELU.apply,
    ops.HardSwish: hard_swish,
    ops.library.class_of("sigmoid"): torch.sigmoid,
}
GATED = {**support.GATED, ops.QGEGLU: gated(quick_gelu), ops.ErfGEGLU: gated(ErfGELU.apply)}
# Relative to the exact result; and what underflows in float32, where the exponential is computed.
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
UNDERFLOW = 2.0**-120


def composite(module):
    """The same op in differentiable torch operations."""

    def apply(x):
        return torch.func.vmap(module)(x[None])[0]

    return apply


def expect_equal(actual, exact, floor=UNDERFLOW):
    """Both NaN, or the exact number as near as the dtype says, from `floor` on; an overflow of the dtype is its infinity."""
    limits = torch.finfo(actual.dtype)
    got, near = actual.double(), exact.to(actual.dtype).double()
    bound = exact.abs() * ROUNDING[actual.dtype] + max(floor, limits.smallest_normal * limits.eps)
    if actual.dtype == torch.float64:
        bound += 4 * limits.eps  # torch's own formula cancels
    fits = (got == near) | (got.isnan() & exact.isnan()) | ((got - exact).abs() <= bound)
    fits |= got.isinf() & (exact.abs() >= limits.max) & (got.sign() == exact.sign())
    assert fits.all(), [(g, e) for g, e, fit in zip(got.flatten().tolist(), exact.flatten().tolist(), fits.flatten().tolist(), strict=True) if not fit]


def values(dtype, width):
    repeated = torch.tensor(SPECIAL, dtype=dtype).repeat(2)
    return repeated[: len(repeated) // width * width].reshape(-1, width)


def check(function, reference, x, grad, floor=UNDERFLOW):
    x64 = x.double().requires_grad_()
    x = x.clone().requires_grad_()
    y, y64 = function(x), reference(x64)
    expect_equal(y.detach(), y64.detach(), floor)
    (grad_x,), (grad_x64,) = torch.autograd.grad(y, x, grad), torch.autograd.grad(y64, x64, grad.double())
    expect_equal(grad_x, grad_x64, floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: kind.__name__)
def test_activations(kind, dtype):
    for width in (1, 7, 29, 58):
        x = values(dtype, width)
        check(kind(), ACTIVATIONS[kind], x, torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GATED, ids=lambda kind: kind.__name__)
def test_gated_units(kind, dtype):
    for other in (1.0, -2.0, 0.0, math.inf, math.nan):
        a = values(dtype, 29)
        if math.isinf(other):  # times infinity, whether a gate underflows decides between infinity and NaN
            a = a[:, [value in (-math.inf, -5.0, -0.0, 0.5, 10.0, math.inf) or math.isnan(value) for value in SPECIAL]]
        if kind is ops.SReGLU and other == 0:  # times 0, a square that overflows is NaN
            a = a[:, [not 1e19 < abs(value) < math.inf for value in SPECIAL]]
        x = torch.cat([a, torch.full_like(a, other)], -1)
        floor = 2.0**-50 if kind is ops.SiTUGLU else UNDERFLOW  # torch's 1 - tanh^2 cancels in float64 too
        check(kind(), GATED[kind], x, torch.ones_like(a), floor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_scales_and_dropout(dtype):
    x = values(dtype, 29)
    for other in (1.0, math.inf, -math.inf, math.nan):
        extra = torch.full_like(x, other)
        expect_equal(ops.AddExtraInput()(x, extra), x.double() + extra.double())
        bias = ops.Bias(29, dtype=dtype)
        with torch.no_grad():
            bias.bias.fill_(other)
            expect_equal(bias(x), x.double() + extra.double())
    expect_equal(ops.ConstantScale(-0.5)(x), x.double() * -0.5)
    y = ops.Dropout(0.5)(x)
    kept = y != 0
    assert torch.equal(y[kept].nan_to_num(7.0), (2 * x)[kept].nan_to_num(7.0))


def norm_rows(dtype, hidden):
    """Rows with one special number each, and their statistics' limits; what they become in a norm differs by row."""
    base = torch.linspace(-1, 1, hidden, dtype=torch.float64)
    rows = [base]
    for value in (math.inf, -math.inf, math.nan, 1e-40, -0.0):
        row = base.clone()
        row[hidden // 2] = value
        rows.append(row)
    both = base.clone()
    both[0], both[-1] = math.inf, -math.inf
    rows += [both, base * 0, base * 0 - 0.0, base * 1e-30, base * 1e3]
    return torch.stack(rows).to(dtype)


NORMS = {
    "RMSNorm": (lambda h, **k: ops.RMSNorm(h, eps=1e-5, **k), lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5)),
    "LayerNorm": (lambda h, **k: ops.LayerNorm(h, **k), lambda x: F.layer_norm(x, x.shape[-1:])),
}


@pytest.mark.parametrize("form", (lambda m: m, composite), ids=("kernel", "composite"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, dtype, form):
    make, reference = NORMS[name]
    for hidden in (5, 67, 300):
        x = norm_rows(dtype, hidden)
        x64 = x.double().requires_grad_()
        x = x.requires_grad_()
        y, y64 = form(make(hidden, dtype=dtype))(x), reference(x64)
        grad = torch.randn(hidden).to(dtype).expand_as(x)
        (grad_x,), (grad_x64,) = torch.autograd.grad(y, x, grad), torch.autograd.grad(y64, x64, grad.double())
        for actual, exact in ((y.detach(), y64.detach()), (grad_x, grad_x64)):
            assert torch.equal(actual.isnan(), exact.isnan())
            finite = ~exact.isnan().any(-1)
            scale = exact[finite].abs().amax(-1, keepdim=True)
            assert ((actual[finite].double() - exact[finite]).abs() <= 4 * ROUNDING[dtype] * scale + 1e-30).all()


@pytest.mark.parametrize("form", (lambda m: m, composite), ids=("kernel", "composite"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("hidden", (8, 67, 300))
def test_a_row_whose_squares_overflow_does_not_look_like_equal_numbers(hidden, dtype, form):
    # torch gives NaN to narrow rows and 0 to wide ones.
    x = torch.stack([torch.linspace(-1, 1, hidden) * scale for scale in (1.0, 1e21, 1e30, 3e38)]).to(dtype).requires_grad_()
    y = form(ops.LayerNorm(hidden, dtype=dtype))(x)
    (grad_x,) = torch.autograd.grad(y, x, torch.ones_like(y))
    for result in (y, grad_x):
        assert result[1:].isnan().all()
        assert result[0].isfinite().all()
    torch_y = F.layer_norm(x.detach(), (hidden,))
    assert (torch_y[1:].isnan() | (torch_y[1:] == 0) | torch_y[1:].isinf()).all()
