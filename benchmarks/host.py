"""Measures the host time of pipelines called from Python against equal torch.nn modules: x 4x8 float32, one thread."""

from __future__ import annotations

import torch
from torch import nn

import tandem
from tandem import _C
from benchmarks.timing import interleaved, table, verdict


class TorchSwiGLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return nn.functional.silu(a) * b


def pairs() -> dict[str, tuple[nn.Module, nn.Module, float, float | None]]:
    """By name: torch modules, the equal pipeline, the bar for forward, the bar for forward and backward."""
    ops = tandem.ops
    return {
        "Linear": (nn.Sequential(nn.Linear(8, 8)), ops.Sequential(ops.Linear(8, 8)), 0.9, 1.0),
        "LayerNorm-Linear-SwiGLU-Linear": (
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), TorchSwiGLU(), nn.Linear(16, 8)),
            ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 32), ops.SwiGLU(), ops.Linear(16, 8)),
            0.35,
            0.55,
        ),
        "17 Identity": (nn.Sequential(*[nn.Identity() for _ in range(17)]), ops.Sequential(*[ops.Identity() for _ in range(17)]), 0.35, None),
    }


def run() -> str:
    torch.set_num_threads(1)
    x = torch.randn(4, 8, requires_grad=True)
    rows = []
    for name, (reference, pipeline, forward_bar, step_bar) in pairs().items():
        forward = interleaved({"torch": lambda: reference(x), "tandem": lambda: pipeline(x)})
        step = interleaved({"torch": lambda: reference(x).sum().backward(), "tandem": lambda: pipeline(x).sum().backward()})
        for what, times, bar in (("forward", forward, forward_bar), ("forward+backward", step, step_bar)):
            ratio = times["tandem"] / times["torch"]
            rows.append([name, what, f"{times['torch'] * 1e6:.2f}", f"{times['tandem'] * 1e6:.2f}", f"{ratio:.2f}",
                         f"<= {bar}" if bar else "-", verdict(ratio <= bar) if bar else ""])
    text = table("host time, us per call", ["pipeline", "what", "torch.nn", "tandem", "ratio", "bar", ""], rows)
    one, many = tandem.ops.Sequential(tandem.ops.Identity()), tandem.ops.Sequential(*[tandem.ops.Identity() for _ in range(33)])
    times = interleaved({"one": lambda: one(x), "many": lambda: many(x)}, rounds=25)
    marginal = (times["many"] - times["one"]) / 32 * 1e6
    text += f"\nmarginal host time of a trivial op: {marginal:.3f} us forward (bar 0.2: {verdict(marginal <= 0.2)})"
    model = tandem.ops.Sequential(tandem.ops.RMSNorm(8), tandem.ops.Linear(8, 8))
    for training in (True, False):
        model.train(training)
        model(x)
    before = _C.plans_made()
    for i in range(100):
        model.train(i % 2 == 0)
        model(x)
    text += f"\nplans made while train and eval alternate 100 times: {_C.plans_made() - before} (bar 0)"
    return text
