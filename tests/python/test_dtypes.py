"""Every op on every dtype and every mixture: the value, dtype and gradients of the same expression in torch, or both raise."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support import ACTIVATIONS, GATED

import tandem.ops as ops

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*INTEGERS, *REAL, *FLOAT8, *COMPLEX)
# Roundings of a few operations of the dtype, relative to the largest element.
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 4e-6, torch.float64: 1e-12, torch.complex64: 4e-6, torch.complex128: 1e-12}


def tensor(dtype, *shape, seed=0):
    """Small numbers that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 2 if dtype == torch.bool else 4, shape, generator=generator)
    if dtype.is_complex or (dtype in REAL):
        return ((whole - 1) / 2).to(dtype)
    return whole.to(dtype)


def as_weight(function):
    """Operands are converted to the dtype of the weight, but never to one that cannot hold their kind of number, and no integers to fractions."""

    def apply(x, weight, *rest):
        operands = [x, *rest]
        if weight.is_floating_point() and x.dtype in INTEGERS:
            raise TypeError
        if not all(torch.can_cast(t.dtype, weight.dtype) for t in operands):
            raise TypeError
        x, *rest = (t.to(weight.dtype) for t in operands)
        return function(x, weight, *rest)

    return apply


def real_only(function):
    """Norms and dropout are defined for real floating numbers; torch's RMSNorm of complex ones is refused here."""

    def apply(x, weight, *rest):
        if weight.dtype not in REAL:
            raise TypeError
        return function(x, weight, *rest)

    return apply


def of_fractions(function):
    """Whole numbers stay what they are, or raise: an activation follows its input."""

    def apply(x):
        if not x.is_floating_point() and not x.is_complex():
            raise TypeError
        return function(x)

    return apply


OF_FRACTIONS = (ops.QGELU, ops.GLU, ops.QGEGLU, ops.SiTUGLU, ops.ClampedSwiGLU)  # whose expressions make fractions of integers
UNARY = {
    **{kind.__name__: (kind, of_fractions(function) if kind in OF_FRACTIONS else function) for kind, function in {**ACTIVATIONS, **GATED}.items()},
    "Identity": (ops.Identity, lambda x: x),
    "Quantize": (ops.Quantize, lambda x: x),
    "Reshape": (lambda: ops.Reshape((-1, 4)), lambda x: x.reshape(-1, 4)),
    "ConstantScale": (lambda: ops.ConstantScale(1.5), lambda x: x * 1.5),
    "MakeExtraOutput": (lambda: ops.Sequential(ops.MakeExtraOutput(), ops.Identity()), lambda x: (x, x)),
    "ConstantScale, ReLU": (lambda: ops.Sequential(ops.ConstantScale(0.5), ops.ReLU()), lambda x: F.relu(x * 0.5)),
}
# Op, shapes of its parameters, and the expression.
WITH_PARAMETERS = {
    "BasicLinear": (lambda: ops.BasicLinear(8, 6), [(6, 8)], as_weight(F.linear)),
    "Bias": (lambda: ops.Bias(8), [(8,)], lambda x, bias: x + bias),
    "RMSNorm": (lambda: ops.RMSNorm(8, eps=1e-5), [(8,)], real_only(as_weight(lambda x, w: F.rms_norm(x, (8,), w, 1e-5)))),
    "LayerNorm": (lambda: ops.LayerNorm(8), [(8,), (8,)], real_only(as_weight(lambda x, w, b: F.layer_norm(x, (8,), w, b)))),
}


def with_parameters(module, parameters):
    for (name, _), value in zip(list(module.named_parameters()), parameters, strict=True):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=value.requires_grad))
    return module


def outcome(function, grad):
    """What `function` returns, and the gradients of its leaves; or the exception."""
    try:
        results, leaves = function()
        results = results if isinstance(results, tuple) else (results,)
        differentiable = [r for r in results if r.requires_grad]
        if not grad:
            assert not differentiable
            return list(results)
        requested = [t for t in leaves if t.requires_grad]
        assert bool(requested) == bool(differentiable)
        gradients = torch.autograd.grad([r.sum() for r in differentiable], requested, allow_unused=True) if requested else ()
        return [r.detach() for r in results] + list(gradients)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return error


def leaves_of(tensors, grad):
    return [t.clone().requires_grad_(grad and t.dtype.is_floating_point and t.dtype not in FLOAT8) for t in tensors]


