"""Measures the host time that one more op adds to a pipeline against its expression in eager torch: forward, 4 rows, float32, one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tandem.ops as ops
from benchmarks.timing import interleaved, table, verdict

BAR, COPIES, WIDTH = 0.7, 8, 8
HALVINGS = 4  # copies of a gated unit, each of which halves its input


def gate(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return function(a) * b

    return apply


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def situ(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)


def clamped(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    a = a.clamp(max=7.0)
    return a * torch.sigmoid(1.702 * a) * (b.clamp(-7.0, 7.0) + 1)


def times_scales(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, scales: function(x) * scales.unsqueeze(-1)


def experts(x: torch.Tensor, splits: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.linear(part, weight) for part, weight in zip(x.split(splits.tolist()), weights, strict=True)])


# An op, its expression in x, its extra input and its parameters, and whether the op halves x.
OPS: dict[str, tuple[Callable[[], Any], Callable[..., torch.Tensor], bool]] = {
    "BasicLinear": (lambda: ops.BasicLinear(WIDTH, WIDTH), F.linear, False),
    "Linear": (lambda: ops.Linear(WIDTH, WIDTH), F.linear, False),
    "Bias": (lambda: ops.Bias(WIDTH), torch.add, False),
    "GroupedLinear": (lambda: ops.GroupedLinear(2, WIDTH, WIDTH, bias=False), experts, False),
    "RMSNorm": (lambda: ops.RMSNorm(WIDTH), lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-5), False),
    "LayerNorm": (lambda: ops.LayerNorm(WIDTH), lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), False),
    "L2Normalization": (lambda: ops.L2Normalization(), lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6), False),
    "GELU": (ops.GELU, tanh_gelu, False),
    "QGELU": (ops.QGELU, quick_gelu, False),
    "ReLU": (ops.ReLU, F.relu, False),
    "SReLU": (ops.SReLU, squared_relu, False),
    "SiLU": (ops.SiLU, F.silu, False),
    "GLU": (ops.GLU, gate(torch.sigmoid), True),
    "GEGLU": (ops.GEGLU, gate(tanh_gelu), True),
    "QGEGLU": (ops.QGEGLU, gate(quick_gelu), True),
    "ReGLU": (ops.ReGLU, gate(F.relu), True),
    "SReGLU": (ops.SReGLU, gate(squared_relu), True),
    "SwiGLU": (ops.SwiGLU, gate(F.silu), True),
    "SiTUGLU": (ops.SiTUGLU, situ, True),
    "ClampedSwiGLU": (ops.ClampedSwiGLU, clamped, True),
    "ScaledSwiGLU": (ops.ScaledSwiGLU, times_scales(gate(F.silu)), True),
    "ScaledSiTUGLU": (ops.ScaledSiTUGLU, times_scales(situ), True),
    "ScaledClampedQGeGLU": (ops.ScaledClampedQGeGLU, times_scales(clamped), True),
    "ScaledSReLU": (ops.ScaledSReLU, times_scales(squared_relu), False),
    "Identity": (ops.Identity, lambda x: x.view_as(x), False),
    "Reshape": (lambda: ops.Reshape((-1, WIDTH)), lambda x: x.reshape(-1, WIDTH), False),
    "ConstantScale": (lambda: ops.ConstantScale(1.5), lambda x: x * 1.5, False),
    "Dropout": (lambda: ops.Dropout(0.1), lambda x: F.dropout(x, 0.1), False),
    "Quantize": (ops.Quantize, lambda x: x.view_as(x), False),
    "AddExtraInput": (ops.AddExtraInput, torch.add, False),
    "MakeExtraOutput": (ops.MakeExtraOutput, lambda x: x.view_as(x), False),
}


def measured(name: str, *, rounds: int = 15, seconds: float = 0.01) -> tuple[float, float]:
    """Microseconds of one more op in eager torch and in a pipeline."""
    make, expression, halves = OPS[name]
    copies = HALVINGS if halves else COPIES
    x = torch.randn(4, WIDTH << (HALVINGS if halves else 0), requires_grad=True)
    listed = [make() for _ in range(copies)]
    anchor = ops.Sequential(ops.ConstantScale(1.0))
    pipeline = ops.Sequential(ops.ConstantScale(1.0), *listed)
    extra = {"GroupedLinear": torch.tensor([3, 1]), "AddExtraInput": torch.randn(4, WIDTH)}
    own = [extra.get(name, torch.randn(4)) for _ in range(copies) if listed[0].num_extra_inputs] if not listed[0].is_fused_op else []
    params = [list(op.parameters()) for op in listed]

    def eager() -> torch.Tensor:
        y = x
        for index, given in enumerate(params):
            y = expression(y, *own[index : index + 1], *given)
        return y

    times = interleaved({"eager": eager, "anchor": lambda: anchor(x), "pipeline": lambda: pipeline(x, *own)}, rounds=rounds, seconds=seconds)
    return times["eager"] / copies * 1e6, (times["pipeline"] - times["anchor"]) / copies * 1e6


def run() -> str:
    torch.set_num_threads(1)
    rows = []
    for name in OPS:
        eager, marginal = measured(name)
        ratio = marginal / eager
        rows.append([name, f"{eager:.2f}", f"{marginal:.2f}", f"{ratio:.2f}", verdict(ratio <= BAR)])
    met = sum(row[-1] == "met" for row in rows)
    title = f"host time of one more op, forward, us; bar {BAR}x of eager torch: {met} of {len(rows)} ops"
    return table(title, ["op", "eager", "in a pipeline", "ratio", ""], rows)
