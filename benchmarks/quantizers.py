"""Times quantizers at 4096x1024 bfloat16 against torchao, if it is installed, and against the limit of memory: two threads, cold arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

import tandem  # noqa: F401  (registers torch.ops.tandem)

from benchmarks.limits import Loops
from benchmarks.timing import Rotation, interleaved, table, verdict

ROWS, HIDDEN = 4096, 1024
ELEMENTS = ROWS * HIDDEN
EAGER_BAR, COMPILED_BAR = 10.0, 2.2  # speed relative to torchao
FUSED_BAR = 1.4  # speed relative to separate kernels

# Name, quantizer, number of times that x must be read, bytes of codes and scales per element and direction, least share of the limit.
QUANTIZERS = (
    ("current scaling", "fp8_e4m3:current:eps=0:pow2=0", 2, 1.0, 0.4),
    ("delayed scaling", "fp8_e4m3:delayed", 1, 1.0, None),
    ("1x128 blocks", "fp8_1x128_e4m3:eps=0:pow2=1", 1, 1 + 4 / 128, 0.4),
    ("128x128 blocks", "fp8_128x128_e4m3:eps=0:pow2=1", 1, 1 + 4 / 128**2, None),
    ("MXFP8", "mxfp8_e4m3", 1, 1 + 1 / 32, 0.4),
    ("NVFP4", "nvfp4", 2, 0.5 + 1 / 16, 0.2),
    ("NVFP4, six or four", "nvfp4_256:4over6=mae", 2, 0.5 + 1 / 16, None),
    ("NVFP4, columns rotated", "nvfp4:rht=1", 2, 0.5 + 1 / 16, None),
    ("NVFP4, columns rotated, by chance", "nvfp4:rht=1:sr=1", 2, 0.5 + 1 / 16, None),
)


def torchao_quantizers() -> dict[str, Callable[[torch.Tensor], object]]:
    """torchao's quantizers by the names in QUANTIZERS; empty if torchao is not installed."""
    try:
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError:
        return {}
    config = LinearMMConfig()
    return {
        "current scaling": lambda x: hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, config),
        "MXFP8": lambda x: to_mx(x, torch.float8_e4m3fn, 32),
        "NVFP4": lambda x: nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().amax())),
    }


def compiled_or_none(function: Callable[[torch.Tensor], object], x: torch.Tensor) -> Callable[[torch.Tensor], object] | None:
    """The compiled function; None if Inductor cannot compile it."""
    compiled = torch.compile(function, dynamic=False)
    logging.disable(logging.CRITICAL)  # Inductor logs a failure at length
    try:
        compiled(x)
    except Exception:  # noqa: BLE001  (Inductor's errors have many types; which one does not matter)
        return None
    finally:
        logging.disable(logging.NOTSET)
    return compiled


