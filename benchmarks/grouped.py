"""Times experts, forward and backward: GroupedLinear against a loop of torch.nn.functional.linear over the groups, and a whole MLP against such a loop
and against torch's grouped product with eager activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

import tandem
from benchmarks.timing import interleaved, table, verdict

GROUPS, WIDTH = 8, 512
SPLITS = {"uneven, 1024 rows": [300, 0, 17, 128, 256, 3, 220, 100], "even, 1024 rows": [128] * 8, "uneven, 128 rows": [40, 0, 3, 16, 32, 1, 24, 12]}
BAR = 1.0
MLP_ROWS = "uneven, 1024 rows"
# Bars by dtype: speed relative to the loop and to torch's grouped product. SAVED_BAR: bytes saved for backward relative to the loop.
MLP_BARS = {torch.float32: (1.15, 1.05), torch.bfloat16: (1.6, None)}
SAVED_BAR = 0.6


def measure(splits: list[int]) -> dict[str, float]:
    """Seconds per forward and backward of GroupedLinear and of the loop."""
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


class Mlp:
    """GroupedLinear, ScaledSwiGLU, GroupedLinear in three implementations on shared parameters. It has no biases, as torch's grouped product takes none."""

    def __init__(self, splits: list[int], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.counts = torch.tensor(splits)
        self.ends = self.counts.cumsum(0).to(torch.int32)
        self.box = tandem.ops.Sequential(
            tandem.ops.GroupedLinear(GROUPS, WIDTH, 2 * WIDTH, bias=False, dtype=dtype),
            tandem.ops.ScaledSwiGLU(),
            tandem.ops.GroupedLinear(GROUPS, WIDTH, WIDTH, bias=False, dtype=dtype),
        )
        self.first, self.last = ([getattr(self.box[at], f"weight{g}") for g in range(GROUPS)] for at in (0, 2))
        self.packed = [torch.stack([weight.detach() for weight in weights]).requires_grad_() for weights in (self.first, self.last)]
        self.x = torch.randn(sum(splits), WIDTH, dtype=dtype).requires_grad_()
        self.scales = torch.rand(sum(splits), dtype=dtype).requires_grad_()
        self.grad = torch.randn(sum(splits), WIDTH).to(dtype)

    @staticmethod
    def unit(z: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        a, b = z.chunk(2, -1)
        return F.silu(a) * b * scales[:, None]

    def tandem(self) -> torch.Tensor:
        return self.box(self.x, self.counts, self.scales, self.counts)

    def loop(self) -> torch.Tensor:
        counts = self.counts.tolist()
        operands = zip(self.x.split(counts), self.scales.split(counts), self.first, self.last, strict=True)
        return torch.cat([F.linear(self.unit(F.linear(rows, first), scales), last) for rows, scales, first, last in operands])

    def grouped_mm(self) -> torch.Tensor:
        first, last = self.packed
        z = torch._grouped_mm(self.x, first.transpose(-2, -1), offs=self.ends)
        return torch._grouped_mm(self.unit(z, self.scales), last.transpose(-2, -1), offs=self.ends)

    def step(self, forward: Callable[[], torch.Tensor]) -> None:
        forward().backward(self.grad)
        for leaf in (self.x, self.scales, *self.first, *self.last, *self.packed):
            leaf.grad = None

    def saved_bytes(self, forward: Callable[[], torch.Tensor]) -> int:
        """Bytes saved for backward, without parameters and inputs. Each storage counts once."""
        known = {tensor.untyped_storage().data_ptr() for tensor in (self.x, self.scales, *self.first, *self.last, *self.packed)}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = forward()
        total = sum(saved.values())
        del y
        return total


def measure_mlp(splits: list[int], dtype: torch.dtype, rounds: int = 25) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds per forward and backward, and bytes saved for backward, of each implementation."""
    torch.set_num_threads(2)
    mlp = Mlp(splits, dtype)
    ways = {"tandem": mlp.tandem, "loop": mlp.loop, "grouped_mm": mlp.grouped_mm}
    seconds = interleaved({name: lambda way=way: mlp.step(way) for name, way in ways.items()}, rounds=rounds)
    return seconds, {name: mlp.saved_bytes(way) for name, way in ways.items()}


def run() -> str:
    rows = []
    for name, splits in SPLITS.items():
        seconds = measure(splits)
        gflop = 6 * sum(splits) * WIDTH * WIDTH / 1e9
        ratio = seconds["loop"] / seconds["tandem"]
        rows.append([name, f"{seconds['tandem'] * 1e3:.2f}", f"{seconds['loop'] * 1e3:.2f}", f"{gflop / seconds['tandem']:.0f}", f"{ratio:.2f}", verdict(ratio >= BAR)])
    linear = table(
        f"grouped: GroupedLinear, {GROUPS} groups, {WIDTH} to {WIDTH} features, forward+backward, float32 (bar: {BAR:.1f} of a loop of F.linear)",
        ["rows", "tandem ms", "loop ms", "GFLOP/s", "times as fast", "bar"],
        rows,
    )
    rows = []
    for dtype, (loop_bar, grouped_bar) in MLP_BARS.items():
        seconds, saved = measure_mlp(SPLITS[MLP_ROWS], dtype)
        of_loop, of_grouped = seconds["loop"] / seconds["tandem"], seconds["grouped_mm"] / seconds["tandem"]
        share = saved["tandem"] / saved["loop"]
        met = of_loop >= loop_bar and (grouped_bar is None or of_grouped >= grouped_bar) and share <= SAVED_BAR
        bars = f"{loop_bar} / {grouped_bar or '-'} / {SAVED_BAR}"
        milliseconds = [f"{seconds[name] * 1e3:.2f}" for name in ("tandem", "loop", "grouped_mm")]
        rows.append([str(dtype).removeprefix("torch."), *milliseconds, f"{of_loop:.2f}", f"{of_grouped:.2f}", f"{share:.2f}", bars, verdict(met)])
    mlp = table(
        f"grouped: MLP of {GROUPS} experts, {WIDTH} to {WIDTH} to {WIDTH} features, ScaledSwiGLU, {MLP_ROWS}, forward+backward",
        ["dtype", "tandem ms", "loop ms", "_grouped_mm ms", "of the loop", "of _grouped_mm", "saved bytes of the loop", "bars", "bar"],
        rows,
    )
    return linear + "\n\n" + mlp
