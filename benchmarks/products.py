"""Times the three products of a Linear in a pipeline against torch.nn.Linear."""

from __future__ import annotations

import torch
from torch import nn

import tandem
from benchmarks.block import has_bfloat16
from benchmarks.timing import interleaved, table

SHAPES = ((128, 256, 1408), (1024, 512, 2752), (1024, 1376, 512))  # tokens, inputs, outputs


def run() -> str:
    torch.set_num_threads(2)
    rows = []
    for dtype in [torch.float32] + ([torch.bfloat16] if has_bfloat16() else []):
        for tokens, inputs, outputs in SHAPES:
            plain = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
            pipeline = tandem.ops.Sequential(tandem.ops.Linear(inputs, outputs, bias=False, dtype=dtype))
            x = torch.randn(tokens, inputs, dtype=dtype, requires_grad=True)
            grad = torch.randn(tokens, outputs, dtype=dtype)
            step = lambda model: model(x).backward(grad)  # noqa: E731
            times = interleaved({"tandem": lambda: step(pipeline), "torch": lambda: step(plain)}, rounds=21, seconds=0.05)
            gflop = 6 * tokens * inputs * outputs / 1e9
            rows.append([f"{dtype}".replace("torch.", ""), f"{tokens}x{inputs}x{outputs}", *(f"{times[k] * 1e6:.0f}" for k in ("tandem", "torch")),
                         *(f"{gflop / times[k]:.0f}" for k in ("tandem", "torch")), f"{times['torch'] / times['tandem']:.2f}"])
    return table("Linear without bias, forward+backward: time in us, GFLOP/s", ["dtype", "shape", "tandem", "torch.nn", "GFLOP/s", "torch.nn", "speed"], rows)