def fused(dtype: torch.dtype) -> list[list[str]]:
    """Rows that compare fused kernels, which quantize their result while they compute it, with two separate kernels."""
    op, eps = torch.ops.tandem, 1e-5
    weight = torch.ones(HIDDEN, dtype=dtype)
    x, z = (Rotation(lambda cols=cols: (torch.randn(ROWS, cols).to(dtype),)) for cols in (HIDDEN, 2 * HIDDEN))
    g_z = Rotation(lambda: (torch.randn(ROWS, HIDDEN).to(dtype), torch.randn(ROWS, 2 * HIDDEN).to(dtype)))
    g_x = Rotation(lambda: (torch.randn(ROWS, HIDDEN).to(dtype), torch.randn(ROWS, HIDDEN).to(dtype)))
    g_x_r = Rotation(lambda: tuple(torch.randn(ROWS, HIDDEN).to(dtype) for _ in range(3)))
    ones, means, seed = torch.ones(ROWS), torch.zeros(ROWS), torch.tensor(7)

    nothing: dict[str, Any] = {"quantizer": None, "mask": [False] * 3}

    def norm(x: torch.Tensor, extra: torch.Tensor | None, wanted: list[bool], one: dict[str, Any] = nothing) -> Any:
        return op.norm_forward(x, extra, weight, None, eps, False, False, wanted, one["quantizer"], None, one["mask"])

    def norm_backward(g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor | None, residual: torch.Tensor | None, one: dict[str, Any], wanted: list[bool],
                      of_y: dict[str, Any] = nothing) -> Any:
        bias, codes = None if mean is None else weight, (one["quantizer"], None, one["mask"], of_y["quantizer"], None, of_y["mask"])
        return op.norm_backward(g, x, weight, bias, mean, ones, residual, False, False, dtype, wanted, *codes)

    def glu_backward(g: torch.Tensor, z: torch.Tensor, one: dict[str, Any], wanted: list[bool], of_y: dict[str, Any] = nothing) -> Any:
        return op.activation_backward(g, z, "silu", True, wanted, one["quantizer"], None, one["mask"], of_y["quantizer"], None, of_y["mask"])

    rows = []
    kinds = (("1x128 blocks", "fp8_1x128_e4m3:eps=0:pow2=1"), ("MXFP8", "mxfp8_e4m3"), ("current scaling", "fp8_e4m3:current:eps=0:pow2=0"), ("NVFP4", "nvfp4"))
    for name, quantizer in kinds:
        both = name != "current scaling"  # with current scaling row codes serve both directions
        codes = lambda y, of=quantizer, both=both: op.quantize(y, None, of, [True, both, True])  # noqa: E731
        as_one: dict[str, Any] = {"quantizer": quantizer, "mask": [True, both, True]}
        # Backward re-emits y and computes its column codes only, as forward has computed the row codes.
        again = lambda y, of=quantizer, both=both: op.quantize(y, None, of, [not both, both, False])  # noqa: E731
        of_y: dict[str, Any] = {"quantizer": quantizer, "mask": [not both, both, False]}
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "RMSNorm": (
                lambda codes=codes: codes(norm(*x(), None, [False, True])[1]),
                lambda one=as_one: norm(*x(), None, [False, False], one),
            ),
            "sum + RMSNorm": (
                lambda codes=codes: codes(norm(*g_x(), [True, True])[1]),
                lambda one=as_one: norm(*g_x(), [True, False], one),
            ),
            "RMSNorm backward": (
                lambda codes=codes: codes(norm_backward(*g_x(), None, None, nothing, [True, True, False, False, False])[0]),
                lambda one=as_one: norm_backward(*g_x(), None, None, one, [False, True, False, False, False]),
            ),
            "RMSNorm backward, y to codes": (
                lambda again=again: again(norm_backward(*g_x(), None, None, nothing, [True, True, True, False, False])[2]),
                lambda of_y=of_y: norm_backward(*g_x(), None, None, nothing, [True, True, False, False, False], of_y),
            ),
            "RMSNorm backward, both to codes": (
                lambda again=again, one=as_one: again(norm_backward(*g_x(), None, None, one, [False, True, True, False, False])[2]),
                lambda one=as_one, of_y=of_y: norm_backward(*g_x(), None, None, one, [False, True, False, False, False], of_y),
            ),
            "RMSNorm backward + residual": (
                lambda codes=codes: (lambda g, x, r: codes(norm_backward(g, x, None, r, nothing, [True, True, False, False, False])[0]))(*g_x_r()),
                lambda one=as_one: (lambda g, x, r: norm_backward(g, x, None, r, one, [True, True, False, False, False]))(*g_x_r()),
            ),
            "RMSNorm backward, bias": (
                lambda one=as_one: op.sum_rows(
                    norm_backward(*g_x(), None, None, nothing, [True, True, False, False, False])[0], dtype, one["quantizer"], None, one["mask"]
                ),
                lambda one=as_one: norm_backward(*g_x(), None, None, one, [False, True, False, True, False]),
            ),
            "LayerNorm backward": (
                lambda codes=codes: codes(norm_backward(*g_x(), means, None, nothing, [True, True, False, False, True])[0]),
                lambda one=as_one: norm_backward(*g_x(), means, None, one, [False, True, False, False, True]),
            ),
            "dropout backward": (
                lambda codes=codes: codes(op.dropout(*x(), None, seed, 0.1)),
                lambda one=as_one: op.dropout_backward(*x(), seed, 0.1, dtype, [False, False], one["quantizer"], None, one["mask"]),
            ),
            "dropout backward, bias": (
                lambda codes=codes: codes(op.dropout_backward(*x(), seed, 0.1, dtype, [True, True])[0]),
                lambda one=as_one: op.dropout_backward(*x(), seed, 0.1, dtype, [False, True], one["quantizer"], None, one["mask"]),
            ),
            "SwiGLU": (
                lambda codes=codes: codes(op.activation_forward(*z(), None, "silu", True, [False, True])[1]),
                lambda one=as_one: op.activation_forward(*z(), None, "silu", True, [False, False], one["quantizer"], None, one["mask"]),
            ),
            "SwiGLU backward": (
                lambda codes=codes: codes(glu_backward(*g_z(), nothing, [True, False, False])[0]),
                lambda one=as_one: glu_backward(*g_z(), one, [False, False, False]),
            ),
            "SwiGLU backward, y to codes": (
                lambda again=again: again(glu_backward(*g_z(), nothing, [True, True, False])[1]),
                lambda of_y=of_y: glu_backward(*g_z(), nothing, [True, False, False], of_y),
            ),
            "SwiGLU backward, both to codes": (
                lambda again=again, one=as_one: again(glu_backward(*g_z(), one, [False, True, False])[1]),
                lambda one=as_one, of_y=of_y: glu_backward(*g_z(), one, [False, False, False], of_y),
            ),
            "SwiGLU backward, bias": (
                lambda codes=codes: codes(glu_backward(*g_z(), nothing, [True, False, True])[0]),
                lambda one=as_one: glu_backward(*g_z(), one, [False, False, True]),
            ),
            "sum of a bias's gradient": (
                lambda codes=codes: (lambda g: (op.sum_rows(g, dtype), codes(g)))(*x()),
                lambda one=as_one: op.sum_rows(*x(), dtype, one["quantizer"], None, one["mask"]),
            ),
        }
        for what, (apart, together) in pairs.items():
            times = interleaved({"apart": apart, "together": together}, rounds=9, seconds=0.03)
            ratio, has_bar = times["apart"] / times["together"], what == "RMSNorm" and name in ("1x128 blocks", "MXFP8")
            rows.append([f"{what}, {name}", str(dtype).removeprefix("torch."), f"{times['apart'] * 1e6:.0f}", f"{times['together'] * 1e6:.0f}",
                         f"{ratio:.2f}", f">= {FUSED_BAR}" if has_bar else "-", verdict(ratio >= FUSED_BAR) if has_bar else ""])
    return rows