def check(name, ours, torchs, tensors, grad):
    """`ours` and `torchs` take the tensors and return results and leaves."""
    with torch.set_grad_enabled(grad):
        got = outcome(lambda: ours(leaves_of(tensors, grad)), grad)
        expected = outcome(lambda: torchs(leaves_of(tensors, grad)), grad)
    case = f"{name} of {[str(t.dtype) for t in tensors]}, grad={grad}"
    if grad and any(t.dtype.is_complex for t in tensors) and "real numbers where a gradient is required" in str(got):
        return  # refused, which no other mixture may be
    if isinstance(got, Exception) or isinstance(expected, Exception):
        assert isinstance(got, Exception) and isinstance(expected, Exception), f"{case}: got {got!r}, expected {expected!r}"
        return
    assert len(got) == len(expected), case
    for actual, wanted in zip(got, expected, strict=True):
        assert actual.dtype == wanted.dtype and actual.shape == wanted.shape, f"{case}: got {actual.dtype}, expected {wanted.dtype}"
        wide = torch.complex128 if wanted.is_complex() else torch.float64
        actual, wanted = actual.to(wide), wanted.to(wide)
        bound = TOLERANCES.get(got[0].dtype, 0.0) * max(1.0, wanted.abs().max().item())
        assert (actual - wanted).abs().max().item() <= bound, f"{case}: got {actual}, expected {wanted}"


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("name", UNARY)
def test_without_parameters(name, grad):
    make, expression = UNARY[name]
    for dtype in DTYPES:
        check(name, lambda t: (make()(*t), t), lambda t: (expression(*t), t), [tensor(dtype, 5, 8)], grad)


def called(make):
    """What `check` takes, of a module whose parameters are the tensors behind the first one."""

    def call(tensors):
        x, *rest = tensors
        module = with_parameters(make(), rest)
        return module(x), [x, *module.parameters()]

    return call


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_with_parameters(name, grad):
    make, shapes, expression = WITH_PARAMETERS[name]
    for x, weight in itertools.product(DTYPES, DTYPES):
        tensors = [tensor(x, 5, 8), *(tensor(weight, *shape, seed=1 + i) for i, shape in enumerate(shapes))]
        check(name, called(make), lambda t: (expression(*t), t), tensors, grad)


WITH_BIAS = {
    "Linear": (lambda: ops.Linear(8, 6), (6, 8), lambda x, weight, bias: as_weight(F.linear)(x, weight) + bias),
    "LayerNorm": (lambda: ops.LayerNorm(8), (8,), WITH_PARAMETERS["LayerNorm"][2]),
}


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("name", WITH_BIAS)
def test_a_bias_of_another_dtype(name, grad):
    make, shape, expression = WITH_BIAS[name]
    for weight, bias in itertools.product(DTYPES, DTYPES):
        tensors = [tensor(weight, 5, 8), tensor(weight, *shape, seed=1), tensor(bias, shape[0], seed=2)]
        check(name, called(make), lambda t: (expression(*t), t), tensors, grad)


@pytest.mark.parametrize("grad", (False, True))
def test_extra_input(grad):
    for x, extra in itertools.product(DTYPES, DTYPES):
        tensors = [tensor(x, 5, 8), tensor(extra, 5, 8, seed=1)]
        check("AddExtraInput", lambda t: (ops.AddExtraInput()(*t), t), lambda t: (t[0] + t[1], t), tensors, grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(dtype):
    x = tensor(dtype, 50, 80)
    if dtype not in REAL:
        with pytest.raises(TypeError, match=r"dropout: expected x of dtype float32, bfloat16, float16 or float64, got "):
            ops.Dropout(0.5)(x)
        with pytest.raises((RuntimeError, NotImplementedError)):
            F.dropout(x, 0.5)
        return
    y = ops.Dropout(0.5)(x)
    assert y.dtype == dtype
    assert torch.equal(y, torch.where(y == 0, y, 2 * x))


def test_many_small_integers_touch_only_their_own_memory():
    x = torch.zeros(1024, 1024, dtype=torch.uint8)
    for _ in range(20):
        assert not ops.ReLU()(x).any()
    y = ops.AddExtraInput()(torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.int64))
    assert torch.equal(y, torch.ones(2, 4))


def test_integers_before_a_product_are_refused_as_in_torch():
    with pytest.raises(TypeError, match="0.basic_linear: expected x in a floating dtype, as the weight is, got int64. Convert it, as in x.float()"):
        ops.Linear(8, 6)(torch.ones(4, 8, dtype=torch.int64))


@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
def test_a_sum_of_integers_and_fractions_before_a_norm(norm):
    x, extra = torch.randint(0, 5, (3, 8)), torch.randn(3, 8)
    box = ops.Sequential(ops.AddExtraInput(), norm(8))
    torch.testing.assert_close(box(x, extra), norm(8)(x + extra))
    assert "x is Long, which no norm takes" in box.explain()


def test_bfloat16_where_onednn_may_not_use_it():
    script = """if True:
        import torch, tandem
        linear, x = tandem.ops.Linear(256, 256, bias=False, dtype=torch.bfloat16), torch.randn(256, 256).bfloat16()  # 2^24 multiplications
        wanted = x.double() @ linear.weight.double().t()
        sums = 256 * 2**-23 * (x.double().abs() @ linear.weight.double().abs().t())
        assert ((linear(x).double() - wanted).abs() <= sums + torch.finfo(x.dtype).eps / 2 * (wanted.abs() + sums)).all()
    """
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"})
