"""Measures the cost of keeping codes of weights up to date: a call that quantizes the weight, one that finds the codes by comparing bytes, and one
for which `is_first_microbatch` declares that they are valid."""

from __future__ import annotations

import torch

import tandem
from benchmarks.timing import interleaved, table

_SAID = {"made": True, "found": None, "declared": False}


def _weight(size: int, quantizer: tandem.Quantizer) -> list[str]:
    weight = torch.randn(size, size, dtype=torch.bfloat16)
    _, workspace = tandem.quantize_weight(weight, quantizer)
    times = interleaved({name: lambda said=said: tandem.quantize_weight(weight, quantizer, workspace, is_first_microbatch=said) for name, said in _SAID.items()})
    return [f"{times[name] * 1e6:.0f}" for name in _SAID]


def _step(size: int, rows: int, recipe: tandem.recipe.Recipe) -> list[str]:
    linear = tandem.Linear(size, size, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(rows, size, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, size, dtype=torch.bfloat16)

    def step(said: bool | None) -> None:
        with tandem.autocast(recipe=recipe):
            y = linear(x, is_first_microbatch=said)
        torch.autograd.grad(y, x, grad)

    times = interleaved({name: lambda said=said: step(said) for name, said in _SAID.items()})
    return [f"{times[name] * 1e6:.0f}" for name in _SAID]


def run() -> str:
    torch.set_num_threads(2)
    formats = {
        "current": (tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn), tandem.recipe.Float8CurrentScaling()),
        "128x128": (tandem.Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True, block_scaling_dim=2), tandem.recipe.Float8BlockScaling()),
        "MXFP8": (tandem.MXFP8Quantizer(torch.float8_e4m3fn), tandem.recipe.MXFP8BlockScaling()),
    }
    weights = [[f"{name}, {size}x{size}", *_weight(size, quantizer)] for name, (quantizer, _) in formats.items() for size in (1024, 2048)]
    steps = [
        [f"{name}, {rows} rows, {size}x{size}", *_step(size, rows, recipe)] for name, (_, recipe) in formats.items() for rows, size in ((16, 1024), (256, 1024))
    ]
    return "\n\n".join(
        [
            table("codes of a bfloat16 weight, us", ["", *_SAID], weights),
            table("forward and grad_x of a linear, us", ["", *_SAID], steps),
        ]
    )
