"""Measures processor time for planning: the time of the first forward and backward of a pipeline minus the time of the second ones."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch

import tandem
from benchmarks.timing import table, verdict

HIDDEN = 8
LARGEST_EXPONENT = 1.3
BAR_MS, BAR_RECIPE_MS = 60.0, 120.0  # for 512 ops, forward and backward

_numbers = itertools.count(1)  # each pipeline gets other options, as equal pipelines share a plan


def block(count: int) -> tandem.ops.Sequential:
    """A pipeline of `count` ops that repeats RMSNorm, Linear, SwiGLU, Linear."""
    eps = 1e-5 * (1 + next(_numbers) * 1e-6)
    makers: list[Callable[[], torch.nn.Module]] = [
        lambda: tandem.ops.RMSNorm(HIDDEN, eps=eps),
        lambda: tandem.ops.Linear(HIDDEN, 2 * HIDDEN),
        tandem.ops.SwiGLU,
        lambda: tandem.ops.Linear(HIDDEN, HIDDEN),
    ]
    return tandem.ops.Sequential(*[makers[i % 4]() for i in range(count)])


def chain(count: int) -> tandem.ops.Sequential:
    return tandem.ops.Sequential(tandem.ops.ConstantScale(1 + next(_numbers) * 1e-6), *[tandem.ops.ReLU() for _ in range(count - 1)])


def milliseconds(call: Callable[[], object]) -> tuple[float, object]:
    start = time.thread_time()  # time of this thread, in which backward runs too, so other processes do not count
    result = call()
    return (time.thread_time() - start) * 1e3, result


def planning(make: Callable[[int], tandem.ops.Sequential], count: int, recipe: bool, repeats: int) -> tuple[float, float]:
    """Median milliseconds of planning forward and backward."""
    forwards, backwards = [], []
    for _ in range(repeats):
        pipeline, x = make(count), torch.randn(4, HIDDEN, requires_grad=True)
        with tandem.autocast() if recipe else contextlib.nullcontext():
            first, y = milliseconds(lambda: pipeline(x))
            first_backward, _ = milliseconds(lambda: y.sum().backward())
            second, y = milliseconds(lambda: pipeline(x))
            second_backward, _ = milliseconds(lambda: y.sum().backward())
        forwards.append(first - second)
        backwards.append(first_backward - second_backward)
    return statistics.median(forwards), statistics.median(backwards)


def exponent(counts: list[int], times: list[float]) -> float:
    """The exponent e in time ~ count^e: the slope of a line through the logarithms, by least squares."""
    logs = [(math.log(n), math.log(max(t, 1e-3))) for n, t in zip(counts, times, strict=True)]
    mean_n, mean_t = (statistics.fmean(log[i] for log in logs) for i in (0, 1))
    return sum((n - mean_n) * (t - mean_t) for n, t in logs) / sum((n - mean_n) ** 2 for n, _ in logs)


def run() -> str:
    torch.set_num_threads(1)
    planning(block, 8, recipe=False, repeats=3)  # a first run loads what later runs reuse
    rows = []
    for title, make, recipe, counts in (
        ("block", block, False, [8, 32, 128, 256, 512]),
        ("block, recipe", block, True, [8, 32, 128, 256, 512]),
        ("ReLU", chain, False, [1000, 8000]),
    ):
        times = [planning(make, count, recipe, 5 if count <= 512 else 3) for count in counts]
        for count, (forward, backward) in zip(counts, times, strict=True):
            bar = ""
            if count == 512:
                bar_ms = BAR_RECIPE_MS if recipe else BAR_MS
                bar = f"{bar_ms:.0f} {verdict(forward + backward <= bar_ms)}"
            rows.append([title, str(count), f"{forward:.2f}", f"{backward:.2f}", f"{forward + backward:.2f}", bar])
        large = [(n, sum(t)) for n, t in zip(counts, times, strict=True) if n >= 32]
        slope = exponent([n for n, _ in large], [t for _, t in large])
        rows.append([title, f"n^{slope:.2f}", "", "", "", f"n^{LARGEST_EXPONENT} {verdict(slope <= LARGEST_EXPONENT)}"])
    return table("planning, ms", ["ops", "n", "first forward", "first backward", "both", "bar"], rows)
