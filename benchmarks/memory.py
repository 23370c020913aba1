"""Measures page faults and time of a step of the LLaMA block: with the cache of freed memory, without it, and in eager torch.

It runs in its own process, as earlier frees of a process decide how much memory the C library returns to the system.
"""

from __future__ import annotations

import resource
import statistics

import torch

import tandem
from benchmarks.block import TorchBlock, has_bfloat16, inner_size, tandem_block
from benchmarks.timing import interleaved, table


def run() -> str:
    torch.set_num_threads(2)
    dtype, tokens, hidden = torch.bfloat16 if has_bfloat16() else torch.float32, 1024, 512
    eager, pipeline = TorchBlock(hidden, inner_size(hidden)).to(dtype), tandem_block(hidden, inner_size(hidden)).to(dtype)
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    limit = tandem.set_cache_limit(0)
    faults: dict[str, list[int]] = {"tandem": [], "tandem, nothing kept": [], "eager": []}

    def step(name: str) -> None:
        tandem.set_cache_limit(limit if name == "tandem" else 0)  # after a limit of 0 the first step fills the cache
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        (eager if name == "eager" else pipeline)(x).backward(grad)
        faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    times = interleaved({name: lambda name=name: step(name) for name in faults}, rounds=21, seconds=0.3)
    tandem.set_cache_limit(limit)
    rows = [[name, f"{times[name] * 1e6:.0f}", f"{statistics.median(faults[name]):.0f}"] for name in faults]
    return table(f"fresh memory, {tokens}x{hidden} {dtype}".replace("torch.", ""), ["", "us", "page faults per step"], rows)
