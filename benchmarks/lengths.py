"""Measures the cost of training on texts of many lengths against torch.nn: memory growth and time for 600 row counts.

Each measurement runs in its own process, as caches of a library stay until the process ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import tandem
from benchmarks.block import has_bfloat16
from benchmarks.timing import table, verdict

WIDTH, COUNTS = 128, range(1, 601)
BAR = 1.5  # growth relative to torch.nn


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(library: str, dtype: torch.dtype) -> tuple[float, float]:
    """Growth in MB over the first pass through all row counts, and milliseconds of the fastest later pass."""
    torch.set_num_threads(2)
    linear = nn.Linear(WIDTH, WIDTH, dtype=dtype) if library == "torch.nn" else tandem.ops.Sequential(tandem.ops.Linear(WIDTH, WIDTH, dtype=dtype))

    def step(rows: int) -> None:
        x = torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True)
        linear(x).backward(torch.ones(rows, WIDTH, dtype=dtype))

    def run() -> float:
        start = time.perf_counter()
        for rows in COUNTS:
            step(rows)
        return time.perf_counter() - start

    before = resident_bytes()
    run()
    growth = resident_bytes() - before
    return growth / 1e6, min(run() for _ in range(5)) * 1e3


def run() -> str:
    rows = []
    for dtype in [torch.float32] + ([torch.bfloat16] if has_bfloat16() else []):
        results = {}
        for library in ("tandem", "torch.nn"):
            code = f"import torch; from benchmarks.lengths import measure; print(*measure({library!r}, {dtype}))"
            output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
            results[library] = tuple(float(word) for word in output.split())
        (growth, took), (growth_there, took_there) = results["tandem"], results["torch.nn"]
        rows.append([f"{dtype}".replace("torch.", ""), f"{growth:.0f}", f"{growth_there:.0f}", verdict(growth <= BAR * growth_there),
                     f"{took:.1f}", f"{took_there:.1f}", f"{took_there / took:.2f}"])
    title = f"{len(COUNTS)} row counts through Linear({WIDTH}, {WIDTH}), forward+backward: MB that stay (bar: {BAR} of torch.nn), ms per pass"
    return table(title, ["dtype", "tandem MB", "torch.nn MB", "bar", "tandem ms", "torch.nn ms", "speed"], rows)
