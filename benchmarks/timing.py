"""Interleaved timing: candidates take turns round by round, so that other processes disturb all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def interleaved(candidates: dict[str, Callable[[], object]], *, rounds: int = 15, seconds: float = 0.02) -> dict[str, float]:
    """Median seconds per call of each candidate.

    Each round calls every candidate repeatedly for about `seconds`; the order rotates.
    """
    counts = {}
    for name, call in candidates.items():
        call()
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        counts[name] = max(1, min(2000, int(seconds / max(once, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call, count = candidates[name], counts[name]
            start = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(values) for name, values in samples.items()}


class Rotation:
    """Copies of tensors that together exceed the last-level cache. Every call returns the next copy."""

    def __init__(self, make: Callable[[], tuple[torch.Tensor, ...]], *, total_bytes: int = 160 << 20) -> None:
        first = make()
        size = sum(t.numel() * t.element_size() for t in first)
        self.copies = [first] + [make() for _ in range(max(1, total_bytes // max(size, 1)))]
        self.turn = 0

    def __call__(self) -> tuple[torch.Tensor, ...]:
        self.turn = (self.turn + 1) % len(self.copies)
        return self.copies[self.turn]


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A table as text, with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [title, "  ".join(h.ljust(w) for h, w in zip(header, widths, strict=True)), "  ".join("-" * w for w in widths)]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def verdict(reached: bool) -> str:
    return "met" if reached else "MISSED"
