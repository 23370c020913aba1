"""Random cases. A seed and a kind, "eager" or "compiled", determine one case."""

from __future__ import annotations

import math
import random
from typing import Any

from differential import case as cases
from differential.case import Case

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 9, 12, 15, 16, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65)
ROWS = ((), (0,), (1,), (2,), (3,), (3,), (5,), (7,), (8,), (17,), (2, 3), (3, 1), (1, 4), (2, 0), (2, 3, 2), (2, 1, 3))
LAYOUTS = ("plain",) * 6 + ("t", "perm", "step", "expand", "rows", "slice") + ("wild",) * 4
KINDS = (
    ["linear"] * 6 + ["basic"] * 3 + ["grouped"] * 4 + ["bias"] * 3 + ["rms"] * 4 + ["ln"] * 4 + ["l2"] * 2 + ["gelu"] * 3 + ["silu"] * 2 + ["relu"] * 3
    + ["swiglu"] * 4 + ["geglu"] * 2 + ["qgelu", "srelu", "glu", "qgeglu", "reglu", "sreglu"] + ["situ", "clamped"] * 2 + sorted(cases.SCALED) + ["identity"] * 2 + ["reshape"] * 2 + ["scale"] * 2 + ["dropout"] * 2 + ["quantize"] * 2
    + ["add"] * 6 + ["make"] * 6 + ["modulate"] * 2
)
PYTHON = ["py_weighted", "py_sin", "py_swap", "py_swap_whole", "py_product", "py_outputs", "py_child", "py_buffer"]


def generate(seed: int, kind: str) -> Case:
    r = random.Random(f"{kind} {seed}")
    mode = _mode(r, kind)
    dtype = r.choice(["f32"] * 5 + ["f64"] * (0 if "recipe" in mode and r.random() < 0.9 else 3) + ["bf16"] * 2 + ["f16"])
    mixed = r.random() < 0.2
    case: Case = {"x": _given(r, (*r.choice(ROWS), r.choice(WIDTHS)), dtype, mixed, "x"), "ops": [], "mode": mode, "seed": seed}
    if r.random() < 0.25:
        case["params"] = "wild"
    has_python, has_in_place = r.random() < 0.15, r.random() < 0.15
    plain_between = r.random() < 0.1
    sharing = r.random() < 0.2
    wanted = 1 + min(int(r.expovariate(0.22)), 14)
    _fill(r, case, wanted, dtype, mixed, has_python, has_in_place, plain_between, sharing)
    if r.random() < 0.04 and len(case["ops"]) > 1:
        r.choice([op for op in case["ops"] if op["k"] not in cases.PLAIN] or [{}])["hook"] = 1
    _limit_mode(r, case)
    if r.random() < 0.02:  # large enough for products that a matrix library computes
        case["x"]["s"] = (r.choice([64, 127, 200]), case["x"]["s"][-1])
        for op in case["ops"]:
            if "out" in op:
                op["out"] = r.choice([128, 130, 256])
        return case if _fits(case) else generate(seed + 10**12, kind)
    return case


def for_verify(r: random.Random, least: int, most: int) -> Case:
    """A case of `least` to `most` ops for `verify`, in which no op writes into an argument."""
    dtype = r.choice(["f32"] * 4 + ["f64", "bf16", "bf16", "f16"])
    has_python, sharing = r.random() < 0.15, r.random() < 0.2
    mixed = r.random() < 0.2 and not has_python  # ops in Python return the dtype of their operands
    case: Case = {"x": _given(r, (*r.choice(ROWS), r.choice(WIDTHS)), dtype, mixed, "x"), "ops": [], "mode": {"verify": 1}, "seed": r.randint(0, 999)}
    _fill(r, case, r.randint(least, most), dtype, mixed, has_python, False, False, sharing)
    return case


def _fill(
    r: random.Random, case: Case, wanted: int, dtype: str, mixed: bool, has_python: bool, has_in_place: bool, plain_between: bool, sharing: bool
) -> None:
    while len(case["ops"]) < wanted:
        case["ops"].append(_op(r, case, dtype, mixed, has_python, has_in_place, plain_between, sharing))
        if not _fits(case):
            case["ops"].pop()


def _fits(case: Case) -> bool:
    try:
        return all(math.prod(op["out_shape"]) < 2**22 for op in cases.resolve(case))
    except cases.Invalid:
        return False


def _dtype(r: random.Random, dtype: str, mixed: bool) -> str:
    return r.choice(["f32", "f64", "bf16", "f16"]) if mixed and r.random() < 0.4 else dtype


