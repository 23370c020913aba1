"""Times the ops for rotary embedding and causal attention of a decoder layer against torch's operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import tandem
from tandem import ops

ROUNDS = 7
SIZES = ((8, 128, 6, 6, 32), (2, 512, 8, 2, 64))  # batch, sequence, heads, heads of keys, features of a head


def medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each call. The calls take turns, and the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            if turn > 0:
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each) for name, each in times.items()}


def compared(dtype: torch.dtype, batch: int, length: int, heads: int, groups: int, width: int) -> str:
    shape = {"num_heads": heads, "head_dim": width, "num_kv_heads": groups}
    rotary, attention = ops.Rotary(**shape), ops.Attention(**shape, causal=True)
    both, angles = ops.Sequential(rotary, attention), tandem.RotaryPositionEmbedding(width)(length)
    x = torch.randn(batch, length, (heads + 2 * groups) * width).to(dtype).requires_grad_()
    grad = torch.randn(batch, length, heads * width).to(dtype)

    def turned() -> list[torch.Tensor]:
        q, k, v = x.unflatten(-1, (-1, width)).split([heads, groups, groups], -2)
        return [tandem.apply_rotary_pos_emb(q, angles, "bshd"), tandem.apply_rotary_pos_emb(k, angles, "bshd"), v]

    def attended() -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in turned())
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups).transpose(1, 2).flatten(-2)

    with torch.no_grad():
        of_rotary = medians({"torch": turned, "tandem": lambda: rotary(x)})
    whole = medians({"torch": lambda: torch.autograd.grad(attended(), x, grad), "tandem": lambda: torch.autograd.grad(both(x), x, grad)})
    figures = [f"{name} {each['tandem'] * 1e3:.2f} ms, {each['torch'] / each['tandem']:.2f} times as fast as torch's operations" for name, each in (("rotary", of_rotary), ("both, forward + backward,", whole))]
    return f"{str(dtype).removeprefix('torch.'):9} {batch} x {length}, {heads} heads of {width}, {groups} of keys: {'; '.join(figures)}"


def run() -> str:
    return "\n".join(["attention: queries, keys and values side by side", *[compared(dtype, *size) for dtype in (torch.float32, torch.bfloat16) for size in SIZES]])
