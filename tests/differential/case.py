"""A case: the description of one differential test as a literal of Python. Its text reproduces a failure.

    {"x": {"s": (3, 8), "d": "f32"}, "ops": [{"k": "linear", "out": 4}, {"k": "gelu"}], "mode": {"run": "compile"}, "seed": 7}

Missing keys have defaults, and sizes follow from the ops before, so that most cases stay valid when ops or keys are dropped.
"""

from __future__ import annotations

import ast
import math
from typing import Any

import torch

Case = dict[str, Any]
DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}
# Kinds of ops by their effect on shapes; a kind "py_..." is a class of python_ops.py.
KEEPS_SHAPE = {"bias", "rms", "ln", "gelu", "silu", "relu", "qgelu", "srelu", "identity", "quantize", "scale", "dropout", "add", "modulate", "make", "s_srelu", "l2"}
HALVES = {"swiglu", "geglu", "glu", "qgeglu", "reglu", "sreglu", "situ", "clamped", "s_swiglu", "s_situ", "s_clamped"}  # "il": columns of a block
SCALED = {"s_srelu", "s_swiglu", "s_situ", "s_clamped"}  # these multiply each row by a number
WITH_PARAMS = {"linear", "basic", "grouped", "bias", "rms", "ln", "py_weighted", "py_child", "py_buffer"}
PLAIN = {"nn_tanh", "nn_neg", "nested"}


class Invalid(Exception):
    """The text is no valid case, such as after a shrinker dropped a key that was needed."""


def parse(text: str) -> Case:
    case = ast.literal_eval(text)
    case.setdefault("mode", {})
    return case


def text_of(case: Case) -> str:
    return repr(case).replace("'", '"')


def resolve(case: Case) -> list[Case]:
    """The ops with everything that follows from other ops: sizes of parameters, shapes of extra tensors, channels, shared modules."""
    shape = tuple(case["x"]["s"])
    resolved: list[Case] = []
    channels: dict[str, tuple[int, ...]] = {}
    written: set[str] = set()
    for given in case["ops"]:
        op = dict(given)
        op["i"], op["in_shape"] = len(resolved), shape
        _need(("same" in op) == (op["k"] == "same"))
        if "same" in op:
            op = _shared(op, resolved)
        kind = op["k"]
        if kind in PLAIN:
            channels, written = {}, set()  # channels end at modules that are no ops
        if kind in ("linear", "basic"):
            _need(len(shape) >= 1)
            op["in"] = shape[-1]
            _need(op["in"] > 0)
            shape = (*shape[:-1], op["out"])
        elif kind == "grouped":
            _need(len(shape) >= 1 and shape[-1] > 0)
            op["in"], op["splits"] = shape[-1], shared_out(math.prod(shape[:-1]), op.get("parts", (1,)), op.get("behind", 0))
            shape = (*shape[:-1], op["out"])
        elif kind in HALVES:
            _need(len(shape) >= 1 and shape[-1] % (2 * op.get("il", 1)) == 0 and shape[-1] > 0)
            shape = (*shape[:-1], shape[-1] // 2)
        elif kind == "reshape":
            shape = reshaped(shape, op["shape"])
        elif kind in ("bias", "rms", "ln", "py_weighted", "py_child", "py_buffer"):
            _need(len(shape) >= 1 and shape[-1] > 0)
            op["in"] = shape[-1]
        elif kind == "l2":
            _need(len(shape) >= 1 and shape[-1] > 0)
        elif kind == "nested":
            inner = {"x": {"s": shape}, "ops": op["ops"]}
            op["resolved"] = resolve(inner)
            _need(not any(o.get("extras") or o["outputs"] for o in op["resolved"]))
            shape = op["resolved"][-1]["out_shape"] if op["resolved"] else shape
        if "same" in op:
            _need(op.get("in") == resolved[op["same"]].get("in"))
        _wire(op, shape, channels, written)
        op["out_shape"] = shape
        resolved.append(op)
    return resolved


def _shared(op: Case, resolved: list[Case]) -> Case:
    _need(op["same"] < len(resolved))
    original = resolved[op["same"]]
    _need(original["k"] not in PLAIN and not {"ch", "ch_out", "same"} & original.keys())
    _need(original["k"] not in ("dropout",))
    own = {key: op[key] for key in ("i", "in_shape", "same", "d", "g", "l", "from") if key in op}
    return {**{key: value for key, value in original.items() if key not in ("d", "g", "l", "from", "hook")}, **own, "d": original.get("d", "f32")}


def _wire(op: Case, shape: tuple[int, ...], channels: dict, written: set) -> None:
    """Notes the extra tensors that an op takes from the caller, its channels, and its extra outputs to the caller."""
    kind = op["k"]
    op["extras"], op["outputs"] = [], []
    if kind == "grouped":
        op["extras"].append({"s": (len(op["splits"]),), "d": "i64", "v": op["splits"]})
    takes = kind in ("add", "modulate") or kind in SCALED or kind in ("py_swap", "py_swap_whole", "py_product")
    taken = shape
    if kind in SCALED:
        _need(len(shape) >= 1)
        taken = shape[:-1]
    gives = kind == "make" or kind in ("py_swap", "py_swap_whole", "py_outputs")
    if takes:
        channel = op.get("ch")
        if channel in channels and channels[channel] == taken:
            op["read"] = channel
        else:
            op["extras"].append({"s": _smaller(taken, op.get("bc", 0)) if kind in ("add", "modulate") and not op.get("ip") else taken, "d": op.get("d", "f32"), "l": op.get("l", "plain"), "g": op.get("g", 1), "from": op.get("from")})
    if gives:
        channel = op.get("ch_out")
        if channel is not None and channel not in written:
            channels[channel] = shape
            written.add(channel)
            op["write"], op["to_caller"] = channel, bool(op.get("to_caller", 1))
            if op["to_caller"]:
                op["outputs"].append("extra")
        else:
            op["outputs"].append("extra")
        if kind == "py_outputs":
            op["outputs"].append("second")
    if kind == "dropout" and 0 < op.get("p", 0.5) < 1 and not op.get("eval"):
        op["outputs"].append("probe")


def shared_out(rows: int, parts: tuple[int, ...], behind: int) -> tuple[int, ...]:
    """Numbers of rows of the groups in the proportions `parts`, with a share `behind` of rows after the last group."""
    total = max(sum(parts) + behind, 1)
    ends = [rows * sum(parts[:n]) // total for n in range(len(parts) + 1)]
    return tuple(last - first for first, last in zip(ends, ends[1:], strict=False))


def _smaller(shape: tuple[int, ...], how: int) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`: its last dimension alone (how=1), or with size 1 in the first dimension (how=2)."""
    if how == 0 or not shape:
        return shape
    return shape[-1:] if how == 1 else (1, *shape[1:])


def reshaped(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    count = math.prod(shape)
    known = math.prod(size for size in target if size != -1)
    if -1 in target:
        _need(known > 0 and count % known == 0)
        return tuple(count // known if size == -1 else size for size in target)
    _need(known == count)
    return tuple(target)


def _need(condition: bool) -> None:
    if not condition:
        raise Invalid
