"""Every op x dtype x memory of x x subset of what requires grad, against the same expression in float64. The count is printed."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support import OPS, clamped_swiglu, close, gated, of_halves, randomize, situ, squared_relu

import tandem.ops as ops

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MEMORY = ("contiguous", "strided", "transposed", "expanded", "broadcast within rows", "empty", "one row", "vector", "four dimensions", "tail")
WIDTH, TAIL = 32, 38  # 19 behind a gated unit: no multiple of any vector


def scaled(function):
    return lambda x, scales: function(x) * scales.unsqueeze(-1)


def grouped(x, splits, *params):
    weights, biases = params[: len(params) // 2], params[len(params) // 2 :]
    parts = torch.split(x[: int(splits.sum())], splits.tolist())
    y = torch.cat([F.linear(part, w, b) for part, w, b in zip(parts, weights, biases, strict=True)])
    return F.pad(y, (0, 0, 0, len(x) - len(y)))


# What makes an op of a width and a dtype; what it computes of x, its extra inputs and its parameters; the extra inputs for an x.
TABLE = {
    **{name: (*entry, None) for name, entry in OPS.items()},
    "ScaledSwiGLU": (lambda n, **_: ops.ScaledSwiGLU(), scaled(gated(F.silu)), "scales"),
    "ScaledSiTUGLU": (lambda n, **_: ops.ScaledSiTUGLU(), scaled(of_halves(situ)), "scales"),
    "ScaledClampedQGeGLU": (lambda n, **_: ops.ScaledClampedQGeGLU(), scaled(of_halves(clamped_swiglu)), "scales"),
    "ScaledSReLU": (lambda n, **_: ops.ScaledSReLU(), scaled(squared_relu), "scales"),
    "GroupedLinear": (lambda n, **k: ops.GroupedLinear(3, n, 5, **k), grouped, "splits"),
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
        "expanded": lambda: values(1, WIDTH).expand(5, WIDTH),
        "broadcast within rows": lambda: values(5, 1).expand(5, WIDTH),
        "empty": lambda: values(0, WIDTH),
        "one row": lambda: values(1, WIDTH),
        "vector": lambda: values(WIDTH),
        "four dimensions": lambda: values(2, 3, 1, WIDTH),
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


def check(name, dtype, memory):
    make, reference, extra_kind = TABLE[name]
    x = given(memory, dtype)
    if name == "GroupedLinear" and x.dim() != 2:
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
            close(actual, wanted, computed if actual.is_floating_point() else torch.float64)
        counts["calls"] += 1
        if not requested:
            assert not any(output.requires_grad for output in outputs)
            continue
        grads = [torch.randn(output.shape).to(output.dtype) for output in outputs]
        targets = [*inputs, *module.parameters()]
        found = torch.autograd.grad(outputs, [targets[at] for at in requested], grads)
        wanted = torch.autograd.grad(expected, [wide[at] for at in requested], [grad.double() for grad in grads])
        for at, actual, right in zip(requested, found, wanted, strict=True):
            assert actual.dtype == targets[at].dtype
            close(actual, right, computed)
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
