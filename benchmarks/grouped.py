"""Linear layers of groups of rows, forward and backward, beside a loop of torch.nn.functional.linear over the groups."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import tandem
from benchmarks.timing import interleaved, table, verdict

GROUPS, WIDTH = 8, 512
SPLITS = {"uneven, 1024 rows": [300, 0, 17, 128, 256, 3, 220, 100], "even, 1024 rows": [128] * 8, "uneven, 128 rows": [40, 0, 3, 16, 32, 1, 24, 12]}
BAR = 1.0


def measure(splits: list[int]) -> dict[str, float]:
    """Seconds per forward and backward."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    module = tandem.ops.GroupedLinear(GROUPS, WIDTH, WIDTH)
    weights = [getattr(module, f"weight{g}") for g in range(GROUPS)]
    biases = [getattr(module, f"bias{g}") for g in range(GROUPS)]
    x = torch.randn(sum(splits), WIDTH, requires_grad=True)
    counts, grad = torch.tensor(splits), torch.randn(sum(splits), WIDTH)
    leaves = [x, *module.parameters()]

    def step(y: torch.Tensor) -> None:
        y.backward(grad)
        for leaf in leaves:
            leaf.grad = None

    def loop() -> None:
        parts = x.split(counts.tolist())
        step(torch.cat([F.linear(part, weight, bias) for part, weight, bias in zip(parts, weights, biases, strict=True)]))

    return interleaved({"tandem": lambda: step(module(x, counts)), "loop": loop}, rounds=25)


def run() -> str:
    rows = []
    for name, splits in SPLITS.items():
        seconds = measure(splits)
        gflop = 6 * sum(splits) * WIDTH * WIDTH / 1e9
        ratio = seconds["loop"] / seconds["tandem"]
        rows.append([name, f"{seconds['tandem'] * 1e3:.2f}", f"{seconds['loop'] * 1e3:.2f}", f"{gflop / seconds['tandem']:.0f}", f"{ratio:.2f}", verdict(ratio >= BAR)])
    return table(
        f"grouped: GroupedLinear, {GROUPS} groups, {WIDTH} to {WIDTH} features, forward+backward, float32 (bar: {BAR:.1f} of a loop of F.linear)",
        ["rows", "tandem ms", "loop ms", "GFLOP/s", "times as fast", "bar"],
        rows,
    )
