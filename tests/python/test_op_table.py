"""Every op x dtype x memory of x x subset of what requires grad, against the same expression in float64. The count is printed."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support import TOLERANCES, clamped_swiglu, gated, of_halves, quick_gelu, randomize, situ, squared_relu, tanh_gelu

import tandem.ops as ops

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MEMORY = ("contiguous", "strided", "transposed", "empty", "tail")
WIDTH, TAIL = 32, 38  # 19 behind a gated unit: no multiple of any vector


def rms(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def scaled(function):
    return lambda x, scales: function(x) * scales.unsqueeze(-1)


def grouped(x, splits, *params):
    weights, biases = params[: len(params) // 2], params[len(params) // 2 :]
    parts = torch.split(x[: int(splits.sum())], splits.tolist())
    y = torch.cat([F.linear(part, w, b) for part, w, b in zip(parts, weights, biases, strict=True)])
    return F.pad(y, (0, 0, 0, len(x) - len(y)))


# What makes an op of a width and a dtype; what it computes of x, its extra inputs and its parameters; the extra inputs for an x.
TABLE = {
    "BasicLinear": (lambda n, **k: ops.BasicLinear(n, 5, **k), F.linear, None),
    "Linear": (lambda n, **k: ops.Linear(n, 5, **k), F.linear, None),
    "Bias": (lambda n, **k: ops.Bias(n, **k), lambda x, bias: x + bias, None),
    "RMSNorm": (lambda n, **k: ops.RMSNorm(n, **k), rms, None),
    "LayerNorm": (lambda n, **k: ops.LayerNorm(n, **k), lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), None),
    "L2Normalization": (lambda n, **_: ops.L2Normalization(), lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6), None),
    "GELU": (lambda n, **_: ops.GELU(), tanh_gelu, None),
    "QGELU": (lambda n, **_: ops.QGELU(), quick_gelu, None),
    "ReLU": (lambda n, **_: ops.ReLU(), F.relu, None),
    "SReLU": (lambda n, **_: ops.SReLU(), squared_relu, None),
    "SiLU": (lambda n, **_: ops.SiLU(), F.silu, None),
    "ErfGELU": (lambda n, **_: ops.ErfGELU(), F.gelu, None),
    "Mish": (lambda n, **_: ops.Mish(), F.mish, None),
    "Softplus": (lambda n, **_: ops.Softplus(), F.softplus, None),
    "HardSwish": (lambda n, **_: ops.HardSwish(), F.hardswish, None),
    "LeakyReLU": (lambda n, **_: ops.LeakyReLU(), F.leaky_relu, None),
    "GLU": (lambda n, **_: ops.GLU(), gated(torch.sigmoid), None),
    "GEGLU": (lambda n, **_: ops.GEGLU(), gated(tanh_gelu), None),
    "QGEGLU": (lambda n, **_: ops.QGEGLU(), gated(quick_gelu), None),
    "ReGLU": (lambda n, **_: ops.ReGLU(), gated(F.relu), None),
    "SReGLU": (lambda n, **_: ops.SReGLU(), gated(squared_relu), None),
    "ErfGEGLU": (lambda n, **_: ops.ErfGEGLU(), gated(F.gelu), None),
    "SwiGLU": (lambda n, **_: ops.SwiGLU(), gated(F.silu), None),
    "SiTUGLU": (lambda n, **_: ops.SiTUGLU(), of_halves(situ), None),
    "ClampedSwiGLU": (lambda n, **_: ops.ClampedSwiGLU(), of_halves(clamped_swiglu), None),
    "ScaledSwiGLU": (lambda n, **_: ops.ScaledSwiGLU(), scaled(gated(F.silu)), "scales"),
    "ScaledSiTUGLU": (lambda n, **_: ops.ScaledSiTUGLU(), scaled(of_halves(situ)), "scales"),
    "ScaledClampedQGeGLU": (lambda n, **_: ops.ScaledClampedQGeGLU(), scaled(of_halves(clamped_swiglu)), "scales"),
    "ScaledSReLU": (lambda n, **_: ops.ScaledSReLU(), scaled(squared_relu), "scales"),
    "GroupedLinear": (lambda n, **k: ops.GroupedLinear(3, n, 5, **k), grouped, "splits"),
    "Identity": (lambda n, **_: ops.Identity(), lambda x: x * 1, None),
    "Quantize": (lambda n, **_: ops.Quantize(), lambda x: x * 1, None),
    "ConstantScale": (lambda n, **_: ops.ConstantScale(-1.5), lambda x: x * -1.5, None),
    "Reshape": (lambda n, **_: ops.Reshape((-1, 2)), lambda x: x.reshape(-1, 2), None),
    "Dropout": (lambda n, **_: ops.Dropout(0.0), lambda x: x * 1, None),
    "AddExtraInput": (lambda n, **_: ops.AddExtraInput(), lambda x, extra: x + extra, "like x"),
    "MakeExtraOutput": (lambda n, **_: ops.MakeExtraOutput(), lambda x: (x * 1, x * 1), None),
    "Modulate": (lambda n, **_: ops.Modulate(shift=False), lambda x, scale: x * (1 + scale), "like x"),
}
OF_INTEGERS = ("Bias", "ConstantScale", "AddExtraInput", "Identity", "Reshape", "MakeExtraOutput", "L2Normalization")
counts = {"calls": 0, "gradients": 0}


def given(memory, dtype):
    def values(*shape):
        return torch.randint(-3, 4, shape) if dtype == torch.int64 else torch.randn(shape).to(dtype)

    return {
        "contiguous": lambda: values(5, WIDTH),
        "strided": lambda: values(5, 2 * WIDTH)[:, ::2],
        "transposed": lambda: values(WIDTH, 5).t(),
        "empty": lambda: values(0, WIDTH),
        "tail": lambda: values(2, 3, TAIL),
    }[memory]()


def extra_for(kind, x):
    if kind is None:
        return []
    if kind == "splits":
        return [torch.tensor([len(x) // 2, 0, len(x) - len(x) // 2])]
    return [torch.randn(x.shape[:-1] if kind == "scales" else x.shape).to(x.dtype if x.is_floating_point() else torch.float32)]


def listed(outputs):
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def near(actual, expected, dtype, width):
    bound = TOLERANCES[dtype] * max(expected.abs().max().item() if expected.numel() else 0.0, 1.0)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=2 * bound)


def check(name, dtype, memory):
    make, reference, extra_kind = TABLE[name]
    x = given(memory, dtype)
    if name == "GroupedLinear" and x.dim() > 2:
        x = x.reshape(-1, x.shape[-1])
    computed = dtype if dtype.is_floating_point else torch.float32
    module = randomize(make(x.shape[-1], dtype=computed))
    operands = [x, *extra_for(extra_kind, x), *module.parameters()]
    differentiable = [at for at, operand in enumerate(operands) if operand.is_floating_point()]
    subsets = itertools.chain.from_iterable(itertools.combinations(differentiable, count) for count in range(len(differentiable) + 1))
    if len(differentiable) > 4:  # of many experts: all, none, each alone
        subsets = [(), tuple(differentiable), *[(at,) for at in differentiable]]
    for requested in subsets:
        leaves = [operand.detach().requires_grad_(at in requested) for at, operand in enumerate(operands)]
        for param, leaf in zip(module.parameters(), leaves[len(leaves) - len(list(module.parameters())) :], strict=True):
            param.requires_grad_(leaf.requires_grad)
        wide = [leaf.detach().double().requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else leaf for leaf in leaves]
        wide[0] = wide[0].double() if not x.is_floating_point() and name != "Identity" else wide[0]
        inputs = leaves[: len(leaves) - len(list(module.parameters()))]
        outputs, expected = listed(module(*inputs)), listed(reference(*wide))
        for actual, wanted in zip(outputs, expected, strict=True):
            near(actual, wanted, computed if actual.is_floating_point() else torch.float64, x.shape[-1])
        counts["calls"] += 1
        if not requested:
            assert not any(output.requires_grad for output in outputs)
            continue
        grads = [torch.randn(output.shape).to(output.dtype) for output in outputs]
        targets = [*inputs, *module.parameters()]
        found = torch.autograd.grad(outputs, [targets[at] for at in requested], grads)
        wanted = torch.autograd.grad(expected, [wide[at] for at in requested], [grad.double() for grad in grads])
        for actual, right in zip(found, wanted, strict=True):
            near(actual, right, computed, x.shape[-1])
            counts["gradients"] += 1


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", [*REAL, torch.int64], ids=str)
def test_every_op(dtype, memory, capsys):
    torch.manual_seed(0)
    before = dict(counts)
    for name in TABLE if dtype.is_floating_point else OF_INTEGERS:
        try:
            check(name, dtype, memory)
        except AssertionError as error:
            raise AssertionError(f"{name}, {dtype}, {memory}: {error}") from error
    with capsys.disabled():
        calls, gradients = (counts[what] - before[what] for what in ("calls", "gradients"))
        print(f"\nop table, {dtype}, {memory}: {calls} calls and {gradients} gradients against float64", end="")


def test_the_table_has_every_op_of_the_package():
    known = {name for name, value in vars(ops.basic).items() if isinstance(value, type)}
    of_processes = {"BasicOperation", "AllGather", "AllReduce", "ReduceScatter", "ReduceGradient"}
    assert known - of_processes - {"Linear"} <= {*TABLE}, sorted(known - of_processes - {*TABLE})
