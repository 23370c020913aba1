"""Measures time and peak memory of a loss without logits, forward and backward, against torch's two functions: 4,096 tokens, 32,000 classes."""

from __future__ import annotations

import ctypes
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import tandem
from benchmarks.block import has_bfloat16

TOKENS, HIDDEN, CLASSES, ROUNDS = 4096, 512, 32000, 5


def peak_bytes() -> int:
    """The peak memory of the process since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def forget_peak() -> int:
    """Resets the peak; returns the current memory of the process, after the C library has released unused memory."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_bytes()


def compared(dtype: torch.dtype) -> list[str]:
    x = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = (torch.randn(CLASSES, HIDDEN) / 20).to(dtype).requires_grad_()
    targets = torch.randint(CLASSES, (TOKENS,))
    losses = {
        "eager": lambda: F.cross_entropy(F.linear(x, weight), targets),
        "torch, chunked": lambda: F.linear_cross_entropy(x, weight, targets, options=torch.nn.LinearCrossEntropyOptions()),
        "tandem": lambda: tandem.linear_cross_entropy(x, weight, targets),
    }
    times: dict[str, list[float]] = {name: [] for name in losses}
    peaks: dict[str, int] = {}
    for turn in range(ROUNDS + 1):
        for name, loss in losses.items():
            x.grad = weight.grad = None
            tandem.empty_cache()
            before, begun = forget_peak(), time.perf_counter()
            loss().backward()
            if turn > 0:
                times[name].append(time.perf_counter() - begun)
            peaks[name] = peak_bytes() - before
    median = {name: statistics.median(each) for name, each in times.items()}
    products = 6 * TOKENS * HIDDEN * CLASSES
    return [
        f"{str(dtype).removeprefix('torch.'):9} {name:15} {median[name] * 1e3:7.0f} ms, {products / median[name] / 1e9:5.0f} GFLOP/s of products, "
        f"{median[name] / median['eager']:.2f} of eager's time; peak {peaks[name] / 1e6:5.0f} MB, {peaks[name] / peaks['eager']:.2f} of eager's"
        for name in losses
    ]


def run() -> str:
    torch.set_num_threads(2)
    lines = [f"loss: {TOKENS} tokens, hidden {HIDDEN}, {CLASSES} classes, forward + backward"]
    for dtype in (torch.float32, torch.bfloat16)[: 1 + has_bfloat16()]:
        lines += compared(dtype)
    return "\n".join(lines)