def _given(r: random.Random, shape: tuple[int, ...], dtype: str, mixed: bool, what: str) -> Case:
    spec: Case = {"s": shape} if what == "x" else {}
    spec["d"] = _dtype(r, dtype, mixed)
    if mixed and r.random() < 0.08:
        spec["d"] = r.choice(["i64", "i32", "u8"])
    layout = r.choice(LAYOUTS)
    if layout != "plain":
        spec["l"] = layout
    if r.random() < 0.25:
        spec["g"] = 0
    return spec


def _op(r: random.Random, case: Case, dtype: str, mixed: bool, has_python: bool, has_in_place: bool, plain_between: bool, sharing: bool) -> Any:
    resolved = cases.resolve(case)
    shape = resolved[-1]["out_shape"] if resolved else tuple(case["x"]["s"])
    kind = r.choice(PYTHON) if has_python and r.random() < 0.4 else r.choice(KINDS)
    if plain_between and r.random() < 0.15:
        kind = r.choice(["nn_tanh", "nn_neg", "nested"])
    if kind == "ln" and shape and shape[-1] == 2:  # a LayerNorm of two features returns only their signs, and gradients are mere roundings
        kind = "rms"
    op: Case = {"k": kind}
    if sharing and r.random() < 0.4:
        fitting = [o for o in resolved if o.get("in", shape[-1:] and shape[-1]) == (shape[-1] if shape else None) and o["k"] not in cases.PLAIN]
        if fitting:
            op = {"k": "same", "same": r.choice(fitting)["i"]}
            return {**op, **_extra_of(r, case, resolved, shape, dtype, mixed)} if r.random() < 0.3 else op
    own = _dtype(r, dtype, mixed)
    if kind in cases.WITH_PARAMS and own != "f32":
        op["d"] = own
    if kind in ("linear", "basic"):
        op["out"] = r.choice(WIDTHS) if r.random() < 0.5 else 2 * r.choice((1, 2, 3, 4, 8, 9, 16, 17, 32))
        if r.random() < 0.35 and shape:
            op["out"] = shape[-1]
        if kind == "linear" and r.random() < 0.35:
            op["bias"] = 0
    elif kind == "grouped":
        op["out"] = 2 * r.choice((1, 2, 3, 4, 8, 9, 16, 17, 32))
        op["parts"] = tuple(r.choices((0, 1, 1, 2, 5), k=r.randint(1, 5)))
        for name, share in (("behind", 0.2), ("packed", 0.3)):
            if r.random() < share:
                op[name] = 1
        if r.random() < 0.4:
            op["bias"] = 0
    elif kind in ("rms", "ln"):
        if r.random() < 0.3:
            op["eps"] = r.choice([1e-3, 1e-6, 0.1])
        share = r.random()  # one draw for two options, so that some cases have both
        if share < 0.3:
            op["zc"] = 1
        if kind == "rms" and 0.2 < share < 0.5:
            op["rw"] = 1
    elif kind == "l2":
        if r.random() < 0.5:
            op["eps"] = r.choice([1e-3, 0.1])
    elif kind in cases.HALVES and shape and r.random() < 0.3:
        op["il"] = r.choice([size for size in (1, 2, 3, 4, 8, 16, 32) if shape[-1] % (2 * size) == 0] or [1])
    elif kind == "scale":
        op["f"] = r.choice([2.0, -1.5, 0.3, 1.0, 0.0])
    elif kind == "dropout":
        op["p"] = r.choice([0.5, 0.5, 0.25, 0.0, 1.0])
        if r.random() < 0.2:
            op["eval"] = 1
    elif kind == "quantize":
        op["fwd"], op["bwd"] = r.choice([(1, 0), (0, 1), (1, 1), (0, 0)])
    elif kind == "reshape":
        op["shape"] = _target(r, shape)
    elif kind == "nested":
        op["ops"] = [{"k": k, **({"d": own} if k in cases.WITH_PARAMS else {})} for k in r.choices(["rms", "gelu", "bias", "relu", "scale", "ln"], k=r.randint(0, 3))]
    if kind in ("situ", "s_situ", "clamped", "s_clamped") and r.random() < 0.5:
        op["n"] = r.choice([(0.5, 2.0), (10.0, 0.1)] if "situ" in kind else [(0.75, 1.0, 0.5), (1.5, -0.5, 0.0), (2.0, 0.0, -1.0)])
    if kind in ("add", "modulate") or kind in cases.SCALED or kind in ("py_swap", "py_swap_whole", "py_product"):
        op.update(_extra_of(r, case, resolved, shape, dtype, mixed))
        if r.random() < {"add": 0.15, "modulate": 0.7}.get(kind, 0):
            op["bc"] = r.choice([1, 2])
        if kind == "modulate" and r.random() < 0.5:
            op["zc"] = 1
        if kind == "add" and has_in_place and r.random() < 0.6:
            op["ip"] = 1
            if r.random() < 0.15:
                op["leaf"] = 1
    if kind in ("make", "py_swap", "py_swap_whole", "py_outputs"):
        if r.random() < 0.6:
            op["ch_out"] = f"c{len(resolved)}"
            op["to_caller"] = int(r.random() < 0.4)
        if kind == "make" and r.random() < 0.15:
            op["ip"] = 1
    if kind in cases.WITH_PARAMS:
        if r.random() < 0.2:
            op["frozen"] = r.choice(["w", "b", "wb"])
        if sharing and r.random() < 0.3 and resolved:
            tied = [o["i"] for o in resolved if o["k"] == kind and o.get("in") == shape[-1:][0] and o.get("out") == op.get("out")] if shape else []
            if tied:
                op["tie"] = r.choice(tied)
    return op


