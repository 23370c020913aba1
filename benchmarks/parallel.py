"""Compares a column- and a row-parallel product of an MLP on two processes with one process: differences of results, and bytes kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tandem
from benchmarks.timing import table, verdict
from tandem import ops

RANKS, ROWS, HIDDEN, WIDE = 2, 1024, 512, 1376
BOUND = 1e-5  # allowed difference of float32 sums of HIDDEN or WIDE terms, relative to the largest element


def block(weights: list[torch.Tensor], column: dict[str, Any], row: dict[str, Any]) -> ops.Sequential:
    made = ops.Sequential(
        ops.RMSNorm(HIDDEN),
        ops.Linear(HIDDEN, 2 * WIDE, bias=False, **column),
        ops.SwiGLU(),
        ops.Linear(WIDE, HIDDEN, bias=False, **row),
    )
    with torch.no_grad():
        for op, weight in zip((made[1], made[3]), weights, strict=True):
            op.weight.copy_(weight)
    return made


def step(module: ops.Sequential, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    assert x.grad is not None
    return [y.detach(), x.grad, module[1].weight.grad, module[3].weight.grad]


def on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    up, down = torch.randn(2 * WIDE, HIDDEN) / HIDDEN**0.5, torch.randn(HIDDEN, WIDE) / WIDE**0.5
    x, grad = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    # A rank has its share of features in each half of the gated unit's input.
    own = [up.view(2, RANKS, -1, HIDDEN)[:, rank].reshape(-1, HIDDEN), down.chunk(RANKS, 1)[rank]]
    whole = block([up, down], {}, {})
    expected = step(whole, x, grad)
    rows = []
    for sequence_parallel in (False, True):
        shared = {"sequence_parallel": sequence_parallel}
        parallel = block(own, {"tensor_parallel_mode": "column", **shared}, {"tensor_parallel_mode": "row", **shared})
        mine = slice(None) if not sequence_parallel else slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
        got = step(parallel, x[mine], grad[mine])
        theirs = [
            *[tensor[mine] for tensor in expected[:2]],
            expected[2].view(2, RANKS, -1, HIDDEN)[:, rank].reshape(-1, HIDDEN),
            expected[3].chunk(RANKS, 1)[rank],
        ]
        error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, theirs, strict=True))
        rows.append((error, parallel.saved_bytes(), whole.saved_bytes()))
    torch.save(rows, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run() -> str:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_a_rank, (folder,), nprocs=RANKS)
        ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]
    rows = []
    for i, name in enumerate(("tensor parallel", "and sequence parallel")):
        error, whole = max(rank[i][0] for rank in ranks), ranks[0][i][2]
        kept = ", ".join(f"{rank[i][1] / 1e6:.2f}" for rank in ranks)
        rows.append([name, f"{error:.1e}", kept, f"{whole / 1e6:.2f}", verdict(error <= BOUND)])
    return table(
        f"parallel: RMSNorm-Linear-SwiGLU-Linear, {ROWS} rows, hidden {HIDDEN}, {RANKS} gloo processes against one, float32, tandem {tandem.__version__} "
        f"(bar: outputs and gradients within {BOUND:.0e} of the largest element)",
        ["", "largest difference", "MB kept per rank", "MB kept by one process", "bar"],
        rows,
    )
