"""Times a Linear under each recipe, emulated, against torch.nn.Linear in float32: forward and backward, two threads."""

from __future__ import annotations

from collections.abc import Callable

import torch

import tandem
from benchmarks.block import has_bfloat16
from benchmarks.timing import interleaved, table, verdict

SIZE = 1024
RECIPES = ("Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")


def run() -> str:
    torch.set_num_threads(2)
    x, grad = torch.randn(SIZE, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    linear, plain = tandem.ops.Linear(SIZE, SIZE, bias=False), torch.nn.Linear(SIZE, SIZE, bias=False)

    def under(recipe: tandem.recipe.Recipe) -> Callable[[], object]:
        def step() -> None:
            with tandem.autocast(recipe=recipe):
                y = linear(x)
            y.backward(grad)

        return step

    candidates: dict[str, Callable[[], object]] = {"float32": lambda: plain(x).backward(grad)}
    candidates |= {name: under(getattr(tandem.recipe, name)()) for name in RECIPES}
    times = interleaved(candidates, rounds=11, seconds=0.1)
    bar = 0.8 if has_bfloat16() else 1.25
    rows = []
    for name in RECIPES:
        ratio = times[name] / times["float32"]
        has_bar = name.startswith(("Float8C", "Delayed"))
        rows.append([name, f"{times[name] * 1e3:.2f}", f"{ratio:.2f}", f"<= {bar}" if has_bar else "-", verdict(ratio <= bar) if has_bar else ""])
    title = f"Linear {SIZE}x{SIZE}x{SIZE}, forward+backward, float32 by torch.nn: {times['float32'] * 1e3:.2f} ms"
    return table(title, ["recipe", "ms", "of float32", "bar", ""], rows)