def _extra_of(r: random.Random, case: Case, resolved: list[Case], shape: tuple[int, ...], dtype: str, mixed: bool) -> Case:
    """The source of an extra input: a channel, a tensor of the caller, or x or a parameter of the same case."""
    names = [o["write"] for o in resolved if "write" in o]
    if names and r.random() < 0.7:
        return {"ch": r.choice(names)}
    extra = _given(r, shape, dtype, mixed, "extra")
    if r.random() < 0.08:
        extra["from"] = "x" if r.random() < 0.6 else r.randint(0, 2)
    return extra


def _target(r: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    count, last = math.prod(shape), shape[-1] if shape else 1
    divisors = [d for d in (1, 2, 3, 4, 8, last) if d and count and count % d == 0] or [1]
    d = r.choice(divisors)
    options: list[tuple[int, ...]] = [(-1, last) if last else (0, 0), shape]
    if count:
        options += [(-1, d), (d, -1), (-1,), (count // d, d), (-1, 1, last)]
    return r.choice(options)


def _mode(r: random.Random, kind: str) -> Case:
    mode: Case = {}
    if kind == "compiled":
        mode["run"] = "compile"
        if r.random() < 0.03:
            mode["backend"] = "inductor"
        if r.random() < 0.3:
            mode["dynamic"] = True
    elif r.random() < 0.12:
        mode["run"] = r.choice(["ckpt", "ckpt_re"])
    roll = r.random()
    if roll < 0.08:
        mode["grad"] = "no_grad"
    elif roll < 0.13 and kind == "eager":
        mode["grad"] = "inference"
    if kind == "eager" and r.random() < 0.12 and "run" not in mode:
        mode["hooks"] = r.choice(["copy", "numpy", "cpu"])
    if r.random() < 0.15:
        mode["ac"] = r.choice(["bf16", "bf16", "f16"])
    if r.random() < 0.15:
        mode["recipe"] = _recipe(r)
    if kind == "eager" and "run" not in mode and "hooks" not in mode and r.random() < 0.04:
        mode["func"] = r.choice(["vjp", "call"])
    if r.random() < 0.4:
        mode["bw"] = r.choice(["retain", "batched", "acc", "thread"] if kind == "eager" else ["retain", "acc", "thread"])
    if r.random() < 0.3:
        mode["gl"] = r.choice(["expand", "strided", "t", "wild", "wild"])
    if r.random() < 0.25:
        mode["give"] = tuple(sorted(r.sample(range(6), r.randint(1, 3))))
    if r.random() < 0.25:
        mode["ask"] = tuple(sorted(r.sample(range(10), r.randint(1, 5))))
    if kind == "eager" and "run" not in mode and r.random() < 0.06:
        mode["mut"] = r.randint(0, 3)
        if r.random() < 0.3:
            mode["leaf"] = 1
    if r.random() < 0.12:
        mode["warm"] = r.choice([1, 2])
    if r.random() < 0.08:
        mode["eval"] = 1
    if r.random() < 0.2:
        mode["budget"] = r.choice([0, 8, 64, 10**6])
    if kind == "eager" and r.random() < 0.04:
        mode["verify"] = 1
    if r.random() < 0.05:
        mode["fuse"] = tuple(r.sample(["relu_scale", "silu_scale", "gelu_scale", "bias_relu"], r.randint(1, 4)))
    return mode


def _recipe(r: random.Random) -> Case:
    recipe: Case = {}
    if r.random() < 0.4:
        recipe["kind"] = r.choice(["block", "mxfp8", "nvfp4", "delayed"])
        if r.random() < 0.5 and recipe["kind"] != "nvfp4":
            recipe["format"] = "E4M3"
        if r.random() < 0.3 and recipe["kind"] == "block":
            recipe["f32"] = 1
        return recipe
    if r.random() < 0.3:
        recipe["pow2"] = 1
    if r.random() < 0.3:
        recipe["format"] = "E4M3"
    if r.random() < 0.2:
        recipe["eps_" + r.choice(["input", "weight", "grad_output"])] = r.choice([1e-3, 8.0])
    return recipe


def _limit_mode(r: random.Random, case: Case) -> None:
    """Drops options that exclude each other: a checkpoint runs forward twice, so no op in it may write an argument; hooks do not see functional calls."""
    mode = case["mode"]
    if mode.get("recipe", {}).get("kind") == "delayed":  # a step changes the state, so no step may run twice
        mode.pop("func", None)
        if mode.get("bw") in ("retain", "batched"):
            mode.pop("bw")
        if mode.get("run") in ("ckpt", "ckpt_re"):
            mode.pop("run")
    in_place = any(op.get("ip") for op in case["ops"])
    if mode.get("bw") == "batched":  # torch sums batched products in another order, which gives other bits
        mode.pop("budget", None)
    if "hooks" in mode and ("params" in case or any("l" in drawn for drawn in (case["x"], *case["ops"]))):
        for key in ("budget", "verify"):  # hooks return tensors of another layout, for which torch's operations give other bits
            mode.pop(key, None)
    if mode.get("run") == "compile" and in_place:  # compiled code writes into no argument, so it needs a smaller budget
        mode.pop("budget", None)
    if mode.get("bw") == "batched" and any(op["k"] == "grouped" for op in case["ops"]):
        mode.pop("bw")  # torch cannot batch products of lists of matrices
    if "func" in mode and any("tie" in op for op in case["ops"]) and any("same" in op for op in case["ops"]):
        mode.pop("func")  # torch.func does not restore the parameter of a module that is listed twice and shares it with another module
    if "func" in mode:
        for key in ("mut", "bw", "give", "ask", "grad", "warm", "fuse"):
            mode.pop(key, None)
        for op in case["ops"]:
            if op["k"] == "dropout":
                op["p"] = 0.0
    if "fuse" in mode:  # fusions in Python ignore recipes and autocast; pairs of ops that they match are added
        mode.pop("recipe", None)
        mode.pop("ac", None)
        for _ in range(r.randint(1, 3)):
            at = r.randint(0, len(case["ops"]))
            pair = r.choice([["relu", "scale"], ["silu", "scale"], ["gelu", "scale"]])
            _insert(case, at, [{"k": pair[0]}, {"k": pair[1], "f": r.choice([2.0, -0.5])}])
    if mode.get("grad") in ("no_grad", "inference"):
        for key in ("mut", "bw", "give", "ask", "gl", "hooks"):
            mode.pop(key, None)
    if mode.get("mut") is not None or mode.get("run") or mode.get("func") or mode.get("grad") or any(op.get("ip") for op in case["ops"]):
        mode.pop("verify", None)  # `verify` runs its own backward, and no op may write into its arguments
    if mode.get("mut") is not None and mode.get("hooks") == "cpu":  # save_on_cpu keeps a CPU tensor itself, so a later write would change it
        mode.pop("hooks")
    if mode.get("run") in ("ckpt", "ckpt_re"):
        mode.pop("mut", None)
        if "recipe" in mode and r.random() < 0.6:
            mode["inside"] = 1  # backward runs inside the region too
        if mode["run"] == "ckpt_re":  # reentrant checkpoints support torch.autograd.backward only
            mode.pop("ask", None)
            mode["bw"] = "acc"
        elif mode.get("bw") == "batched":  # torch cannot redraw random numbers under vmap
            mode.pop("bw")


def _insert(case: Case, at: int, ops: list[Case]) -> None:
    count = len(ops)
    for op in case["ops"]:
        for key in ("same", "tie"):
            if key in op and op[key] >= at:
                op[key] += count
    case["ops"][at:at] = ops
