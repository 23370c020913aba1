"""Times norms, activations and quantization at 4096x1024 against eager torch, torch.compile and the limit of memory: two threads, cold arrays."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import tandem  # noqa: F401  (registers torch.ops.tandem)

from benchmarks.limits import Loops, exponential_seconds
from benchmarks.timing import Rotation, interleaved, table, verdict

ROWS, HIDDEN = 4096, 1024
op = torch.ops.tandem


def swiglu(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def norm_statistics(x: torch.Tensor, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = x.float()
    mean = wide.mean(-1)
    return (wide.square().mean(-1) + eps).rsqrt(), mean, (wide.var(-1, unbiased=False) + eps).rsqrt()


def rms_norm_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, inv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_hat = x.float() * inv[:, None]
    wide = g.float()
    gw = wide * w.float()
    grad_x = inv[:, None] * (gw - x_hat * (gw * x_hat).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (wide * x_hat).sum(0).to(w.dtype)


def current_scaling(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    amax = x.abs().amax().float()
    most = torch.finfo(torch.float8_e4m3fn).max
    scale = most / amax
    return (x.float() * scale).clamp(-most, most).to(torch.float8_e4m3fn), scale.reciprocal()


class Case:
    """One kernel: Tandem's and torch's function for it, and the numbers of elements that it must read and write."""

    def __init__(self, name: str, make: Callable, tandem: Callable, torch_: Callable, reads: int, writes: int, elements: int,
                 exponentials: bool = False, compiled_only: Callable | None = None) -> None:
        self.name, self.make, self.tandem, self.torch = name, make, tandem, torch_
        self.reads, self.writes, self.elements, self.exponentials = reads, writes, elements, exponentials


def cases(dtype: torch.dtype) -> list[Case]:
    n = ROWS * HIDDEN
    new = lambda *shape: torch.randn(*shape, dtype=torch.float32).to(dtype)  # noqa: E731
    w, b, b2 = new(HIDDEN), new(HIDDEN), new(2 * HIDDEN)
    seed, mask = torch.tensor(1234), torch.rand(ROWS, HIDDEN) >= 0.1
    x0 = new(ROWS, HIDDEN)
    inv_rms, mean, inv_std = norm_statistics(x0)
    torch_mean, torch_rstd = torch.native_layer_norm(x0, [HIDDEN], w, b, 1e-5)[1:]
    pair = lambda: (new(ROWS, HIDDEN), new(ROWS, HIDDEN))  # noqa: E731
    triple = lambda: (new(ROWS, HIDDEN), new(ROWS, HIDDEN), new(ROWS, HIDDEN))  # noqa: E731
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward
    plain, gradients = (1e-5, False, False), (False, False, dtype)  # eps, no zero-centered weight, no rounding before it; the dtype of sums
    of_rms_norm, of_layer_norm = [True, True, False, False, False], [True, True, False, False, True]
    return [
        Case("rms_norm forward", lambda: (new(ROWS, HIDDEN),), lambda x: op.norm_forward(x, None, w, None, *plain, [False, True]),
             lambda x: F.rms_norm(x, (HIDDEN,), w, 1e-5), n, n, n),
        Case("rms_norm backward", pair, lambda g, x: op.norm_backward(g, x, w, None, None, inv_rms, None, *gradients, of_rms_norm),
             lambda g, x: rms_norm_backward(g, x, w, inv_rms), 2 * n, n, n),
        Case("rms_norm backward + residual", triple, lambda g, x, r: op.norm_backward(g, x, w, None, None, inv_rms, r, *gradients, of_rms_norm),
             lambda g, x, r: (lambda gx, gw: (gx + r, gw))(*rms_norm_backward(g, x, w, inv_rms)), 3 * n, n, n),
        Case("layer_norm forward", lambda: (new(ROWS, HIDDEN),), lambda x: op.norm_forward(x, None, w, b, *plain, [False, True]),
             lambda x: F.layer_norm(x, (HIDDEN,), w, b, 1e-5), n, n, n),
        Case("layer_norm backward", pair, lambda g, x: op.norm_backward(g, x, w, b, mean, inv_std, None, *gradients, of_layer_norm),
             lambda g, x: layer_norm_backward(g, x, [HIDDEN], torch_mean, torch_rstd, w, b, [True] * 3), 2 * n, n, n),
        Case("layer_norm backward + residual", triple, lambda g, x, r: op.norm_backward(g, x, w, b, mean, inv_std, r, *gradients, of_layer_norm),
             lambda g, x, r: (lambda gx, gw, gb: (gx + r, gw, gb))(*layer_norm_backward(g, x, [HIDDEN], torch_mean, torch_rstd, w, b, [True] * 3)),
             3 * n, n, n),
        Case("swiglu forward", lambda: (new(ROWS, 2 * HIDDEN),), lambda x: op.activation_forward(x, None, "silu", True, [False, True]),
             swiglu, 2 * n, n, n, True),
        Case("swiglu backward", lambda: (new(ROWS, HIDDEN), new(ROWS, 2 * HIDDEN)),
             lambda g, x: op.activation_backward(g, x, "silu", True, [True, False, False]), _swiglu_backward, 3 * n, 2 * n, n, True),
        Case("bias+swiglu forward", lambda: (new(ROWS, 2 * HIDDEN),), lambda x: op.activation_forward(x, b2, "silu", True, [False, True]),
             lambda x: swiglu(x + b2), 2 * n, n, n, True),
        Case("dropout+add", pair, lambda x, r: op.dropout(x, None, seed, 0.1, r), lambda x, r: F.dropout(x, 0.1) + r, 2 * n, n, n),
        Case("bias+dropout+add", pair, lambda x, r: op.dropout(x, b, seed, 0.1, r), lambda x, r: F.dropout(x + b, 0.1) + r, 2 * n, n, n),
        Case("dropout backward + bias", lambda: (new(ROWS, HIDDEN),), lambda g: op.dropout_backward(g, seed, 0.1, g.dtype, [True, True]),
             lambda g: (lambda gx: (gx, gx.sum(0)))(torch.ops.aten.native_dropout_backward(g, mask, 1 / 0.9)), n, n, n),
        Case("add+rms_norm", pair, lambda x, r: op.norm_forward(x, r, w, None, *plain, [True, True]),
             lambda x, r: (lambda s: (s, F.rms_norm(s, (HIDDEN,), w, 1e-5)))(x + r), 2 * n, 2 * n, n),
        Case("add+layer_norm", pair, lambda x, r: op.norm_forward(x, r, w, b, *plain, [True, True]),
             lambda x, r: (lambda s: (s, F.layer_norm(s, (HIDDEN,), w, b, 1e-5)))(x + r), 2 * n, 2 * n, n),
        Case("bias+gelu forward", lambda: (new(ROWS, HIDDEN),), lambda x: op.activation_forward(x, b, "gelu", False, [False, True]),
             lambda x: F.gelu(x + b, approximate="tanh"), n, n, n, True),
        Case("bias+gelu backward", pair, lambda g, x: op.activation_backward(g, x, "gelu", False, [True, False, True]), _gelu_backward, 2 * n, n, n, True),
    ]


def _swiglu_backward(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((torch.ops.aten.silu_backward(g * b, a), g * F.silu(a)), -1)


def _gelu_backward(g: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad = torch.ops.aten.gelu_backward(g, z, approximate="tanh")
    return grad, grad.sum(0)


def share_verdict(speedup: float, share: float, bar: float) -> str:
    """The verdict: met if the kernel reaches its share of the limit or is 1.8 times as fast as its rivals. A kernel faster than the limit shows that the
    limit is wrong."""
    if share > 1.05:
        return f"LIMIT WRONG by {share - 1:.0%}"
    return "met" if speedup >= 1.8 or share >= bar else f"MISSED by {1 - share / bar:.0%}"


def run() -> str:
    torch.set_num_threads(2)
    text = []
    for dtype in (torch.float32, torch.bfloat16):
        rows = []
        for case in cases(dtype):
            torch._dynamo.reset()
            compiled = torch.compile(case.torch, dynamic=False)
            rotation = Rotation(case.make)
            loops = Loops((ROWS, HIDDEN), dtype, case.reads // case.elements, case.writes // case.elements)
            with torch.no_grad():
                times = interleaved({"tandem": lambda: case.tandem(*rotation()), "eager": lambda: case.torch(*rotation()),
                                     "compile": lambda: compiled(*rotation()), **loops.candidates}, rounds=11, seconds=0.03)
            best = min(times["eager"], times["compile"])
            bound, bar = loops.seconds(times), 0.75
            if case.exponentials:
                bound, bar = max(bound, exponential_seconds(case.elements, dtype)), 0.7
            bytes_moved = (case.reads + case.writes) * dtype.itemsize
            rows.append([case.name, *(f"{times[k] * 1e6:.0f}" for k in ("tandem", "eager", "compile")), f"{bytes_moved / times['tandem'] / 1e9:.0f}",
                         f"{best / times['tandem']:.2f}", f"{bound / times['tandem']:.2f}", f">= 1.8 or {bar}",
                         share_verdict(best / times["tandem"], bound / times["tandem"], bar)])
        text.append(table(f"{ROWS}x{HIDDEN} {dtype}, us", ["kernel", "tandem", "eager", "compile", "GB/s", "x best rival", "x limit", "bar", ""], rows))
    rotation = Rotation(lambda: (torch.randn(ROWS, HIDDEN).bfloat16(),))
    torch._dynamo.reset()
    compiled = torch.compile(current_scaling, dynamic=False)
    with torch.no_grad():
        times = interleaved({"tandem": lambda: op.quantize(*rotation(), None, "fp8_e4m3", [True, False, True]), "eager": lambda: current_scaling(*rotation()),
                             "compile": lambda: compiled(*rotation())}, rounds=15, seconds=0.03)
    ratios = times["eager"] / times["tandem"], times["compile"] / times["tandem"]
    text.append(f"quantize to E4M3, current scaling, {ROWS}x{HIDDEN} bfloat16: {times['tandem'] * 1e6:.0f} us, "
                f"{ratios[0]:.1f}x eager (bar 8: {verdict(ratios[0] >= 8)}), {ratios[1]:.2f}x torch.compile (bar 2.2: {verdict(ratios[1] >= 2.2)})")
    return "\n\n".join(text)