def run() -> str:
    torch.set_num_threads(2)
    rivals = torchao_quantizers()
    rotation = Rotation(lambda: (torch.randn(ROWS, HIDDEN).bfloat16(),))
    loops = Loops((ROWS, HIDDEN), torch.bfloat16, 1, 1)
    rows = []
    for name, quantizer, reads, code_bytes, bar in QUANTIZERS:
        scale = torch.tensor(1.0) if "delayed" in quantizer else torch.tensor(1) if "sr=1" in quantizer else None  # a scale, or the seed of stochastic rounding
        quantize = lambda both, of=quantizer, by=scale: torch.ops.tandem.quantize(*rotation(), by, of, [True, both, True])  # noqa: E731
        candidates: dict[str, Callable[[], object]] = {"rows": lambda call=quantize: call(False)}
        has_columns = "fp8_e4m3" not in quantizer or quantizer.startswith("mx")
        if has_columns:
            candidates["both"] = lambda call=quantize: call(True)
        if (rival := rivals.get(name)) is not None:
            candidates["torchao"] = lambda call=rival: call(*rotation())
            torch._dynamo.reset()
            if (compiled := compiled_or_none(rival, rotation()[0])) is not None:
                candidates["compiled"] = lambda call=compiled: call(*rotation())
        with torch.no_grad():
            times = interleaved({**candidates, **loops.candidates}, rounds=9, seconds=0.03)
        seconds_per_byte = loops.seconds(times) / (2 * 2 * ELEMENTS)
        share = ELEMENTS * (2 * reads + code_bytes) * seconds_per_byte / times["rows"]
        shown = lambda which: f"{times[which] * 1e6:.0f}" if which in times else "-"  # noqa: E731,B023
        faster = {which: times[which] / times["rows"] for which in ("torchao", "compiled") if which in times}
        is_met = (bar is None or share >= bar) and faster.get("torchao", EAGER_BAR) >= EAGER_BAR and faster.get("compiled", COMPILED_BAR) >= COMPILED_BAR
        rows.append([name, *map(shown, ("rows", "both", "torchao", "compiled")), f"{share:.2f}", f">= {bar}" if bar else "-",
                     *(f"{faster[which]:.1f}" if which in faster else "-" for which in ("torchao", "compiled")), verdict(is_met) if bar else ""])
    header = ["quantizer", "by rows", "both ways", "torchao", "compiled", "x limit", "bar", f"x torchao (bar {EAGER_BAR:g})", f"x compiled (bar {COMPILED_BAR})", ""]
    rest = [] if rivals else ["torchao is not installed: `pip install torchao` into .venv shows it beside these"]
    with torch.no_grad():
        both = [*fused(torch.float32), *fused(torch.bfloat16)]
    rest.append(table(f"{ROWS}x{HIDDEN}, codes of rows and of columns, us", ["kernel", "dtype", "apart", "together", "ratio", "bar", ""], both))
    text = table(f"quantize {ROWS}x{HIDDEN} bfloat16, us", header, rows)
    return "\n\n".join([text, *rest])
