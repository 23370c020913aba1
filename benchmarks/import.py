"""Measures the time that `import tandem` takes after `import torch`, in new processes."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.timing import verdict

BAR = 50.0  # milliseconds
PROGRAM = """
from time import perf_counter
start = perf_counter()
import torch
middle = perf_counter()
import tandem
print(middle - start, perf_counter() - middle)
"""


def run(rounds: int = 7) -> str:
    samples = []
    for _ in range(rounds + 1):
        result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        samples.append([1e3 * float(seconds) for seconds in result.stdout.split()])
    torch_ms, tandem_ms = (statistics.median(column) for column in zip(*samples[1:], strict=True))  # the first process reads files from the disk
    return f"import: torch {torch_ms:.0f} ms, tandem {tandem_ms:.1f} ms more (bar {BAR:.0f}: {verdict(tandem_ms <= BAR)})"
